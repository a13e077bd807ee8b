"""What a machine's memory asks of another host's QEMU.

Owns: the passport and the comparison. Pure. Must not know: machines, streams.

Guarantees: a state goes to the same QEMU or a newer one, never to an older; between equal processors where it was made
with KVM; while the machine runs only if both QEMUs move running machines intact.
"""

from __future__ import annotations

import msgspec

from venusrl.sandboxes.runtimes.microvm.setup import LIVE_VERSION, MEND
from venusrl.sandboxes.runtimes.moving import Objection

Version = tuple[int, int]


class Passport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``processor``: "" when emulated, else what KVM shows of this machine's processor. ``board``: QEMU's machine type.
    ``memory`` False: it is paused with its files only."""

    qemu: Version
    board: str
    processor: str = ""
    memory: bool = True


def objection(comes: Passport, here: Passport) -> Objection:
    """Whether a sandbox with ``comes`` can run where a machine would have ``here``."""
    mend = "pause it without its memory first, or move it to another node"
    if comes.board != here.board:
        return _no(f"its machine is a {comes.board}, made here are {here.board}: {mend}")
    if comes.processor and comes.processor != here.processor:
        what = "has another processor" if here.processor else "has no KVM"
        return _no(f"its machine was made with KVM, and this host {what}: {mend}")
    if not comes.memory:
        return Objection(live="it is paused")
    if comes.qemu > here.qemu:
        older = f"it runs on QEMU {_said(comes.qemu)}, and this host has the older {_said(here.qemu)}"
        return _no(f"{older}: {MEND}; or {mend}")
    if comes.qemu < LIVE_VERSION:
        return Objection(live=f"QEMU {_said(comes.qemu)} corrupts busy guests that move live: {MEND}")
    return Objection()


def _no(why: str) -> Objection:
    return Objection(memory=why, live=why)


def _said(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
