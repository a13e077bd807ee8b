"""What to tell bubblewrap.

Owns: the composition of its arguments.

Must not know: where it is, how processes are started or limited.

Guarantees: pure. Every command line drops all capabilities, has its own PID, mount, IPC and UTS namespaces,
dies with its parent, and shows only what it was given; it is started inside the sandbox's own network
namespace. The command line, which the sandbox can read, holds only its own command: everything else goes by
file descriptor.
"""

from __future__ import annotations

import msgspec

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
    out = ["--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    out += ["--unshare-cgroup-try", "--hostname", "sandbox", "--cap-drop", "ALL"]
    if fds.userns is None:
        out += ["--unshare-user", "--uid", str(user), "--gid", str(user)]
    else:
        # As a block descriptor it is closed before the command starts, which --userns alone would not do.
        out += ["--userns", str(fds.userns), "--block-fd", str(fds.userns)]
    return [*out, "--seccomp", str(fds.seccomp), "--json-status-fd", str(fds.status)]
