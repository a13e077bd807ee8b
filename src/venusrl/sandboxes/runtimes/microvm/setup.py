"""What a microVM host needs besides QEMU: a guest kernel and its initramfs, made from Debian's package.

Owns: ``setup`` (the one command), the kernel's place in the state directory, the initramfs, the checks of QEMU and KVM.

Must not know: templates, sandboxes.

Guarantees: nothing is installed into the machine; the kernel appears whole or not at all. KVM counts only after it has
really booted this kernel within a few seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import RuntimeUnavailable
from venusrl.sandboxes.runtimes.microvm import programs

QEMU = "qemu-system-x86_64"
MEND = (
    "apt install qemu-system-x86 qemu-utils e2fsprogs (Debian 12: from bookworm-backports), "
    "then: venusrl env setup microvm"
)
LIVE_VERSION = (9, 0)
"""Older ones corrupt a busy guest that moves while it runs."""
READONLY_VERSION = (8, 2)
_PACKAGE = "linux-image-cloud-amd64"
NETWORK_MODULES = ("virtio_net", "tcp_diag")
_MODULES = ("virtio_pci", "virtio_blk", "virtio_console", *NETWORK_MODULES)
_PROBE_S = 6.0
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")


class Qemu(msgspec.Struct, frozen=True):
    """The QEMU of this machine."""

    path: str
    version: tuple[int, int]

    @property
    def live(self) -> bool:
        return self.version >= LIVE_VERSION


class Guest(msgspec.Struct, frozen=True):
    """Kernel and initramfs. ``id`` changes with either. ``network``: whether it can drive a network card."""

    kernel: Path
    initramfs: Path
    id: str
    network: bool = True


async def output(*command: str, timeout_s: float = 60.0) -> tuple[int, str]:
    """Exit status and everything said."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, said.decode(errors="replace")


async def check_qemu() -> Qemu:
    """Raises RuntimeUnavailable when it is missing or too old to share a template's memory safely."""
    for tool in (QEMU, "qemu-img", "mkfs.ext4"):
        if shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
            raise RuntimeUnavailable(f"{tool} is not installed: {MEND}")
    path = shutil.which(QEMU) or ""
    _, said = await output(path, "--version")
    found = re.search(r"version (\d+)\.(\d+)", said)
    if found is None:
        raise RuntimeUnavailable(f"{QEMU} does not say its version: {said[:200]}")
    version = (int(found[1]), int(found[2]))
    if version < READONLY_VERSION:
        raise RuntimeUnavailable(f"QEMU {version[0]}.{version[1]} cannot map memory read-only (8.2 can): {MEND}")
    return Qemu(path, version)


async def setup(state: Path, package: Path | None = None) -> str:
    """Prepare ``state`` (the microvm runtime's directory); say what was done. ``package``: a kernel's .deb at hand.

    Raises RuntimeUnavailable with the mend.
    """
    qemu = await check_qemu()
    kernel = state / "kernel"
    await asyncio.to_thread(state.mkdir, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=state) as work:
        deb = package or await _download(Path(work))
        tree = Path(work) / "tree"
        code, said = await output("dpkg-deb", "-x", str(deb), str(tree), timeout_s=300)
        if code:
            raise RuntimeUnavailable(f"{deb.name} cannot be unpacked: {said[-300:]}")
        made = Path(work) / "made"
        await asyncio.to_thread(_pick, tree, made)
        shutil.rmtree(kernel, ignore_errors=True)
        made.rename(kernel)
    guest = await guest_of(state, await programs.build())
    return f"QEMU {qemu.version[0]}.{qemu.version[1]}, kernel {(kernel / 'release').read_text()}, guest {guest.id}"


async def _download(work: Path) -> Path:
    code, said = await output("apt-cache", "depends", "--important", _PACKAGE)
    found = re.search(r"Depends: (linux-image-\S+)", said)
    if code or found is None:
        raise RuntimeUnavailable(f"apt knows no {_PACKAGE}: run apt-get update, or name a kernel package's file")
    process = await asyncio.create_subprocess_exec("apt-get", "-q", "download", found[1], cwd=work)
    if await asyncio.wait_for(process.wait(), 600):
        raise RuntimeUnavailable(f"apt-get download {found[1]} failed: run apt-get update")
    return (await asyncio.to_thread(lambda: list(work.glob("*.deb"))))[0]


