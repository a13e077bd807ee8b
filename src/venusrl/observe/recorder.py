"""What a run writes down while it goes: ``events.jsonl`` and TensorBoard scalars.

Owns: the two files' form. One event is one JSON line with ``t`` (unix seconds) and ``kind``; it reaches the
operating system before the call returns, so a killed process loses none that was reported. The kinds that the
summary and the plots read back:

- ``run_started`` (``resumed``, ``version``, ``seed``) opens a session of the run; ``run_finished``
  (``reason``, ``error``) closes it. A killed session has no end: its last line stands for it.
- ``scalars`` (``step``, ``values``): metrics of the trained step that made weight version ``step``. The newest
  line of a step wins.
- ``evaluation`` (``version``, ``mode``, ``reward``, ``ci_low``, ``ci_high``, ``tasks``).

Everything else is free text for people (``worker_down``, ``published``...).

Must not know: where the numbers come from.

Guarantees: appending to an earlier session's file is safe, a line torn by a kill included; a full disk is an
``ObserveError`` that says so, never a half-written line followed by good ones.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

EVENTS_FILE = "events.jsonl"


class ObserveError(Exception):
    """A record of the run could not be written or read; the message names the file and the mend."""


class _ScalarWriter(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def close(self) -> None: ...


class RunRecorder:
    """Appends to one run's records. Not thread-safe: one owner, the coordinator."""

    def __init__(self, run_dir: Path, *, tensorboard: bool = True) -> None:
        self._path = run_dir / EVENTS_FILE
        self._encoder = msgspec.json.Encoder()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ObserveError(f"cannot open {self._path}: {error.strerror}") from error
        self._closed = False
        self._end_torn_line()
        self._writer: _ScalarWriter | None = _open_tensorboard(run_dir / "tensorboard") if tensorboard else None

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line. Fields are anything msgspec encodes; NaN becomes null."""
        self._append(self._encoder.encode({"t": round(time.time(), 6), "kind": kind, **fields}) + b"\n")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Metrics of weight version ``step``, named as the field names them."""
        self.event("scalars", step=step, values=values)
        if self._writer is not None:
            for name, value in values.items():
                if math.isfinite(value):
                    self._writer.add_scalar(name, value, step)

    def evaluation(self, version: int, mode: str, rewards: Sequence[Sequence[float]]) -> None:
        """Record an evaluation of ``version``; ``rewards`` holds each task's samples. ``mode``: sampled or greedy."""
        mean, low, high = mean_interval([sum(samples) / len(samples) for samples in rewards if samples])
        self.event("evaluation", version=version, mode=mode, reward=mean, ci_low=low, ci_high=high, tasks=len(rewards))
        self.scalars(version, {f"eval/{mode}/reward": mean})

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        if self._closed:
            raise ObserveError(f"{self._path} is closed")
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            raise ObserveError(f"cannot write {self._path}: {error.strerror}; free space, then resume") from error
        if written != len(line):
            os.ftruncate(self._fd, size)
            raise ObserveError(f"cannot write {self._path}: the disk is full; free space, then resume")

    def _end_torn_line(self) -> None:
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self._append(b"\n")


def _open_tensorboard(folder: Path) -> _ScalarWriter:
    from tensorboardX import SummaryWriter  # heavy to import: only a run that records pays for it

    writer: _ScalarWriter = SummaryWriter(str(folder), flush_secs=5)
    return writer


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95% interval (normal approximation over independent tasks); NaN without values."""
    if not values:
        return math.nan, math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, mean, mean
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    half = 1.96 * math.sqrt(variance / len(values))
    return mean, mean - half, mean + half


def read_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The run's events in order. Lines torn by a kill are passed over; a missing file is an ObserveError."""
    path = run_dir / EVENTS_FILE
    decoder = msgspec.json.Decoder(dict[str, Any])
    try:
        file = path.open("rb")
    except OSError as error:
        raise ObserveError(f"{run_dir} has no readable {EVENTS_FILE}: {error.strerror}") from error
    with file:
        for line in file:
            try:
                event = decoder.decode(line)
            except msgspec.DecodeError:
                continue  # torn by a kill
            if "kind" in event and "t" in event:
                yield event
