"""``venusrl simulate``: what policies do, on a virtual clock.

Owns: the choice between a suite and a recipe, the output directory, progress, the last lines a person reads.
Everything else is ``venusrl.simulation.suites``.

Guarantees: Ctrl-C leaves every finished run on disk; the same command with ``--resume`` goes on from there; a figure
that is not there was not measured.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from venusrl.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, CommandError, stderr, stdout, table, warn, write_json
from venusrl.cli.validation import validation

if TYPE_CHECKING:
    from venusrl.simulation.scenario import Workload
    from venusrl.simulation.suites.analysis import Analysis
    from venusrl.simulation.suites.cells import Suite
    from venusrl.simulation.suites.runner import Progress

ROOT = Path("runs") / "simulations"
REPORT_FILE, JSON_FILE = "report.md", "summary.json"

_JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON there too; - is stdout.")
]
_Workload = Annotated[str, typer.Option(help="For a recipe: what its agents do; a workload's name or replay:RUN_DIR.")]
_Cases = Annotated[
    list[str] | None,
    typer.Option(
        "--case", help="For validation: only these; embedded trains the demo for some steps and is asked for."
    ),
]


def simulate(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SUITE|RECIPE",
            help="paper, pressure, drift, scale, sensitivity, ablation, validation, or a recipe.",
        ),
    ],
    policy: Annotated[list[str] | None, typer.Option("--policy", help="Only these; repeat for more.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Paired seeds. Default: the suite's.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The suite's short version.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Where results go. Default: runs/simulations/NAME.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the finished runs in --out and do the others.")
    ] = False,
    json_file: _JsonFile = None,
    workload: _Workload = "openswe",
    model: Annotated[str, typer.Option(help="For a recipe: whose costs engines and trainer have.")] = "qwen3-4b",
    gpu: Annotated[str, typer.Option(help="For a recipe: h100 or h200.")] = "h100",
    steps: Annotated[int, typer.Option(min=1, help="For a recipe: optimizer steps to simulate.")] = 8,
    case: _Cases = None,
    cell: Annotated[list[str] | None, typer.Option("--cell", help="Only these of a suite; repeat for more.")] = None,
) -> None:
    """Simulate scheduling policies: the real scheduler, modelled engines, trainer, tools and sandboxes.

    Examples:

    $ venusrl simulate paper --quick

    $ venusrl simulate pressure --policy venus --policy fcfs --seeds 3

    $ venusrl simulate paper --cell 32b-B32-a1 --policy venus --policy slime

    $ venusrl simulate qwen3-4b-swe --workload openswe

    $ venusrl simulate demo --workload replay:runs/demo

    $ venusrl simulate validation

    $ venusrl simulate validation --case embedded
    """
    if what == "validation":
        validation(out or ROOT / what, json_file, case or [])
        return
    if case:
        raise CommandError(
            "--case chooses among the cases of the suite validation: venusrl simulate validation --case ..."
        )
    suite = _suite(what, policy or [], seeds, quick, workload, model, gpu, steps, cell or [])
    for name, package in suite.left_out.items():
        warn(f"policy {name} is left out: it needs {package}, which is not installed")
    folder = out or ROOT / (f"{suite.name}-quick" if quick else suite.name)
    analysis = _carry_out(suite, folder, quick=quick, jobs=jobs, resume=resume)
    written = _write(suite, analysis, folder)
    _show(analysis, folder, written, to_stderr=json_file == Path("-"))
    write_json(_as_json(suite, analysis), json_file)
    if any(entry.errors for cell in analysis.cells for entry in cell.entries.values()):
        stderr().print("some runs failed; the report names them", style="yellow")
        raise typer.Exit(EXIT_FAILED)


def _suite(
    what: str,
    policies: list[str],
    seeds: int | None,
    quick: bool,
    workload: str,
    model: str,
    gpu: str,
    steps: int,
    places: list[str],
) -> Suite:
    from venusrl.recipe import RecipeError, load, shipped
    from venusrl.simulation.models import GPUS, MODELS
    from venusrl.simulation.suites import arms
    from venusrl.simulation.suites.cells import SUITES, UnknownSuite, find_suite
    from venusrl.simulation.suites.from_recipe import recipe_suite
    from venusrl.simulation.workloads import WorkloadError

    try:
        if what in SUITES:
            return find_suite(what, quick=quick, policies=policies, seeds=seeds, places=places)
        if places:
            raise CommandError("--cell chooses among the cells of a suite; a recipe is one cell")
        if model not in MODELS or gpu not in GPUS:
            raise CommandError(f"models are {', '.join(MODELS)}; GPUs are {', '.join(GPUS)}")
        try:
            recipe = load(what)
        except RecipeError as error:
            if what.endswith(".toml") or what in shipped():
                raise
            known = f"suites are {', '.join(SUITES)}, validation; recipes are .toml files, {', '.join(shipped())}"
            raise CommandError(f"there is no suite or recipe {what!r}; {known}") from error
        made = recipe_suite(recipe, _workload(workload), model=model, gpu=gpu, steps=steps, seeds=seeds or 3)
        chosen = [arms.arm(name) for name in policies] or made.arms
        return _replace(made, arms=chosen)
    except (arms.UnknownArm, UnknownSuite, WorkloadError) as error:
        raise CommandError(str(error)) from error


def _workload(name: str) -> Workload:
    """By name, or the trajectories of a run (``replay:RUN_DIR``)."""
    from venusrl.cli.recorded import trained_groups
    from venusrl.simulation.workloads import make_workload
    from venusrl.simulation.workloads.replay import replay

    kind, _, folder = name.partition(":")
    return replay(trained_groups(Path(folder))) if kind == "replay" else make_workload(name)


def _replace(suite: Suite, **changes: Any) -> Suite:
    import msgspec

    return msgspec.structs.replace(suite, **changes)


def _carry_out(suite: Suite, folder: Path, *, quick: bool, jobs: int, resume: bool) -> Analysis:
    from venusrl.simulation.suites.analysis import analyse
    from venusrl.simulation.suites.runner import Records, SuiteError, carry_out

    try:
        records = Records(folder, resume=resume)
    except SuiteError as error:
        raise CommandError(str(error)) from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    try:
        found = carry_out(suite, records, quick=quick, jobs=jobs, report=_progress())
    except KeyboardInterrupt:
        again = shlex.join(["venusrl", *sys.argv[1:], *([] if resume else ["--resume"])])
        kept = f"\nstopped; {len(records.found)} finished runs are kept. Go on with: {again}"
        stderr().print(kept, markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        records.close()
    return analyse(suite.name, found)


def _progress() -> Callable[[Progress], None]:
    """A line a second on a terminal; one in twenty otherwise; and what a phase finds done already."""
    console, last = stderr(), [0.0]

    def show(progress: Progress) -> None:
        if not progress.last:
            if progress.kept:
                console.print(f"{progress.phase}: {progress.kept} of {progress.total} runs are there already")
            return
        now, final = time.monotonic(), progress.done == progress.total
        if not final and now - last[0] < (1.0 if console.is_terminal else 20.0):
            return
        last[0] = now
        rest = f", about {_clock(progress.left_s)} left" if progress.left_s else ""
        line = f"{progress.phase} {progress.done}/{progress.total}{rest} · {progress.last}"
        console.print(line, markup=False, soft_wrap=True)

    return show


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min" if minutes >= 10 else f"{minutes}:{rest:02d} min"


def _write(suite: Suite, analysis: Analysis, folder: Path) -> list[str]:
    from venusrl.simulation.suites.figures import draw
    from venusrl.simulation.suites.tables import report

    command = shlex.join(["venusrl", *sys.argv[1:]])
    figures = draw(analysis, folder)
    (folder / REPORT_FILE).write_text(report(suite, analysis, command, figures))
    write_json(_as_json(suite, analysis), folder / JSON_FILE)
    return [REPORT_FILE, JSON_FILE, *figures]


def _show(analysis: Analysis, folder: Path, written: Iterable[str], *, to_stderr: bool) -> None:
    from venusrl.simulation.suites.tables import BRIEF, brief

    console = stderr() if to_stderr else stdout()
    for cell in analysis.cells:
        console.print(f"{cell.cell}: working set {cell.pressure:.2f} x KV", style="bold", markup=False)
        console.print(table(BRIEF, brief(cell), right=BRIEF[1:]))
    console.print(f"\n{folder}: {', '.join(written)}", markup=False)


def _as_json(suite: Suite, analysis: Analysis) -> dict[str, Any]:
    import msgspec

    from venusrl.simulation.suites.goals import goals

    plain: dict[str, Any] = msgspec.to_builtins(analysis, str_keys=True)
    for cell in plain["cells"]:
        del cell["traces"]
    plain |= {"about": suite.about, "seeds": suite.seeds, "goals": msgspec.to_builtins(goals(analysis))}
    return plain
