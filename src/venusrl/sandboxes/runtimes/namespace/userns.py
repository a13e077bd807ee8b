"""Which host uids sandboxes get, and the user namespaces that map them.

Owns: the choice of an unprivileged range (pure), and the making of a namespace: an unprivileged child of
the range's own uid creates it and root writes its map, so that its owner is never host uid 0 (a namespace
that uid 0 owns gives whoever escapes into it the host).

Must not know: bubblewrap, mounts, cgroups.

Guarantees: host uid 0 is never in a range. Concurrent sandboxes have disjoint ranges while the machine has
ids enough; else (a container that maps few ids) they share one.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import RuntimeUnavailable
from venusrl.sandboxes.runtimes.namespace import holder, kernel

MEND = (
    "allow unprivileged user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns; in a container, its seccomp profile)"
)
RANGE = 65536
DEFAULT_BASE = 0x7000_0000
"""Above the container ranges that systemd and useradd hand out, below systemd's foreign range."""
DEFAULT_END = 0x7FFE_0000
_SMALL_BASE = 16384
_SMALL_RANGE = 32768


class IdSlot(msgspec.Struct, frozen=True):
    """Host ids ``base .. base + count - 1``, seen inside as ``0 .. count - 1``."""

    base: int
    count: int


class IdPool:
    """Hands out slots, lowest first; a shared last resort when there is only one."""

    def __init__(self, slots: range, count: int) -> None:
        self._count = count
        self._slots = slots
        self._used: dict[int, int] = {}

    def take(self) -> IdSlot:
        base = next((b for b in self._slots if b not in self._used), self._slots[0])
        self._used[base] = self._used.get(base, 0) + 1
        return IdSlot(base, self._count)

    def claim(self, base: int) -> IdSlot:
        """Take a given slot: a sandbox of an earlier process lives in it."""
        self._used[base] = self._used.get(base, 0) + 1
        return IdSlot(base, self._count)

    def slot(self, base: int) -> IdSlot:
        """The slot that begins there."""
        return IdSlot(base, self._count)

    def first(self) -> IdSlot:
        """The lowest, taken or not."""
        return IdSlot(self._slots[0], self._count)

    def give_back(self, slot: IdSlot) -> None:
        left = self._used[slot.base] - 1
        if left:
            self._used[slot.base] = left
        else:
            del self._used[slot.base]


def choose_pool(base: int | None, uid_map: str, gid_map: str) -> IdPool:
    """The pool for this machine. ``uid_map`` and ``gid_map`` are this process's own maps in /proc.

    Raises RuntimeUnavailable when the ids are not there.
    """

    def mapped(first: int, count: int) -> bool:
        return all(_covers(text, first, count) for text in (uid_map, gid_map))

    if base is not None:
        if base < 1 or not mapped(base, RANGE):
            raise RuntimeUnavailable(
                f"host ids {base}..{base + RANGE - 1} do not exist here: choose another sandbox uid base (uid_base)"
            )
        end = base + RANGE
        while end - base < 4096 * RANGE and mapped(end, RANGE):
            end += RANGE
        return IdPool(range(base, end, RANGE), RANGE)
    if mapped(DEFAULT_BASE, DEFAULT_END - DEFAULT_BASE):
        return IdPool(range(DEFAULT_BASE, DEFAULT_END, RANGE), RANGE)
    if mapped(_SMALL_BASE, _SMALL_RANGE):
        return IdPool(range(_SMALL_BASE, _SMALL_BASE + 1), _SMALL_RANGE)
    raise RuntimeUnavailable(
        "this container maps too few user ids for sandboxes: give it at least 0..65535, or do not run as root"
    )


def _covers(id_map: str, first: int, count: int) -> bool:
    """Whether one line of a /proc/self/uid_map covers the whole range."""
    for line in id_map.splitlines():
        inside, _, length = (int(field) for field in line.split())
        if inside <= first and first + count <= inside + length:
            return True
    return False


def create(slot: IdSlot, user: int) -> int:
    """Make a namespace that maps ``slot`` and is owned by its ``user``; return a file descriptor on it.

    Needs CAP_SETUID and CAP_SETGID; called in a single-threaded process. Raises RuntimeUnavailable.
    """
    uid = slot.base + user

    def make() -> None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        try:
            kernel.unshare(kernel.CLONE_NEWUSER)
        except OSError as error:
            raise RuntimeUnavailable(f"user namespaces cannot be created ({error.strerror}): {MEND}") from None

    def take(child: int) -> int:
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text(f"0 {slot.base} {slot.count}\n")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)

    return holder.hold(make, take)
