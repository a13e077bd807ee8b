"""``venusrl simulate validation``: published measurements, and a run of our own, against their simulation.

Owns: which cases are run, the run that the case ``embedded`` needs (made if it is not there), how a finished run is
read back, the report. Must not know: what is compared, in which band.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from venusrl.cli.output import CommandError, stderr, stdout, table, write_json

if TYPE_CHECKING:
    from venusrl.simulation.validation import Check
    from venusrl.simulation.validation.recorded import Recording

REPORT_FILE = "report.md"
_STEPS = 6
_RUN = (
    # Few siblings, and hot: those of a sharp policy sample the same tokens, and then nearly all is found in the cache.
    "schedule.group_size=2",
    "schedule.batch_groups=48",
    "rollout.temperature=1.4",
    f"training.steps={_STEPS}",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
)


def validation(folder: Path, json_file: Path | None, chosen: list[str]) -> None:
    """Run the cases, write and show the report. Raises CommandError for an unknown case, and when a check fails."""
    import msgspec

    from venusrl.simulation.suites.tables import table as markdown
    from venusrl.simulation.validation import CASES
    from venusrl.simulation.validation.recorded import EMBEDDED

    known = (*CASES, EMBEDDED)
    if unknown := [name for name in chosen if name not in known]:
        raise CommandError(f"there is no case {', '.join(unknown)}; there are {', '.join(known)}")
    folder.mkdir(parents=True, exist_ok=True)
    checks: list[Check] = []
    for name in chosen or list(CASES):
        checks += _checks(name, folder)
    columns = ("case", "figure", "measured", "simulated", "band", "verdict", "source")
    lines = [
        [c.case, c.figure, c.published, f"{c.simulated:.3g}", f"{c.low:.3g}..{c.high:.3g}", c.verdict, c.source]
        for c in checks
    ]
    gaps = [f"- {c.case}, {c.figure}: {c.known_gap}" for c in checks if not c.holds and c.known_gap]
    text = ["# Measurements against the simulator", markdown(columns, lines), "\n".join(gaps)]
    (folder / REPORT_FILE).write_text("\n\n".join(part for part in text if part) + "\n")
    (stderr() if json_file == Path("-") else stdout()).print(table(columns, lines, right=("simulated",)))
    write_json([msgspec.to_builtins(c) | {"verdict": c.verdict} for c in checks], json_file)
    failed = [c for c in checks if c.verdict == "FAILS"]
    if failed:
        raise CommandError(f"{len(failed)} of {len(checks)} measured figures are not reproduced, and not known why")


def _checks(name: str, folder: Path) -> Iterator[Check]:
    from venusrl.simulation.validation import validate
    from venusrl.simulation.validation.recorded import EMBEDDED, check_recording

    if name != EMBEDDED:
        stderr().print(f"simulating {name}", markup=False)
        yield from validate(cases=(name,))
        return
    run = folder / "run"
    if not run.exists():
        stderr().print(f"training the demo for {_STEPS} steps in {run}: some minutes", markup=False)
        _train(run)
    stderr().print(f"simulating {run}", markup=False)
    yield from check_recording(recording_of(run))


def _train(run: Path) -> None:
    """In a process of its own, as a user would: this one stays free of engines and their threads."""
    argv = [sys.executable, "-m", "venusrl.cli.main", "train", "demo", "--run-dir", str(run)]
    argv += [part for setting in _RUN for part in ("--set", setting)]
    done = subprocess.run(argv, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise CommandError(f"the run in {run} ended with {done.returncode}; its own message is above")


def recording_of(run: Path) -> Recording:
    """A finished run of one session and one engine worker for the simulator. Raises CommandError, StoreError."""
    import msgspec

    from venusrl.cli.recorded import trained_groups
    from venusrl.observe.history import read_history
    from venusrl.observe.recorder import read_events
    from venusrl.recipe import Recipe
    from venusrl.scheduling.calibration import Estimate
    from venusrl.simulation.validation.recorded import Recording

    events = list(read_events(run))
    history = read_history(events)
    ups = [event for event in events if event["kind"] == "worker_up"]
    if len(ups) != 1 or history.sessions != 1 or history.outcome != "finished":
        raise CommandError(f"{run} was interrupted or lost an engine: its times say nothing; delete it and try again")
    learned = history.engines.get(ups[0]["worker"])
    if learned is None:
        raise CommandError(f"{run} was too short to learn what its engine's work takes; train more steps")
    steps = [e for e in events if e["kind"] == "scalars" and "perf/train_s" in e["values"]]
    return Recording(
        name=run.name,
        recipe=Recipe.model_validate_json((run / "recipe.json").read_text()),
        groups=list(trained_groups(run)),
        engine=msgspec.convert(learned, Estimate),
        train_s=[e["values"]["perf/train_s"] + e["values"]["perf/checkpoint_s"] for e in steps],
        publish_s=mean(_values(events, "perf/publish_s")),
        load_s=mean(e["load_s"] for e in events if e["kind"] == "published"),
        steps_s=[e["t"] - ups[0]["t"] for e in steps],
    )


def _values(events: list[dict[str, Any]], name: str) -> list[float]:
    return [e["values"][name] for e in events if e["kind"] == "scalars" and name in e["values"]] or [0.0]
