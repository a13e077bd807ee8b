"""``venusrl predictor``: how well lengths can be predicted from what was recorded, and a model learned from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from venusrl.cli.output import CommandError, print_json, stderr, stdout, table

if TYPE_CHECKING:
    from venusrl.scheduling.predictor.evaluation import Evaluation, Figures
    from venusrl.scheduling.predictor.learned import Learned
    from venusrl.scheduling.predictor.replay import RecordedGroup
    from venusrl.scheduling.predictor.siblings import Limits

app = typer.Typer(no_args_is_help=True, help="Train and evaluate the predictor of remaining lengths.")

_Sources = Annotated[
    list[Path], typer.Argument(help="Run directories, and trace files (.jsonl or .jsonl.gz, one session a line).")
]
_Window = Annotated[int, typer.Option(help="Groups that are under way at once in the replay.", min=1)]
_MaxTurns = Annotated[int | None, typer.Option(help="Where trajectories were cut, in turns.", min=1)]
_MaxTokens = Annotated[int | None, typer.Option(help="Where they were cut, in generated tokens.", min=1)]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


@app.command("train")
def train(
    sources: _Sources,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write what was learned into.")],
    window: _Window = 16,
    max_turns: _MaxTurns = None,
    max_tokens: _MaxTokens = None,
    json_output: _Json = False,
) -> None:
    """Learn from recorded trajectories. The file is for evaluate, or for a run's directory as its predictor.bin.

    Example:

    $ venusrl predictor train runs/demo --output demo.predictor
    """
    groups = _groups(sources)
    predictor = _learned(_limits(max_turns, max_tokens), None)
    found = _evaluate(predictor, groups, window, "learning from")
    quality = predictor.quality()
    if not quality.refits:
        needed = 2 * predictor.config.first_fit
        raise CommandError(f"{found.trajectories} trajectories are too few to learn from: it takes at least {needed}")
    staging = output.with_name(output.name + ".partial")
    try:
        staging.write_bytes(predictor.state())
        os.replace(staging, output)
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}") from error
    if json_output:
        print_json({"output": str(output), "quality": msgspec.to_builtins(quality), **_facts(found)})
        return
    stdout().print(_table([found]))
    stdout().print(f"{output}: {quality.refits} fits, {quality.active} answers", markup=False)


@app.command("evaluate")
def evaluate(
    sources: _Sources,
    state: Annotated[
        Path | None, typer.Option(help="What `train` wrote; the learned predictor starts with it.")
    ] = None,
    window: _Window = 16,
    max_turns: _MaxTurns = None,
    max_tokens: _MaxTokens = None,
    json_output: _Json = False,
) -> None:
    """Replay recorded trajectories and score every forecast against what came: sibling heuristic and learned predictor.

    A forecast knows only what was known at its moment; the first quarter of the trajectories is not scored.

    Example:

    $ venusrl predictor evaluate runs/demo --json
    """
    from venusrl.scheduling.predictor.siblings import Siblings

    groups = _groups(sources)
    limits = _limits(max_turns, max_tokens)
    learned = _learned(limits, state)
    found = [_evaluate(predictor, groups, window, "replaying") for predictor in (Siblings(limits), learned)]
    quality = learned.quality()
    if json_output:
        print_json({"evaluations": [_facts(one) for one in found], "quality": msgspec.to_builtins(quality)})
        return
    stdout().print(_table(found))
    stdout().print(f"the learned predictor's answers come from: {quality.active}", markup=False)


def _groups(sources: list[Path]) -> list[RecordedGroup]:
    from venusrl.cli.recorded import trained_groups
    from venusrl.simulation.recordings import RecordingError, of_run, of_trace

    if len({source.resolve() for source in sources}) < len(sources):
        raise CommandError("a source is named twice: its trajectories would count double")
    found: list[RecordedGroup] = []
    for source in sources:
        if not source.exists():
            raise CommandError(f"there is no {source}: name a run directory or a trace file")
        try:
            read = of_run(trained_groups(source)) if source.is_dir() else of_trace(source)
        except RecordingError as error:
            raise CommandError(str(error)) from error
        if not read:
            raise CommandError(f"{source} holds no trained trajectory yet")
        found.extend(read if len(sources) == 1 else _apart(read, source))
    return found


def _apart(groups: list[RecordedGroup], source: Path) -> list[RecordedGroup]:
    """Names that do not clash with those of another source; tasks of the same name are the same task."""
    from venusrl.scheduling.predictor.replay import RecordedGroup

    replace = msgspec.structs.replace
    return [
        RecordedGroup(f"{source}:{g.name}", g.task, tuple(replace(m, name=f"{source}:{m.name}") for m in g.members))
        for g in groups
    ]


def _limits(max_turns: int | None, max_tokens: int | None) -> Limits:
    from venusrl.scheduling.predictor.siblings import Limits

    return Limits(max_turns=max_turns, max_tokens=max_tokens)


def _learned(limits: Limits, state: Path | None) -> Learned:
    from venusrl.scheduling.predictor import StateError
    from venusrl.scheduling.predictor.boosting import LibraryMissing
    from venusrl.scheduling.predictor.learned import Learned

    try:
        predictor = Learned(limits)
        if state is not None:
            predictor.load(state.read_bytes())
    except (LibraryMissing, StateError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{state} cannot be read: {error.strerror}") from error
    return predictor


def _evaluate(predictor: Any, groups: list[RecordedGroup], window: int, doing: str) -> Evaluation:
    from venusrl.scheduling.predictor.evaluation import evaluate as replay_and_score

    total = sum(len(group.members) for group in groups)
    console = stderr()
    with console.status(f"{predictor.name}: {doing} {total} trajectories") as status:

        def progress(ended: int) -> None:
            if ended % 16 == 0:
                status.update(f"{predictor.name}: {doing} {total} trajectories, {ended} done")

        return replay_and_score(predictor, groups, window, on_ended=progress)


def _facts(found: Evaluation) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(found)
    return facts


def _table(found: list[Evaluation]) -> Any:
    columns = ("predictor", "turns", "n", "rho", "tau", "cover", "bias", "rho (tokens)", "bias (tokens)")
    rows = []
    for one in found:
        rows.append([one.predictor, "all", *_cells(one.overall)])
        rows.extend([one.predictor, f"{s.first}-{s.last}", *_cells(s)] for s in one.stages)
    return table(columns, rows, right=columns[2:])


def _cells(of: Figures) -> list[str]:
    values = (of.spearman, of.kendall, of.coverage, of.bias, of.tokens_spearman, of.tokens_bias)
    return [str(of.forecasts), *("-" if value is None else f"{value:.2f}" for value in values)]
