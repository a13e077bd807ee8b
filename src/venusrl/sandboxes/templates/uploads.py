"""Archives that clients send for COPY.

Owns: where they are kept.

Must not know: builds, what is in them.

Guarantees: an upload is there whole or not at all. One tenant's is never another's: its name is the client's word for
the content, not a digest that can be checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from venusrl.sandboxes.templates.errors import BadTemplate
from venusrl.sandboxes.templates.store import disk_errors

_HASH = re.compile(r"[0-9a-f]{64}")


class Uploads:
    """Below ``root``; none is larger than ``most`` bytes."""

    def __init__(self, root: Path, most: int) -> None:
        self._root = root
        self._most = most

    def prepare(self) -> None:
        with disk_errors(self._root):
            self._root.mkdir(mode=0o700, exist_ok=True)

    def has(self, tenant: str, files_hash: str) -> bool:
        return self._path(tenant, files_hash).exists()

    def find(self, tenant: str, files_hash: str) -> Path:
        """Raises BadTemplate."""
        path = self._path(tenant, files_hash)
        if not path.exists():
            raise BadTemplate("the files of this step were not uploaded: upload them, then build")
        return path

    async def put(self, tenant: str, files_hash: str, data: AsyncIterator[bytes]) -> None:
        """Raises BadTemplate when it is too large, HostDiskFull."""
        path = self._path(tenant, files_hash)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        size = 0
        try:
            with disk_errors(self._root), part.open("xb") as file:
                async for piece in data:
                    size += len(piece)
                    if size > self._most:
                        raise BadTemplate(f"an upload has at most {self._most >> 20} MiB")
                    await asyncio.to_thread(file.write, piece)
                await asyncio.to_thread(os.fsync, file.fileno())
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)

    def _path(self, tenant: str, files_hash: str) -> Path:
        if _HASH.fullmatch(files_hash) is None:
            raise BadTemplate("a files hash is 64 hexadecimal digits")
        return self._root / hashlib.sha256(tenant.encode()).hexdigest()[:16] / f"{files_hash}.tar"
