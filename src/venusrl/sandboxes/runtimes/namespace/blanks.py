"""Empty file systems in files, one for each size that was ever asked for: what a sandbox's disk is copied from.

Owns: their directory, their making (mkfs.ext4), what this machine lacks for disks in files.

Must not know: loop devices and mounts (``maker.c``), sandboxes.

Guarantees: a blank is whole or not there. It takes 128 KiB; a sandbox's copy takes what is written, has no name, and
goes with the sandbox.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path

from venusrl.sandboxes.protocol import HostDiskFull, RuntimeUnavailable, SandboxError
from venusrl.sandboxes.runtimes.namespace.orders import FILES_PER_MIB

_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
_OPTIONS = (
    *(
        "-q",
        "-F",
        "-b",
        "4096",
        "-m",
        "0",
        "-O",
        "^has_journal,^resize_inode",
    ),  # it never outlives a crash of the machine
    *("-E", "lazy_itable_init=1,nodiscard"),
)
_MKFS_S = 60.0
_SMALLEST_MIB = 4


class Blanks:
    """``folder`` is on the file system that sandboxes' files are to fill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._making = asyncio.Lock()

    def start(self) -> None:
        """Raises RuntimeUnavailable with the mend."""
        if os.geteuid() != 0:
            raise RuntimeUnavailable("only root can give sandboxes disks in files: start as root, or say --disk memory")
        if shutil.which("mkfs.ext4", path=_PATH) is None:
            raise RuntimeUnavailable("disks in files need mkfs.ext4: install e2fsprogs, or say --disk memory")
        if not os.path.exists("/dev/loop-control"):
            raise RuntimeUnavailable(
                "disks in files need loop devices, and there is no /dev/loop-control: load the module loop, give the "
                "container its devices, or say --disk memory"
            )
        self.folder.mkdir(mode=0o700, exist_ok=True)

    async def blank(self, mib: int) -> Path:
        """An empty disk of so many MiB. Raises HostDiskFull where it could not be filled now, SandboxError."""
        size = max(_SMALLEST_MIB, mib)
        space = os.statvfs(self.folder)
        if space.f_bavail * space.f_frsize < size << 20:
            raise HostDiskFull(f"{self.folder} has less room than a sandbox's whole disk ({size} MiB): free some")
        place = self.folder / f"{size}.ext4"
        async with self._making:
            if not await asyncio.to_thread(place.exists):
                await _make(place, size)
        return place


async def _make(place: Path, mib: int) -> None:
    part = place.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.truncate(mib << 20)
        process = await asyncio.create_subprocess_exec(
            *("mkfs.ext4", *_OPTIONS, "-N", str(max(2048, mib * FILES_PER_MIB)), str(part)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": _PATH},
        )
        try:
            _, said = await asyncio.wait_for(process.communicate(), _MKFS_S)
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            raise SandboxError(f"a sandbox's disk could not be made: {said.decode(errors='replace').strip()[:500]}")
        part.rename(place)
    except TimeoutError:
        raise SandboxError(f"mkfs.ext4 did not end in {_MKFS_S:.0f} s") from None
    finally:
        part.unlink(missing_ok=True)