def _pick(tree: Path, made: Path) -> None:
    """The kernel, and the modules it needs in the order they are loaded in."""
    images = sorted((tree / "boot").glob("vmlinuz-*"))
    if not images:
        raise RuntimeUnavailable("the package holds no kernel: name a linux-image package")
    made.mkdir()
    shutil.copyfile(images[0], made / "vmlinuz")
    (made / "release").write_text(images[0].name.removeprefix("vmlinuz-"))
    files = {path.stem.replace("-", "_"): path for path in tree.rglob("*.ko")}
    order: list[str] = []

    def add(name: str) -> None:
        path = files.get(name)
        if path is None:
            raise RuntimeUnavailable(f"the kernel package has no module {name}: use {_PACKAGE}")
        found = _DEPENDS.search(path.read_bytes())
        for need in (found[1].decode() if found else "").split(","):
            if need:
                add(need.replace("-", "_"))
        if name not in order:
            order.append(name)
            shutil.copyfile(path, made / f"{name}.ko")

    for name in _MODULES:
        add(name)
    (made / "order").write_text("".join(f"{name}.ko\n" for name in order))


async def guest_of(state: Path, made: programs.Programs) -> Guest:
    """Kernel and initramfs, the latter packed for these programs. Raises RuntimeUnavailable before ``setup``."""
    kernel = state / "kernel"
    if not (kernel / "order").exists():
        raise RuntimeUnavailable("the microVMs' kernel is not there: run venusrl env setup microvm")
    return await asyncio.to_thread(_pack, kernel, made)


def _pack(kernel: Path, made: programs.Programs) -> Guest:
    files = {"init": (made.init.read_bytes(), 0o755), "agent": (made.agent.read_bytes(), 0o755)}
    for path in [*kernel.glob("*.ko"), kernel / "order"]:
        files[f"modules/{path.name}"] = (path.read_bytes(), 0o644)
    archive = cpio(files)
    digest = hashlib.sha256(archive + (kernel / "vmlinuz").read_bytes()).hexdigest()[:16]
    target = kernel / f"initramfs-{digest}"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}")
        partial.write_bytes(archive)
        partial.rename(target)
    return Guest(kernel / "vmlinuz", target, digest, all((kernel / f"{name}.ko").exists() for name in NETWORK_MODULES))


def cpio(files: dict[str, tuple[bytes, int]]) -> bytes:
    """An initramfs ("newc") of regular files below directories one deep."""
    directories = {name.split("/")[0] for name in files if "/" in name}
    entries = [(name, b"", 0o040755) for name in sorted(directories | {"dev", "proc", "sys"})]
    entries += [(name, data, 0o100000 | mode) for name, (data, mode) in sorted(files.items())]
    packed = bytearray()
    for number, (name, data, mode) in enumerate([*entries, ("TRAILER!!!", b"", 0)], 1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        packed += b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        packed += bytes(-len(packed) % 4) + data
        packed += bytes(-len(packed) % 4)
    return bytes(packed)


def processor() -> str:
    """A hash of what this machine's processor is and can: a state made with KVM runs on an equal one only."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    shown = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines if ":" in line)}
    told = [shown.get(name, "") for name in ("vendor_id", "cpu family", "model", "stepping", "flags")]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


async def probe_kvm(qemu: Qemu, guest: Guest) -> str:
    """ "" when KVM boots this kernel here; else why not."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm is not there or not ours"
    try:
        _, said = await output(
            *(qemu.path, "-M", "q35", "-accel", "kvm", "-cpu", "host", "-m", "128", "-nodefaults", "-no-user-config"),
            *("-display", "none", "-serial", "stdio", "-no-reboot", "-kernel", str(guest.kernel)),
            *("-initrd", str(guest.initramfs), "-append", "console=ttyS0 quiet panic=-1 venus.probe"),
            timeout_s=_PROBE_S,
        )
    except TimeoutError:
        return f"/dev/kvm is there, but no kernel boots on it within {_PROBE_S:.0f} s"
    return "" if "venus-init: boots" in said else f"/dev/kvm boots no kernel: {said[-200:].strip()}"
