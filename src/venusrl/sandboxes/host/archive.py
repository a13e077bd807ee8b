"""A directory on its way to another host, as one file.

Owns: packing, and unpacking what another host packed.

Must not know: what is in it.

Guarantees: what is unpacked is plain files and directories below the target, at most so many bytes and files.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path, PurePosixPath

from venusrl.sandboxes.protocol import SandboxError

_PIECE = 1 << 20
_FILES = 100_000


def pack(directory: Path, target: Path) -> None:
    """Blocks."""
    with tarfile.open(target, "x", format=tarfile.PAX_FORMAT) as archive:
        archive.add(directory, ".", recursive=True)


def unpack(source: Path, target: Path, bound: int) -> None:
    """At most ``bound`` bytes. Blocks. Raises SandboxError for anything but plain files and directories below."""
    target.mkdir(mode=0o700)
    seen = total = 0
    try:
        with tarfile.open(source) as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                seen, total = seen + 1, total + member.size
                if path.is_absolute() or ".." in path.parts or seen > _FILES or total > bound:
                    raise SandboxError(f"a move's archive is out of bounds at {member.name[:100]!r}")
                if member.isdir():
                    (target / path).mkdir(mode=0o700, parents=True, exist_ok=True)
                elif member.isreg() and (content := archive.extractfile(member)) is not None:
                    with (target / path).open("xb") as file:
                        shutil.copyfileobj(content, file, _PIECE)
                    (target / path).chmod(member.mode & 0o700)
                else:
                    raise SandboxError(f"a move's archive has something that is no plain file: {member.name[:100]!r}")
    except (tarfile.TarError, OSError) as error:
        raise SandboxError(f"a move's archive cannot be unpacked: {error}") from None
