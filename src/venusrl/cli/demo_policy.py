"""``venusrl demo-policy``: the tiny model that the demo starts from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated

import typer

from venusrl.cli.output import EXIT_FAILED, CommandError, print_json, stderr, stdout, table

app = typer.Typer(no_args_is_help=True, help="The tiny model that the demo starts from: look at it, build it anew.")
_BUILTIN = "builtin:demo-policy"


@app.command("info")
def info(json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False) -> None:
    """Where the shipped demo policy lives, what it is, and whether its weights are the ones that were built."""
    from venusrl.models import resolve

    directory = resolve(_BUILTIN)
    config = json.loads((directory / "config.json").read_text())
    weights = directory / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    recorded = directory / "recipe.json"
    recipe = json.loads(recorded.read_text()) if recorded.is_file() else {}
    facts = {
        "directory": str(directory),
        "architecture": ", ".join(config.get("architectures") or []),
        "layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "vocabulary": config["vocab_size"],
        "weights_bytes": weights.stat().st_size,
        "sha256": digest,
        "as_built": digest == recipe.get("sha256"),
        "figures": recipe.get("figures", {}),
    }
    if json_output:
        print_json(facts)
        raise typer.Exit(0 if facts["as_built"] else EXIT_FAILED)
    stdout().print(table(("demo policy", ""), [(key, str(value)) for key, value in facts.items()]))
    if not facts["as_built"]:
        raise CommandError(f"the weights in {directory} are not the ones that their recipe.json records")


@app.command("build")
def build(
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write the model into.")],
    steps: Annotated[int | None, typer.Option(help="Training steps. Default: the shipped policy's.", min=1)] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    seed: Annotated[int | None, typer.Option(help="Seed. Default: the shipped policy's.")] = None,
) -> None:
    """Pre-train a demo policy from nothing, on generated text (about an hour).

    Interrupted, the same command goes on where it was.

    Example:

    $ venusrl demo-policy build --output my-policy --steps 3000

    $ venusrl train demo --set model.path=my-policy
    """
    import msgspec

    from venusrl.training.demo_policy import build as builder  # torch: only this command pays for it

    chosen = {key: value for key, value in (("steps", steps), ("seed", seed)) if value is not None}
    config = msgspec.structs.replace(builder.BuildConfig(), **chosen)
    console = stderr()
    builder.build(output, config, threads, lambda line: console.print(line, markup=False, soft_wrap=True))
    stdout().print(str(output), markup=False)


@app.command("continue")
def go_on(
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write the model into.")],
    seconds: Annotated[float, typer.Option(help="Wall time to spend.", min=1)],
    model: Annotated[str, typer.Option(help="The policy to go on from.")] = _BUILTIN,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the data; another than it was built with.")] = 1001,
) -> None:
    """Pre-train a demo policy for some more time: what would the time of a run have given without any reward?

    Example:

    $ venusrl demo-policy continue --seconds 240 --output longer

    $ venusrl train demo --set model.path=longer
    """
    from venusrl.models import ModelError, resolve
    from venusrl.training.demo_policy.longer import pretrain_longer

    try:
        directory = resolve(model)
    except ModelError as error:
        raise CommandError(str(error)) from error
    console = stderr()
    pretrain_longer(
        directory, output, seconds, seed, threads, lambda line: console.print(line, markup=False, soft_wrap=True)
    )
    stdout().print(str(output), markup=False)
