"""A program's start in a network of its own, where there is nothing but one listening socket.

Runs as ``python -I -S jailed.py FD COMMAND...``: the socket listens on the new network's loopback, goes to whoever is
at the other end of FD, and is the command's proxy. Owns nothing else; imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def main() -> None:
    channel, command = int(sys.argv[1]), sys.argv[2:]
    new_network()
    with socket.socket(fileno=channel) as other, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        socket.send_fds(other, [b"."], [listener.fileno()])
    kept = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
    proxy = f"http://127.0.0.1:{port}"
    os.execvpe(command[0], command, {**kept, "HTTPS_PROXY": proxy, "HTTP_PROXY": proxy})


def new_network() -> None:
    """Whoever is not root makes it within a user namespace, with no other identity than its own there."""
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET | (CLONE_NEWUSER if user else 0)) != 0:
        number = ctypes.get_errno()
        sys.exit(f"a network of its own cannot be made ({os.strerror(number)}): it takes root or user namespaces")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


if __name__ == "__main__":
    main()
