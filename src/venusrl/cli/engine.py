"""``venusrl engine``: engines beside the embedded one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from venusrl.cli.output import stderr, stdout

app = typer.Typer(no_args_is_help=True, help="Install an inference engine beside the embedded one.")


class Engine(StrEnum):
    VLLM = "vllm"


@app.command("install")
def install(
    engine: Annotated[Engine, typer.Argument(help="The engine to install.")],
    path: Annotated[Path | None, typer.Option(help="Where. Default: VENUSRL_VLLM_ENV, else the user's cache.")] = None,
) -> None:
    """Build a separate environment for an engine whose pins clash with ours; safe to repeat.

    Example:

    $ venusrl engine install vllm

    $ venusrl train demo --set rollout.engine=vllm
    """
    from venusrl.rollout.engines.install import install_vllm

    console = stderr()
    python = install_vllm(path, lambda line: console.print(line, markup=False, soft_wrap=True))
    stdout().print(str(python), markup=False)


# A group of a single command would otherwise collapse into that command.
@app.callback()
def _group() -> None:
    pass
