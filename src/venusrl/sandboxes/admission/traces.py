"""Workloads that are both a model of memory and a program to run.

Owns: ``Trace`` (as in ``benchmarks/traces/*.json``), the lives of a trajectory group drawn from it, the memory that a
life holds over time, and the shell commands that hold that memory in a real sandbox.

Must not know: policies, runtimes. Draws come from the caller.

Guarantees: the same draws give the same lives. What a command's model says it holds is what its program allocates and
touches. Programs need a POSIX shell with ``dd``, ``sleep``, ``test`` and ``cat`` (Debian or busybox).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

MIB = 1 << 20
TEMPLATE_FILE = "/opt/template.bin"
"""A file of ``template_mib`` in the benchmark's templates, read by every sandbox at its start."""
_WRITER_ENDED = 141
"""What ``dd`` ends with when its reader has gone: it held its memory until then."""


class Draws(Protocol):
    """Randomness, as ``random.Random`` has it."""

    def random(self) -> float: ...

    def expovariate(self, lambd: float) -> float: ...


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something an agent does: holds ``mib`` of memory for ``seconds``, then leaves ``files_kib`` of new files."""

    name: str
    weight: float
    mib: float
    seconds: float
    files_kib: int = 0


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named workload. Times in seconds, memory in MiB.

    ``resident_mib`` are the steps in which a resident program grows, spread evenly over the first ``resident_over_s``.
    Commands follow each other with an exponential pause of mean ``think_s``. With probability ``together`` one is the
    whole group's, its members at most ``apart_s`` apart. ``varies``: members differ in size by up to this share.
    """

    name: str
    about: str
    declared_mib: int
    template_mib: int
    group: int
    life_s: tuple[float, float]
    resident_mib: tuple[float, ...]
    resident_over_s: float
    think_s: float
    together: float
    apart_s: float
    varies: float
    commands: tuple[Command, ...]

    def scaled(self, factor: int) -> Trace:
        """The same workload in larger sandboxes."""
        return msgspec.structs.replace(
            self,
            name=f"{self.name} x {factor}",
            declared_mib=self.declared_mib * factor,
            template_mib=self.template_mib * factor,
            resident_mib=tuple(mib * factor for mib in self.resident_mib),
            commands=tuple(msgspec.structs.replace(one, mib=one.mib * factor) for one in self.commands),
        )

    @property
    def peak_mib(self) -> float:
        """The most that one sandbox holds at once beside the template, its files apart."""
        return (sum(self.resident_mib) + max(command.mib for command in self.commands)) * (1.0 + self.varies)


class Step(msgspec.Struct, frozen=True):
    """One thing that a sandbox does. ``resident``: it is held to the end, in the background."""

    at_s: float
    name: str
    mib: float
    seconds: float
    files_kib: int = 0
    resident: bool = False


class Life(msgspec.Struct, frozen=True):
    """One sandbox from its creation to its end."""

    group: str
    length_s: float
    steps: tuple[Step, ...]


def lives(trace: Trace, group: str, draws: Draws) -> tuple[Life, ...]:
    """A whole group's."""
    shortest, longest = trace.life_s
    length = shortest + (longest - shortest) * draws.random()
    plan = _plan(trace, length, draws)
    return tuple(_member(trace, group, length, plan, draws) for _ in range(trace.group))


def _plan(trace: Trace, length: float, draws: Draws) -> list[tuple[float, Command]]:
    """When the group does what, as long as it does it together."""
    at = 0.0
    plan: list[tuple[float, Command]] = []
    while True:
        at += draws.expovariate(1.0 / trace.think_s)
        if at >= length:
            return plan
        command = _choose(trace, draws)
        plan.append((at, command))
        at += command.seconds + trace.apart_s


def _choose(trace: Trace, draws: Draws) -> Command:
    left = draws.random() * sum(command.weight for command in trace.commands)
    for command in trace.commands:
        left -= command.weight
        if left < 0.0:
            return command
    return trace.commands[-1]


def _member(trace: Trace, group: str, length: float, plan: list[tuple[float, Command]], draws: Draws) -> Life:
    size = 1.0 + trace.varies * (2.0 * draws.random() - 1.0)
    gap = trace.resident_over_s / max(1, len(trace.resident_mib) - 1)
    steps = [
        Step(number * gap, "resident", mib * size, length - number * gap, resident=True)
        for number, mib in enumerate(trace.resident_mib)
        if number * gap < length
    ]
    free_at = 0.0
    for planned, with_group in plan:
        if draws.random() < trace.together:
            at, command = planned + trace.apart_s * draws.random(), with_group
        else:
            at, command = planned + trace.think_s * draws.random(), _choose(trace, draws)
        at = max(at, free_at)
        seconds = min(command.seconds, length - at)
        if seconds > 0.0:
            steps.append(Step(at, command.name, command.mib * size, seconds, command.files_kib))
            free_at = at + seconds
    return Life(group, length, tuple(sorted(steps, key=lambda step: step.at_s)))


def memory(life: Life, *, returned: bool, extra: int = 0) -> list[tuple[float, int]]:
    """What the sandbox holds from each time on, in bytes, the first at 0. ``extra`` is held all along (the runtime's
    own, and the template where it is not shared). ``returned``: freed memory goes back to the host; in a virtual
    machine it does not, and its pages are used again."""
    changes: list[tuple[float, float]] = []
    for step in life.steps:
        changes.append((step.at_s, step.mib * MIB))
        if not step.resident:
            changes.append((step.at_s + step.seconds, (step.files_kib << 10) - step.mib * MIB))
    points, held, peak = [(0.0, extra)], 0.0, 0.0
    for at, change in sorted(changes):
        held += change
        peak = max(peak, held)
        value = extra + int(held if returned else peak)
        if points[-1][0] == at:
            points[-1] = (at, value)
        elif points[-1][1] != value:
            points.append((at, value))
    return points


def program(step: Step, number: int, scale: float = 1.0) -> str:
    """The shell command that does a step; it fails if its memory was not there. ``scale`` stretches time."""
    hold = _hold(step.mib, step.seconds * scale) if step.mib else ""
    if step.resident:
        return hold
    parts = [hold] if hold else []
    if step.files_kib:
        parts.append(f"dd if=/dev/zero of=/tmp/edit-{number} bs=1024 count={step.files_kib} 2>/dev/null")
    if not parts:
        parts.append("cat /proc/self/stat >/dev/null")
    return " && ".join(parts)


def _hold(mib: float, seconds: float) -> str:
    """``dd`` reads zeros into one buffer (so that every page of it is touched), then waits for a reader that only
    sleeps: it writes more than a pipe holds. Its end is told on a third stream."""
    size = max(128, int(mib * 1024))
    holding = f"{{ dd if=/dev/zero bs={size}k count=1 2>/dev/null; echo $? >&3; }} | sleep {seconds:.2f}"
    return f'test "$({{ {holding}; }} 3>&1)" = {_WRITER_ENDED}'


def warm_up() -> str:
    """Reads the template's own file, as programs that it ships would be."""
    return f"cat {TEMPLATE_FILE} >/dev/null"
