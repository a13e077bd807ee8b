"""Carry a suite out: over processes, resumable, with progress.

Owns: the pool, the file of records (one JSON line a finished run, written as soon as it is there), what is left to do.
Must not know: what the records mean.

Guarantees: a run whose key is in the file is not done again; after a kill at any instant the file holds every finished
run, and a cut last line is ignored; Ctrl-C ends the workers and leaves the file as it is.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from venusrl.simulation.suites.cells import Suite
from venusrl.simulation.suites.records import Record, Run, execute
from venusrl.simulation.suites.tuning import Tuned, choose, limited, tuning_runs

RECORDS_FILE = "records.jsonl"


class Progress(msgspec.Struct, frozen=True):
    """``kept``: runs of this phase that were there already. ``left_s``: expected rest of all phases, None before the
    first run ended. ``last``: what ended last, empty at a phase's start."""

    phase: str
    done: int
    total: int
    kept: int
    left_s: float | None
    last: str


Report = Callable[[Progress], None]


class SuiteError(Exception):
    """The output directory cannot be used; the message says why."""


class Records:
    """The finished runs of one output directory."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        """Raises SuiteError where records lie and ``resume`` is not wanted."""
        self.path = folder / RECORDS_FILE
        self.found: dict[str, Record] = {}
        if self.path.exists():
            if not resume:
                raise SuiteError(f"{self.path} exists; go on with --resume, or choose another --out")
            self._load()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
        except OSError as error:
            raise SuiteError(f"cannot write {self.path}: {error.strerror}") from error

    def _load(self) -> None:
        raw = self.path.read_bytes()
        whole, _, cut = raw.rpartition(b"\n")
        if cut:
            # Killed in the middle of a line: what follows must begin on a new one.
            os.truncate(self.path, len(whole) + 1 if whole else 0)
        for line in whole.splitlines():
            try:
                record = msgspec.json.decode(line, type=Record)
            except msgspec.DecodeError as error:
                raise SuiteError(
                    f"{self.path} is of another release or damaged ({error}); choose another --out"
                ) from error
            self.found[record.key] = record

    def add(self, record: Record) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()
        self.found[record.key] = record

    def close(self) -> None:
        self._file.close()


def carry_out(suite: Suite, records: Records, *, quick: bool, jobs: int, report: Report) -> list[Record]:
    """Tune, then measure. The records of this suite as it stands, in its order."""
    tuning = tuning_runs(suite, quick=quick)
    # What will be measured costs about the same whatever the tuning finds.
    clock = _Clock([run for run in (*tuning, *measured_runs(suite, {})) if run.key not in records.found])
    _do("tune", tuning, records, jobs, report, clock)
    runs = measured_runs(suite, choose(records.found[run.key] for run in tuning))
    _do("measure", runs, records, jobs, report, clock)
    return [records.found[run.key] for run in (*tuning, *runs)]


class _Clock:
    """How long it will take: the work that is left at the pace so far."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._left = sum(map(_work, runs))
        self._done = 0.0
        self._began = time.monotonic()

    def ended(self, work: float) -> float:
        """Expected seconds left, now that a run of so much ``work`` ended."""
        self._done += work
        self._left = max(0.0, self._left - work)
        return (time.monotonic() - self._began) / self._done * self._left


def _work(run: Run) -> float:
    """About what a run costs, in any unit: turns, of which venus' cost three times as much."""
    config = run.scenario.scheduler
    trajectories = (config.max_steps or 1) * config.batch_groups * config.group_size
    return trajectories * getattr(run.scenario.workload, "length", 1.0) * (3.0 if run.arm.ours else 1.0)


def measured_runs(suite: Suite, tuned: Tuned) -> list[Run]:
    """Cell by cell, seed by seed; the first seed's time lines are kept."""
    return [
        Run(cell.name, cell.scenario, limited(arm, tuned.get((cell.name, arm.name))), seed, trace=seed == 0)
        for cell in suite.cells
        for seed in range(suite.seeds)
        for arm in suite.arms
    ]


def _do(phase: str, runs: Sequence[Run], records: Records, jobs: int, report: Report, clock: _Clock) -> None:
    left = {run.key: run for run in runs if run.key not in records.found}
    kept = len(runs) - len(left)
    if runs:
        report(Progress(phase, kept, len(runs), kept, None, ""))
    for done, record in enumerate(_executed(list(left.values()), jobs), kept + 1):
        records.add(record)
        state = record.error or f"{record.time_s:,.0f} s, {record.cpu_s:.1f} s of CPU"
        last = f"{record.cell} {record.arm} seed {record.seed}: {state}"
        report(Progress(phase, done, len(runs), kept, clock.ended(_work(left[record.key])), last))


def _executed(runs: Sequence[Run], jobs: int) -> Iterator[Record]:
    # Keys are the parent's: a worker may read code that was changed since.
    keyed = [(run.key, run) for run in runs]
    if jobs == 1 or len(runs) < 2:
        yield from map(_execute, keyed)
        return
    # A fresh interpreter each: nothing of ours (threads, open files) is copied into the workers.
    with multiprocessing.get_context("spawn").Pool(jobs, _ignore_interrupts) as pool:
        yield from pool.imap_unordered(_execute, keyed)  # leaving the block early ends the workers


def _execute(keyed: tuple[str, Run]) -> Record:
    key, run = keyed
    return msgspec.structs.replace(execute(run), key=key)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches the whole process group; the parent alone decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
