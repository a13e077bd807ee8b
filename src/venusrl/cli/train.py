"""``venusrl train``: a recipe in, a trained model and its records out.

Owns: the run directory's place, the live view, Ctrl-C, the last lines a person reads. Everything else is
``venusrl.coordinator.run``.

Guarantees: the first Ctrl-C (or SIGTERM) finishes cleanly and says how to resume, the second leaves at once
(the store survives that too); an existing run is never touched without ``--resume``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from venusrl.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, CommandError, print_json, stderr, stdout, warn

if TYPE_CHECKING:
    from venusrl.coordinator.run import RunSummary
    from venusrl.observe.live import LiveView
    from venusrl.recipe import Recipe

RUNS = Path("runs")
STORE_FILE = "store.sqlite"
_LEFT_BY_A_FAILED_START = {"events.jsonl", "tensorboard", "logs"}
_SIGTERM_EXIT = 143


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A .toml file or a shipped recipe's name. Omitted on --resume: the run's own.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=V", help="Change one option; repeat for more.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run lives. Default: runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the run directory.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and what it means; start nothing.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Train an agent with asynchronous reinforcement learning.

    Examples:

    $ venusrl train demo

    $ venusrl train demo --set training.steps=10 --run-dir runs/short

    $ venusrl train my-recipe.toml --dry-run

    $ venusrl train --resume --run-dir runs/short

    Ctrl-C once finishes cleanly and says how to resume; twice leaves at once.
    """
    resolved = _resolve(recipe, overrides or [], run_dir, resume)
    if dry_run:
        _print_plan(resolved, json_output)
        return
    directory = run_dir or RUNS / resolved.run.name
    _check_directory(directory, resume)
    _check_inputs(resolved)
    raise typer.Exit(_run(resolved, directory, resume=resume, json_output=json_output))


def _resolve(recipe: str | None, overrides: list[str], run_dir: Path | None, resume: bool) -> Recipe:
    from venusrl.recipe import load, shipped

    if recipe is not None:
        return load(recipe, overrides)
    if resume and run_dir is None:
        raise CommandError("say which run goes on: --run-dir (venusrl runs list shows them), or its recipe by name")
    if run_dir is None or not resume:
        raise CommandError(f"name a recipe: a .toml file or one of {', '.join(shipped())} (try: venusrl train demo)")
    recorded = run_dir / "recipe.toml"
    if not recorded.is_file():
        raise CommandError(f"there is no run to resume in {run_dir}: it has no recipe.toml")
    return load(str(recorded), overrides)


def _check_directory(directory: Path, resume: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise CommandError(f"{directory} is not a directory; name another with --run-dir")
    begun = (directory / STORE_FILE).exists()
    if begun and not resume:
        raise CommandError(
            f"{directory} already holds a run: go on with it (--resume), or name another directory (--run-dir)"
        )
    if resume and not begun:
        raise CommandError(f"there is no run to resume in {directory}; leave out --resume to start one")
    foreign = directory.is_dir() and {entry.name for entry in directory.iterdir()} - _LEFT_BY_A_FAILED_START
    if foreign and not begun:
        raise CommandError(f"{directory} is not empty and not a run; name another directory with --run-dir")


def _check_inputs(recipe: Recipe) -> None:
    """Fail on what is plainly wrong before a run directory exists."""
    from venusrl.cli.plan import make_plan
    from venusrl.models import resolve

    resolve(recipe.model.path)
    for message in make_plan(recipe).warnings:
        warn(message)


def _print_plan(recipe: Recipe, json_output: bool) -> None:
    from venusrl.cli.plan import make_plan
    from venusrl.recipe import to_toml

    plan = make_plan(recipe)
    if json_output:
        resolved = json.loads(recipe.model_dump_json())
        print_json({"recipe": resolved, "derived": plan.derived, "starts": plan.starts, "warnings": plan.warnings})
        return
    # The derived values are comments, so that the whole output is itself a recipe.
    lines = [to_toml(recipe), "# derived"]
    lines += [f"#   {key} = {value}" for key, value in plan.derived.items()]
    lines += ["# would start", *(f"#   {line}" for line in plan.starts)]
    stdout().print("\n".join(lines), markup=False)
    for message in plan.warnings:
        warn(message)


def _run(recipe: Recipe, directory: Path, *, resume: bool, json_output: bool) -> int:
    """Drive the run to its end and say how it ended; the exit code."""
    from venusrl.observe.live import LiveView

    again = _resume_command(directory)
    handler = _log_to(directory / "logs")
    try:
        with LiveView(stderr()) as view:
            result, heard = asyncio.run(_drive(recipe, directory, resume, view, again))
    except Exception as error:  # any failure: keep the traceback for the log, then let main say it in one line
        logging.getLogger("venusrl").exception("the run failed")
        error.add_note(f"log: {handler.baseFilename}")
        if (directory / STORE_FILE).exists():
            error.add_note(f"nothing finished is lost; once mended, go on with: {again}")
        raise
    finally:
        logging.getLogger("venusrl").removeHandler(handler)
        handler.close()
    picture = _draw(directory)
    if json_output:
        print_json(result.summary)
    else:
        _print_result(result, directory, picture, again)
    return {None: 0, signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: _SIGTERM_EXIT}.get(heard, EXIT_FAILED)


async def _drive(
    recipe: Recipe, directory: Path, resume: bool, view: LiveView, again: str
) -> tuple[RunSummary, signal.Signals | None]:
    from venusrl.coordinator.run import run_training
    from venusrl.observe.recorder import RunRecorder

    stop = asyncio.Event()
    heard: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        heard.append(number)
        if len(heard) == 1:
            view.note("Finishing cleanly; once more leaves at once.")
            stop.set()
            return
        view.close()
        # Children die with this process and the store survives a kill at any instant: nothing is lost.
        view.note(f"Left at once. Resume with: {again}")
        os._exit(EXIT_INTERRUPTED)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    with RunRecorder(directory) as recorder:
        result = await run_training(
            recipe, directory, resume=resume, recorder=recorder, on_status=view.update, stop=stop
        )
    stopped = heard[0] if heard and result.resumable else None
    return result, stopped


def _log_to(folder: Path) -> logging.FileHandler:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / "coordinator.log")
    except OSError as error:
        raise CommandError(f"cannot write in {folder}: {error.strerror}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("venusrl")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return handler


def _draw(directory: Path) -> Path | None:
    """The reward picture; a run that has nothing to draw yet has none."""
    from venusrl.observe.history import read_history
    from venusrl.observe.plots import PLOT_FILE, plot_rewards
    from venusrl.observe.recorder import ObserveError, read_events

    path = directory / PLOT_FILE
    try:
        plot_rewards(read_history(read_events(directory)), path, directory.name)
    except ObserveError as error:
        warn(str(error))
        return None
    return path


def _print_result(result: RunSummary, directory: Path, picture: Path | None, again: str) -> None:
    from venusrl.cli.runs import summary_table

    console = stdout()
    console.print(f"\n{result.outcome}: {result.reason}" if result.reason else f"\n{result.outcome}", markup=False)
    console.print(summary_table(result.summary))
    console.print(f"\nsummary   {directory / 'summary.json'}", markup=False)
    if picture is not None:
        console.print(f"picture   {picture}", markup=False)
    console.print(f"scalars   tensorboard --logdir {directory / 'tensorboard'}", markup=False)
    if result.resumable:
        console.print(f"resume    {again}", markup=False)


def _resume_command(directory: Path) -> str:
    return shlex.join(["venusrl", "train", "--resume", "--run-dir", str(directory)])
