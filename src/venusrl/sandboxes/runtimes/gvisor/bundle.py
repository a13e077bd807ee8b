"""What runsc is told of a sandbox: an OCI bundle.

Owns: the configuration (pure) and the places inside.

Must not know: processes, mounts of the host, control groups.

Guarantees: the sandbox has capabilities over its own files and processes and no others, no network but its own
loopback, and sees of the host its root file system, the agent and the directory of its own socket.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from venusrl.sandboxes.runtimes.base import Spec

AGENT_DIRECTORY = "/.venusrl/bin"
SOCKET_DIRECTORY = "/.venusrl/socket"
SOCKET = "agent.sock"
_CAPABILITIES = [
    f"CAP_{name}"
    for name in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")
]


def config(spec: Spec, root: Path, agent: Path, socket: Path, *, own_tmp: bool) -> dict[str, Any]:
    """The bundle's config.json. ``root``, ``agent`` (a directory) and ``socket`` (a directory) are on the host.

    ``own_tmp``: the root has a directory /tmp.
    """
    bind = {"type": "bind", "options": ["bind", "nosuid", "nodev"]}
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts"},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "tmpfs", "options": ["size=65536k", "nosuid", "nodev"]},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        {**bind, "destination": AGENT_DIRECTORY, "source": str(agent), "options": [*bind["options"], "ro"]},
        {**bind, "destination": SOCKET_DIRECTORY, "source": str(socket)},
    ]
    if own_tmp:  # else runsc puts a memory file system there, unlimited and lost at a pause
        mounts.append({**bind, "destination": "/tmp", "source": str(root / "tmp")})
    kinds = ("bounding", "effective", "permitted")
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": str(root), "readonly": False},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [f"{AGENT_DIRECTORY}/agent", "--unix", f"{SOCKET_DIRECTORY}/{SOCKET}"],
            "env": [],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(kinds, _CAPABILITIES),
        },
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
        "annotations": {"venusrl.sandbox": spec.id},
    }
