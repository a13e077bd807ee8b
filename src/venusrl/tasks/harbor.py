"""Task directories in Harbor's shape.

    TASK/
      instruction.md      what the agent is told
      task.toml           [metadata], [agent] timeout_sec, [verifier] timeout_sec, [environment] template
      environment/        files put into /work before the agent starts (a Dockerfile there is not built)
      tests/test.sh       the verifier: runs after the agent, in the sandbox, with tests/ mounted read-only at /tests;
                          it writes a reward between 0 and 1 to /logs/verifier/reward.txt
      solution/solve.sh   the reference solution (optional; never shown to the agent)

Owns: reading and checking such directories. Must not know: sandboxes or models.
Guarantees: ``read_set`` either returns every task of a folder, in name order, or raises TaskError naming
the first faulty directory.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from venusrl.tasks.errors import TaskError
from venusrl.types import Task


def read_set(folder: Path, before_each: Callable[[], None] = lambda: None) -> list[Task]:
    """All tasks of ``folder`` (its immediate subdirectories). Raises TaskError, and what ``before_each`` raises."""
    if not folder.is_dir():
        raise TaskError(f"there is no task folder {folder}; give a directory that holds Harbor task directories")
    directories = sorted(d for d in folder.iterdir() if d.is_dir() and not d.name.startswith("."))
    if not directories:
        raise TaskError(f"{folder} holds no task directories (each needs instruction.md, task.toml and tests/test.sh)")
    tasks = []
    for directory in directories:
        before_each()
        tasks.append(read(directory))
    return tasks


def read(directory: Path) -> Task:
    """One task. Raises TaskError."""
    instruction = _text(directory / "instruction.md").strip()
    if not instruction:
        raise TaskError(f"{directory}/instruction.md is empty; write what the agent is to do")
    if not (directory / "tests" / "test.sh").is_file():
        raise TaskError(f"{directory} has no tests/test.sh: without a verifier nothing can be rewarded; add one")
    table = _toml(directory / "task.toml")
    metadata = {k: str(v) for k, v in _section(directory, table, "metadata").items()}
    return Task(
        id=directory.name,
        instruction=instruction,
        directory=str(directory.resolve()),
        family=metadata.get("family", metadata.get("category", "")),
        template=_template(directory, _section(directory, table, "environment")),
        agent_timeout_s=_seconds(directory, _section(directory, table, "agent"), 600.0),
        verifier_timeout_s=_seconds(directory, _section(directory, table, "verifier"), 120.0),
        metadata=metadata,
    )


def environment_files(task: Task) -> dict[str, bytes]:
    """The files of environment/, by path relative to /work (container build files are left out)."""
    root = Path(task.directory) / "environment"
    if not root.is_dir():
        return {}
    files = (p for p in sorted(root.rglob("*")) if p.is_file() and not p.is_symlink())
    return {
        str(p.relative_to(root)): p.read_bytes() for p in files if p.name not in ("Dockerfile", "docker-compose.yaml")
    }


def _template(directory: Path, section: dict[str, Any]) -> str:
    template = str(section.get("template", "host"))
    if template == "host":
        if (directory / "environment" / "Dockerfile").exists():
            raise TaskError(
                f"{directory}/environment has a Dockerfile, which is not built here: unpack its image into a directory "
                'and name that in task.toml as [environment] template = "DIR", or remove the Dockerfile to use "host"'
            )
        return template
    path = Path(template) if Path(template).is_absolute() else directory / template
    if not path.is_dir():
        raise TaskError(f'{directory}/task.toml: [environment] template = "{template}" is not a directory')
    return str(path.resolve())


def _seconds(directory: Path, section: dict[str, Any], default: float) -> float:
    value = section.get("timeout_sec", default)
    if not isinstance(value, int | float) or value <= 0:
        raise TaskError(f"{directory}/task.toml: timeout_sec must be a positive number, not {value!r}")
    return float(value)


def _section(directory: Path, table: dict[str, Any], name: str) -> dict[str, Any]:
    section = table.get(name, {})
    if not isinstance(section, dict):
        raise TaskError(f"{directory}/task.toml: {name} must be a table")
    return section


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise TaskError(f"{path} cannot be read ({error.strerror}); a task directory needs it") from None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{path} is not TOML: {error}") from None
