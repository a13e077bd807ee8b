"""What this machine can isolate, for ``venusrl doctor`` and for error messages.

Owns: the checks and their sentences. They try the real thing: a node in a temporary directory, a sandbox, a
command in it.

Must not know: recipes, runs.

Guarantees: nothing is left behind; takes a second or two; never raises for something that is merely missing.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import msgspec

from venusrl.sandboxes.node import EmbeddedNode
from venusrl.sandboxes.protocol import Limits, SandboxError
from venusrl.sandboxes.runtimes.namespace import program, wire

_LIMITS = Limits(memory_mib=128, pids=32, disk_mib=16, command_timeout_s=20)
_CGROUP_MEND = (
    "start as root, or on cgroup v2 in a delegated scope: systemd-run --user --scope -p Delegate=yes venusrl ... "
    "(until then each process has its limits, but not the sandbox as a whole)"
)


class Check(msgspec.Struct, frozen=True):
    """One finding. ``mend`` is empty when ``ok``; ``required`` says whether sandboxes work without it."""

    name: str
    ok: bool
    detail: str
    mend: str = ""
    required: bool = True


def probe() -> list[Check]:
    """Look at this machine. May be called with or without a running event loop."""
    try:
        found = program.find()
        version = ".".join(map(str, program.version_of(found)))
    except SandboxError as error:
        return [_lack("bubblewrap", error)]
    checks = [Check("bubblewrap", True, f"{version} at {found.program}")]
    # A thread of its own: the caller may be inside an event loop.
    worker = threading.Thread(target=lambda: checks.extend(asyncio.run(_try())), name="sandbox probe")
    worker.start()
    worker.join()
    return checks


async def _try() -> list[Check]:
    with tempfile.TemporaryDirectory(prefix="venusrl-probe-") as folder:
        node = EmbeddedNode(Path(folder), "probe")
        try:
            await node.start()
        except SandboxError as error:
            return [_lack("sandbox", error)]
        try:
            assert node.report is not None
            return [*await _host(node), _groups(node.report), *await _directory(node, Path(folder))]
        finally:
            await node.close()


async def _host(node: EmbeddedNode) -> list[Check]:
    assert node.report is not None
    try:
        sandbox = await node.create("host", _LIMITS, {})
        result = await node.run(sandbox, "grep -q '^Seccomp:.*2' /proc/self/status && python3 --version")
    except SandboxError as error:
        return [_lack("sandbox", error)]
    who = "in a range of unprivileged ids" if node.report.privileged else "as your own user, in user namespaces"
    mend = "" if result.exit_code == 0 else "install python3 in /usr, or use a root file system directory as template"
    return [
        Check("sandbox", True, f"a command ran isolated, {who}, in {result.wall_s * 1000:.0f} ms"),
        Check("sandbox python3", result.exit_code == 0, result.output.strip()[-200:] or "not found", mend),
    ]


def _groups(report: wire.Report) -> Check:
    wanted = {"memory", "pids", "cpu"}
    have = set(report.cgroup_controllers)
    if wanted <= have:
        return Check("sandbox limits", True, f"memory, processes and CPU by cgroup v{report.cgroup_version}")
    lacking = ", ".join(sorted(wanted - have))
    return Check("sandbox limits", False, f"no cgroup limit on {lacking}", _CGROUP_MEND, required=False)


async def _directory(node: EmbeddedNode, folder: Path) -> list[Check]:
    """Whether a root file system directory can be a template: a tiny one with only a shell is tried."""
    root = folder / "rootfs"
    try:
        await asyncio.to_thread(tiny_root, root)
        sandbox = await node.create(str(root), _LIMITS, {})
        result = await node.run(sandbox, "echo changed > /bin/new && test -s /bin/new")
    except SandboxError as error:
        return [Check("sandbox templates", False, str(error), 'only the template "host" works here', required=False)]
    detail = "directories can be templates" if result.exit_code == 0 else result.output.strip()[-200:]
    mend = "" if result.exit_code == 0 else 'only the template "host" works here'
    return [Check("sandbox templates", result.exit_code == 0, detail, mend, required=False)]


def tiny_root(root: Path, programs: tuple[str, ...] = ("sh",)) -> None:
    """Make the smallest root file system that runs ``programs`` of this machine. Raises SandboxError."""
    (root / "bin").mkdir(parents=True)
    for name in programs:
        program = shutil.which(name)
        if program is None:
            raise SandboxError(f"this machine has no {name}")
        shutil.copy(Path(program).resolve(), root / "bin" / name)
        for library in _libraries(program):
            target = root / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)


def _libraries(program: str) -> list[str]:
    try:
        done = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"ldd {program}: {error}") from None
    return [word for line in done.stdout.splitlines() for word in line.split() if word.startswith("/")]


def _lack(name: str, error: SandboxError) -> Check:
    return Check(name, False, "not usable", str(error))
