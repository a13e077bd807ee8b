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
    """``left_s``: expected rest of the present phase, None before the first run ended."""

    phase: str
    done: int
    total: int
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
    _do("tune", tuning, records, jobs, report)
    runs = measured_runs(suite, choose(records.found[run.key] for run in tuning))
    _do("measure", runs, records, jobs, report)
    return [records.found[run.key] for run in (*tuning, *runs)]


def measured_runs(suite: Suite, tuned: Tuned) -> list[Run]:
    """Cell by cell, seed by seed; the first seed's time lines are kept."""
    return [
        Run(cell.name, cell.scenario, limited(arm, tuned.get((cell.name, arm.name))), seed, trace=seed == 0)
        for cell in suite.cells
        for seed in range(suite.seeds)
        for arm in suite.arms
    ]


def _do(phase: str, runs: Sequence[Run], records: Records, jobs: int, report: Report) -> None:
    left = [run for run in runs if run.key not in records.found]
    began = time.monotonic()
    for done, record in enumerate(_executed(left, jobs), 1):
        records.add(record)
        rest = (time.monotonic() - began) / done * (len(left) - done)
        state = record.error or f"{record.time_s:,.0f} s, {record.cpu_s:.1f} s of CPU"
        last = f"{record.cell} {record.arm} seed {record.seed}: {state}"
        report(Progress(phase, len(runs) - len(left) + done, len(runs), rest, last))


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
