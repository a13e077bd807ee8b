"""``venusrl runs``: look at runs, finished or not. Reads a run's files, never writes but a picture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from venusrl.cli.output import CommandError, print_json, stderr, stdout, table

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(no_args_is_help=True, help="List, show and plot runs.")
_ROOT = Path("runs")
_Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
_Root = Annotated[Path, typer.Option("--root", help="Where runs live.")]
_Run = Annotated[str, typer.Argument(help="A run directory, or its name under --root.")]


@app.command("list")
def list_runs(root: _Root = _ROOT, json_output: _Json = False) -> None:
    """One line a run, newest first."""
    from venusrl.observe.recorder import EVENTS_FILE

    found = [f.parent for f in root.glob(f"*/{EVENTS_FILE}")] if root.is_dir() else []
    found.sort(key=lambda folder: (folder / EVENTS_FILE).stat().st_mtime, reverse=True)
    runs = [{"run": folder.name, "seen": (folder / EVENTS_FILE).stat().st_mtime, **_facts(folder)} for folder in found]
    if json_output:
        print_json(runs)
        return
    if not runs:
        stderr().print(f"no runs in {root}; start one with: venusrl train demo", markup=False)
        return
    rows = [
        [
            run["run"],
            run["outcome"],
            f"{run['steps']}/{run['max_steps']}",
            _number(run["eval_reward_start"]),
            _number(run["eval_reward_end"]),
            _clock(run["wall_s"]),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run["seen"])),
        ]
        for run in runs
    ]
    columns = ("run", "outcome", "steps", "eval start", "eval end", "time", "last seen")
    stdout().print(table(columns, rows, right=("steps", "eval start", "eval end", "time")))


@app.command("show")
def show(run: _Run, root: _Root = _ROOT, json_output: _Json = False) -> None:
    """A run's summary, made from its events: also of one that goes on, or was killed."""
    folder = _folder(run, root)
    facts = _facts(folder)
    if json_output:
        print_json(facts)
        return
    console = stdout()
    console.print(summary_table(facts))
    if facts["evaluations"]:
        rows = [
            [
                f"v{e['version']}",
                e["mode"],
                _number(e["reward"]),
                f"{_number(e['ci_low'])} .. {_number(e['ci_high'])}",
                str(e["tasks"]),
            ]
            for e in facts["evaluations"]
        ]
        console.print()
        console.print(table(("version", "mode", "reward", "95% interval", "tasks"), rows, right=("reward", "tasks")))


@app.command("plot")
def plot(
    run: _Run,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: reward.png in the run.")] = None,
    root: _Root = _ROOT,
) -> None:
    """Draw the reward curve, over steps and over time, into a PNG."""
    from venusrl.observe.history import read_history
    from venusrl.observe.plots import PLOT_FILE, plot_rewards
    from venusrl.observe.recorder import read_events

    folder = _folder(run, root)
    path = output or folder / PLOT_FILE
    plot_rewards(read_history(read_events(folder)), path, folder.name)
    stdout().print(str(path), markup=False)


def _folder(run: str, root: Path) -> Path:
    from venusrl.observe.recorder import EVENTS_FILE

    for folder in (Path(run), root / run):
        if (folder / EVENTS_FILE).is_file():
            return folder.resolve()
    raise CommandError(f"there is no run {run!r}, neither as a directory nor in {root}; see: venusrl runs list")


def _facts(folder: Path) -> dict[str, Any]:
    from venusrl.observe.summary import build_summary

    return msgspec.structs.asdict(build_summary(folder))


def summary_table(facts: dict[str, Any]) -> Table:
    """The summary's figures for people."""
    discarded = facts["discarded_tokens_by_reason"]
    rows = [
        ("run", f"{facts['name']} ({facts['outcome']}{': ' + facts['error'] if facts['error'] else ''})"),
        ("steps", f"{facts['steps']} of {facts['max_steps']} in {_clock(facts['wall_s'])}"),
        ("held-out reward", _change(facts["eval_reward_start"], facts["eval_reward_end"])),
        ("held-out, greedy", _change(facts["eval_greedy_start"], facts["eval_greedy_end"])),
        ("training reward", _change(facts["reward_first"], facts["reward_last"])),
        ("trained", f"{facts['trained_trajectories']:,} trajectories, {facts['trained_tokens']:,} tokens"),
        ("staleness", f"mean {facts['staleness_mean']:.2f}, max {facts['staleness_max']}"),
        ("trainer idle", _share(facts["trainer_idle_fraction"])),
        ("waiting on coordinator", _share(facts["coordinator_critical_fraction"])),
        ("tokens discarded", ", ".join(f"{n:,} {reason}" for reason, n in discarded.items()) or "none"),
    ]
    rows += [(name, _engine(learned)) for name, learned in sorted(facts["engine_costs"].items())]
    shown = table(("", ""), rows)
    shown.show_header = False
    return shown


def _engine(learned: dict[str, Any]) -> str:
    """What its work takes, and how well that is known."""
    costs = learned["costs"]
    step = f"step {1000 * costs['step_base_s']:.3g} ms + {1000 * costs['step_sequence_s']:.3g} ms a sequence"
    prefill = f"prefill {1000 * costs['prefill_token_s']:.3g} ms a token"
    return f"{step}; {prefill} (median error {learned['error']:.0%} of {learned['samples']} turns)"


def _change(start: float | None, end: float | None) -> str:
    if start is None:
        return "not measured"
    return _number(start) if end is None else f"{start:.3f} → {end:.3f} ({end - start:+.3f})"


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _clock(seconds: float) -> str:
    from venusrl.observe.live import clock

    return clock(seconds)
