"""Helpers for tests of templates: archives, image layouts, stores."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

import pytest

from venusrl.sandboxes.templates.store import Store

_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture
def without_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk, which other tests keep busy."""
    for name in ("_flush", "_flush_directory"):
        monkeypatch.setattr(f"venusrl.sandboxes.templates.store.{name}", lambda _folder: None)
    monkeypatch.setattr("os.fsync", lambda _fd: None)


class Member(tarfile.TarInfo):
    """A member with its content."""

    content: bytes | None = None


def entry(name: str, content: bytes | None = None, kind: bytes = tarfile.REGTYPE, **fields: Any) -> Member:
    """A member of an archive."""
    info = Member(name)
    info.type = kind
    info.mode = fields.pop("mode", 0o755 if kind == tarfile.DIRTYPE else 0o644)
    info.size = len(content) if content is not None else 0
    for key, value in fields.items():
        setattr(info, key, value)
    info.content = content
    return info


def archive(*entries: Member) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as made:
        for info in entries:
            made.addfile(info, io.BytesIO(info.content) if info.content is not None else None)
    return buffer.getvalue()


def directory(name: str, **fields: Any) -> Member:
    return entry(name, kind=tarfile.DIRTYPE, **fields)


def symlink(name: str, target: str) -> Member:
    return entry(name, kind=tarfile.SYMTYPE, linkname=target)


def store(root: Path) -> Store:
    made = Store(root / "store")
    made.prepare()
    return made


def layout(folder: Path, layers: list[bytes], *, packed: list[bytes] | None = None, **config: Any) -> Path:
    """An OCI image layout of plain (or, given ``packed``, otherwise compressed) layers."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(content: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    diffs = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    settings = put(
        json.dumps(
            {
                "os": "linux",
                "architecture": _ARCHITECTURE,
                "rootfs": {"type": "layers", "diff_ids": diffs},
                "config": config,
            }
        ).encode(),
        "application/vnd.oci.image.config.v1+json",
    )
    described = [put(content, "application/vnd.oci.image.layer.v1.tar") for content in packed or layers]
    manifest = put(json.dumps({"schemaVersion": 2, "config": settings, "layers": described}).encode(), _MANIFEST)
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    return folder
