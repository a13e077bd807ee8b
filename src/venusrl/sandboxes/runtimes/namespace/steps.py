"""What a sandbox's maker can do, as bytes it understands.

Owns: the steps (each a function of this file that returns one encoded step), the order of their numbers, the passage of
a failure back.

Must not know: which steps make a sandbox (``making.py``), how they are carried out (``maker.c``).

Guarantees: a plan is these bytes one after the other; nothing in it refers to this process but descriptors by number.
"""

from __future__ import annotations

import os
import struct

import msgspec

from venusrl.sandboxes.runtimes.namespace import kernel

NONE = 0xFFFF_FFFF_FFFF_FFFF
"""Instead of a mode, an owner or a user namespace: leave it as it is."""
MAY_BE_MISSING, MAY_BE_NO_FOLDER, MAY_FAIL = 1, 2, 4
"""What a step survives: ENOENT, ENOTDIR, anything."""
_HEAD = struct.Struct("=BBBQQQ")
_LENGTH = struct.Struct("=I")
_FAILURE = struct.Struct("=II")


_TOLD = 0xFFFF_FFFE
WAITS = _FAILURE.pack(0xFFFF_FFFF, 0)
"""A maker says this at a ``wait``."""


class Failure(msgspec.Struct, frozen=True):
    """The step that failed, by its place in the plan (from 0), the system's error, on what."""

    step: int
    error: int
    subject: str

    def __str__(self) -> str:
        return f"{os.strerror(self.error)}: {self.subject}" if self.subject else os.strerror(self.error)


def failure(said: bytes | bytearray) -> Failure:
    """What a maker said before it ended."""
    step, error = _FAILURE.unpack_from(said)
    return Failure(step, error, said[_FAILURE.size :].decode(errors="replace"))


def told(body: bytes) -> bytes:
    """What somebody else says on a maker's report."""
    return _FAILURE.pack(_TOLD, len(body)) + body


def body(said: bytes | bytearray) -> bytes | None:
    """What somebody else said; None when the maker did."""
    kind, length = _FAILURE.unpack_from(said)
    return bytes(said[_FAILURE.size :][:length]) if kind == _TOLD else None


def _step(op: int, *strings: str | bytes, a: int = 0, b: int = 0, c: int = 0, lenient: int = 0) -> bytes:
    encoded = [os.fsencode(each) for each in strings]
    head = _HEAD.pack(op, lenient, len(encoded), a, b, c)
    return head + b"".join(_LENGTH.pack(len(each)) + each + b"\0" for each in encoded)


def folder(path: str, mode: int = 0o755, owner: int = NONE) -> bytes:
    """A new directory. ``owner`` is a user's and its group's number."""
    return _step(1, path, a=mode, b=owner)


def write(path: str, content: str | bytes, *, lenient: int = 0) -> bytes:
    """Into a file that is there."""
    return _step(2, path, content, lenient=lenient)


def file(path: str, content: str | bytes = b"", mode: int = 0o644) -> bytes:
    """A new file."""
    return _step(2, path, content, a=os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, b=mode)


def link(target: str, path: str) -> bytes:
    return _step(3, target, path)


def change(path: str, mode: int, owner: int = NONE) -> bytes:
    return _step(4, path, a=mode, b=owner)


def folder_in_root(root: str, path: str, mode: int = NONE, owner: int = NONE) -> bytes:
    """Make sure that ``path`` below ``root`` is a real directory reached by no link, removing what is in the way."""
    return _step(5, root, path, a=mode, b=owner)


def write_in_root(root: str, path: str, content: bytes, owner: int) -> bytes:
    """Replace a regular file of ``root``, its links resolved as they are inside."""
    return _step(6, root, path, content, a=owner)


def mount(source: str, target: str, kind: str, flags: int, data: str = "", *, lenient: int = 0) -> bytes:
    return _step(7, source, target, kind, data, a=flags, lenient=lenient)


def bind(source: str, target: str, *, lenient: int = 0) -> bytes:
    """Show one file or directory, without what is mounted below it, elsewhere too."""
    return mount(source, target, "", kernel.MS_BIND, lenient=lenient)


def remount(target: str, flags: int, *, lenient: int = 0) -> bytes:
    """Change one mount's flags."""
    return mount("none", target, "", kernel.MS_REMOUNT | kernel.MS_BIND | flags, lenient=lenient)


def clone_tree(source: str, target: str, userns: int | None) -> bytes:
    """``kernel.clone_tree_read_only``."""
    return _step(8, source, target, a=NONE if userns is None else userns)


def unshare(flags: int) -> bytes:
    return _step(9, a=flags)


def setns(namespace: int, kind: int) -> bytes:
    return _step(10, a=namespace, b=kind)


def listen(path: str) -> bytes:
    """The agent's listening socket, for the machine's root only."""
    return _step(11, path)


def hostname(name: str) -> bytes:
    return _step(12, name)


def loopback() -> bytes:
    return _step(13)


def go_to(path: str) -> bytes:
    return _step(14, path)


def change_root() -> bytes:
    """The working directory becomes the whole world."""
    return _step(15)


def limit(resource: int, soft: int, hard: int) -> bytes:
    return _step(16, a=resource, b=soft & NONE, c=hard & NONE)


def become(user: int) -> bytes:
    """That user and group, and no other group."""
    return _step(17, a=user)


def keyring() -> bytes:
    """A session keyring of its own; a kernel without keyrings has none to leave."""
    return _step(18, lenient=MAY_FAIL)


def keep_capabilities(kept: frozenset[int]) -> bytes:
    return _step(19, a=sum(1 << capability for capability in kept))


def filter_calls(program: bytes) -> bytes:
    """No new privileges, then the filter."""
    return _step(20, program)


def descriptors(agent: int) -> bytes:
    """Nothing but /dev/null, the listening socket and, until it runs, the agent's program."""
    return _step(21, a=agent)


def wait(go: int) -> bytes:
    """Say that the disk is there (``WAITS``); go on at a byte from ``go``, fail at its end."""
    return _step(23, a=go)


def merge() -> bytes:
    """From here on, and in whatever it starts, its memory may be merged with equal memory of others that do the same;
    places of memory are not random, so that equal programs have equal pages."""
    return _step(24)


def disk(blank: str, folder: str, target: str, flags: int, data: str) -> bytes:
    """Mount a copy of the file system in ``blank``, kept in ``folder`` without a name for as long as it is mounted."""
    return _step(25, blank, folder, target, data, a=flags)


def start(arguments: tuple[str, ...]) -> bytes:
    """Become the agent. The last step."""
    return _step(22, *arguments)
