"""``venusrl tasks``: look at tasks, check one's own.

A task directory holds instruction.md, task.toml, environment/, tests/test.sh and, if it has one, solution/solve.sh.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from venusrl.cli.output import EXIT_FAILED, CommandError, print_json, stderr, stdout, table

if TYPE_CHECKING:
    from venusrl.types import Task

app = typer.Typer(no_args_is_help=True, help="List, show and check tasks.")
_Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
_SHOWN_FILE_BYTES = 4096


@app.command("list")
def list_tasks(
    source: Annotated[str, typer.Argument(help="A folder of task directories, or a recipe (its tasks).")] = "demo",
    limit: Annotated[int, typer.Option(help="Show at most this many of each set; 0 = all.", min=0)] = 20,
    json_output: _Json = False,
) -> None:
    """The tasks of a folder or of a recipe, one line each."""
    with tempfile.TemporaryDirectory(prefix="venusrl-tasks-") as workdir:
        sets = _sets(source, Path(workdir))
        if json_output:
            print_json({name: [{"id": t.id, "family": t.family} for t in found] for name, found in sets.items()})
            return
        console = stdout()
        for name, found in sets.items():
            shown = found[:limit] if limit else found
            rows = [(task.id, task.family, _first_line(task)) for task in shown]
            console.print(table((f"{name} ({len(found)})", "family", "instruction"), rows))
            if len(shown) < len(found):
                stderr().print(f"... and {len(found) - len(shown)} more (--limit 0 shows all)", markup=False)


def _sets(source: str, workdir: Path) -> dict[str, list[Task]]:
    from venusrl.recipe import load
    from venusrl.tasks import load_tasks
    from venusrl.tasks.harbor import read_set

    if Path(source).is_dir():
        return {"tasks": read_set(Path(source))}
    sets = load_tasks(load(source).tasks, workdir)
    return {"train": sets.train, "held out": sets.held_out}


def _first_line(task: Task) -> str:
    line = task.instruction.splitlines()[0]
    return line if len(line) <= 60 else line[:59] + "…"


@app.command("show")
def show(directory: Annotated[Path, typer.Argument(help="A task directory.")]) -> None:
    """One task: what the agent is told and finds, how it is verified, the reference solution."""
    from venusrl.tasks.harbor import read

    task = read(directory)
    console = stdout()
    facts = [
        ("id", task.id),
        ("family", task.family or "-"),
        ("template", task.template),
        ("agent timeout", f"{task.agent_timeout_s:g} s"),
        ("verifier timeout", f"{task.verifier_timeout_s:g} s"),
    ]
    console.print(table(("task", ""), facts))
    console.print(f"\n{task.instruction}", markup=False)
    for folder in ("environment", "tests", "solution"):
        for path in sorted(p for p in (directory / folder).rglob("*") if p.is_file()):
            console.print(f"\n--- {path.relative_to(directory)}", markup=False)
            console.print(path.read_bytes()[:_SHOWN_FILE_BYTES].decode(errors="replace"), markup=False)


@app.command("check")
def check(
    folder: Annotated[Path, typer.Argument(help="A task directory, or a folder of them.")],
    run: Annotated[
        bool, typer.Option("--run", help="Run them in sandboxes: tests must fail untouched and pass when solved.")
    ] = False,
    json_output: _Json = False,
) -> None:
    """Check your own tasks: every faulty directory with its fault. Exit code 1 when there is one.

    Example:

    $ venusrl tasks check my-tasks --run

    $ venusrl train demo --set tasks.source=my-tasks --set tasks.held_out=my-held-out-tasks
    """
    directories = _directories(folder)
    tasks, faults = _read(directories)
    if run and tasks:
        faults |= asyncio.run(_prove(tasks))
    if json_output:
        print_json({"tasks": len(directories), "faults": faults})
        raise typer.Exit(EXIT_FAILED if faults else 0)
    stdout().print(f"{len(directories) - len(faults)} of {len(directories)} tasks are usable", markup=False)
    if faults:
        raise CommandError("\n".join(faults.values()))


def _read(directories: list[Path]) -> tuple[list[Task], dict[str, str]]:
    from venusrl.tasks import TaskError
    from venusrl.tasks.harbor import read

    tasks: list[Task] = []
    faults: dict[str, str] = {}
    for directory in directories:
        try:
            tasks.append(read(directory))
        except TaskError as error:
            faults[str(directory)] = str(error)
    return tasks, faults


async def _prove(tasks: list[Task]) -> dict[str, str]:
    from venusrl.sandboxes.node import EmbeddedNode
    from venusrl.sandboxes.protocol import Limits
    from venusrl.tasks.proof import prove

    faults: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="venusrl-node-") as root:
        node = EmbeddedNode(Path(root), owner="venusrl tasks check")
        await node.start()
        try:
            for task in tasks:
                if found := await prove(node, task, Limits()):
                    faults[task.directory] = "\n".join(found)
        finally:
            await node.close()
    return faults


def _directories(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CommandError(f"there is no folder {folder}")
    if (folder / "instruction.md").exists() or (folder / "task.toml").exists():
        return [folder]
    found = sorted(d for d in folder.iterdir() if d.is_dir() and not d.name.startswith("."))
    if not found:
        raise CommandError(f"{folder} holds no task directories")
    return found
