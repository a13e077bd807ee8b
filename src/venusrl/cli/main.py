"""The ``venusrl`` command.

Owns: the list of command groups and the boundary where a failure becomes one message and an exit code: 0 done,
1 the command or the run failed, 2 wrong usage or recipe, 130 stopped by Ctrl-C. A user's mistake never shows a
traceback (``--debug`` does); a fault of ours always does.

Guarantees: ``venusrl --help`` imports nothing heavy.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import metadata
from typing import Annotated

import typer

from venusrl.cli import demo_policy, doctor, engine, env, predictor, runs, simulate, tasks, train
from venusrl.cli.output import EXIT_FAILED, EXIT_USAGE, CommandError, print_json, stderr

app = typer.Typer(
    name="venusrl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement learning for long-horizon, tool-using language-model agents.",
    epilog="First run: venusrl doctor, then venusrl train demo (about ten minutes on two cores, no GPU).",
)
app.command()(train.train)
app.command()(doctor.doctor)
app.command()(simulate.simulate)
app.add_typer(runs.app, name="runs")
app.add_typer(tasks.app, name="tasks")
app.add_typer(engine.app, name="engine")
app.add_typer(env.app, name="env")
app.add_typer(demo_policy.app, name="demo-policy")
app.add_typer(predictor.app, name="predictor")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(metadata.version("venusrl"))
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of expected failures too.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """``debug`` is looked up once a failure is told (``_report``), as ``--json`` is."""


def main() -> None:
    """Entry point: run the command, turn a known failure into one message and an exit code."""
    try:
        app()  # leaves through SystemExit; wrong usage, Ctrl-C and a closed pipe are dealt with inside
    except Exception as error:  # the boundary: what is not known is raised again, a fault of ours
        if not isinstance(error, _known_failures()):
            raise
        sys.exit(_report(error))


def _known_failures() -> tuple[type[Exception], ...]:
    # Imported only once something failed, so that a working command does not pay for it.
    from venusrl.coordinator.errors import CoordinatorError
    from venusrl.models import ModelError
    from venusrl.observe.recorder import ObserveError
    from venusrl.recipe import RecipeError
    from venusrl.rollout.chat import TokenizerError
    from venusrl.rollout.engines.protocol import EngineError
    from venusrl.sandboxes.protocol import SandboxError
    from venusrl.tasks import TaskError
    from venusrl.training.errors import TrainingError

    return (
        CommandError,
        CoordinatorError,
        EngineError,
        ModelError,
        ObserveError,
        RecipeError,
        SandboxError,
        TaskError,
        TokenizerError,
        TrainingError,
    )


def _report(error: Exception) -> int:
    from venusrl.recipe import RecipeError

    notes = getattr(error, "__notes__", [])
    if "--debug" in sys.argv[1:] or os.environ.get("VENUSRL_DEBUG"):
        traceback.print_exception(error)
    if "--json" in sys.argv[1:]:
        print_json({"error": str(error), "kind": type(error).__name__, "notes": notes})
    console = stderr()
    console.print("error: ", style="bold red", end="", soft_wrap=True)
    console.print("\n".join([str(error), *notes]), markup=False, soft_wrap=True)
    return EXIT_USAGE if isinstance(error, RecipeError) else EXIT_FAILED


if __name__ == "__main__":
    main()
