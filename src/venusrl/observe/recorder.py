"""What a run writes down while it goes: ``events.jsonl`` and TensorBoard scalars.

Owns: the two files' form. One event is one JSON line with ``t`` (unix seconds) and ``kind``; it reaches the
operating system before the call returns, so a killed process loses none that was reported. The kinds that the
summary and the plots read back:

- ``run_started`` (``resumed``, ``version``, ``seed``) opens a session of the run; ``run_finished``
  (``reason``, ``error``) closes it. A killed session has no end: its last line stands for it.
- ``scalars`` (``step``, ``values``): metrics of the trained step that made weight version ``step``. The newest
  line of a step wins.
- ``evaluation`` (``version``, ``mode``, ``reward``, ``ci_low``, ``ci_high``, ``tasks``).
- ``worker_calibrated`` (``worker``, ``costs``: seconds by the names of ``EngineCosts``, ``overhead_s``, ``error``:
  median relative error, ``samples``). The newest line of a worker counts.

Everything else is free text for people (``worker_down``, ``published``...).

Must not know: where the numbers come from.

Guarantees: appending to an earlier session's file is safe, a line torn by a kill included; a full disk is an
``ObserveError`` that says so, never a half-written line followed by good ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from venusrl.observe.files import AppendFile, ObserveError
from venusrl.observe.tensorboard import ScalarFile

__all__ = ["EVENTS_FILE", "ObserveError", "RunRecorder", "mean_interval", "read_events"]

EVENTS_FILE = "events.jsonl"


class RunRecorder:
    """Appends to one run's records. Not thread-safe: one owner, the coordinator."""

    def __init__(self, run_dir: Path) -> None:
        self._encoder = msgspec.json.Encoder()
        self._events = AppendFile(run_dir / EVENTS_FILE)
        self._scalars = ScalarFile(run_dir / "tensorboard")
        if self._events.last_byte() not in (b"", b"\n"):
            self._events.append(b"\n")  # the line was torn by a kill: the next one must not join it

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line. Fields are anything msgspec encodes; NaN becomes null."""
        line = self._encoder.encode({"t": round(time.time(), 6), "kind": kind, **fields})
        self._events.append(line + b"\n")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Metrics of weight version ``step``, named as the field names them."""
        self.event("scalars", step=step, values=values)
        if finite := {name: value for name, value in values.items() if math.isfinite(value)}:
            self._scalars.add(step, finite)

    def evaluation(self, version: int, mode: str, rewards: Sequence[Sequence[float]]) -> None:
        """Record an evaluation of ``version``; ``rewards`` holds each task's samples. ``mode``: sampled or greedy."""
        mean, low, high = mean_interval([sum(samples) / len(samples) for samples in rewards if samples])
        self.event("evaluation", version=version, mode=mode, reward=mean, ci_low=low, ci_high=high, tasks=len(rewards))
        self.scalars(version, {f"eval/{mode}/reward": mean})

    def close(self) -> None:
        """Idempotent."""
        self._events.close()
        self._scalars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of values in [0, 1] and its 95% interval over independent tasks; NaN without values.

    Wilson's score interval: it stays in [0, 1], is honest at 0 and 1 and for few tasks, and for rewards between
    0 and 1 it is wider than need be, never narrower.
    """
    if not values:
        return math.nan, math.nan, math.nan
    z, n = 1.96, len(values)
    mean = math.fsum(values) / n
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(max(0.0, mean * (1 - mean)) / n + z * z / (4 * n * n))
    return mean, min(mean, centre - half), max(mean, centre + half)


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
