"""Writes generated repair tasks as Harbor task directories.

Owns: the directory's content and the split into train and held-out sets. The two sets share no function noun, hence
no function name, and no module text. Guarantees: the same seed gives the same directories; a finished folder is
recognised by its manifest and not written again; an unfinished one is replaced.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

from venusrl.tasks.errors import TaskError
from venusrl.tasks.repair import code, words

FORMAT = 1
_HELD_OUT_NOUNS = 28
_TEST_SH = """#!/bin/sh
# Runs after the agent. check.py alone decides, whatever the code under test printed or wrote.
reward=$(python3 -I -S /tests/check.py /work) || reward=0
echo "$reward" > /logs/verifier/reward.txt
"""


def nouns(held_out: bool) -> list[str]:
    """Nouns that name functions in one of the two sets."""
    shuffled = random.Random("venusrl-held-out").sample(words.NOUNS, len(words.NOUNS))
    return sorted(shuffled[:_HELD_OUT_NOUNS] if held_out else shuffled[_HELD_OUT_NOUNS:])


def modules(count: int, seed: int, families: tuple[str, ...], held_out: bool) -> Iterator[code.Module]:
    """``count`` faulty modules, families in turn, all different."""
    unknown = sorted(set(families) - set(code.FAMILIES))
    if unknown:
        raise TaskError(f"tasks.families: unknown {', '.join(unknown)}; there are {', '.join(code.FAMILIES)}")
    chosen = families or code.FAMILIES
    rng = random.Random(f"{seed}-{held_out}")
    seen: set[str] = set()
    index = 0
    while index < count:
        module = code.faulty(rng, chosen[index % len(chosen)], nouns(held_out))
        if module.source not in seen:
            seen.add(module.source)
            index += 1
            yield module


def instruction(module: code.Module) -> str:
    return f"Work on {module.function} in {module.name}.py: its tests fail."


def write_set(
    folder: Path,
    count: int,
    seed: int,
    families: tuple[str, ...],
    held_out: bool,
    before_each: Callable[[], None] = lambda: None,
) -> Path:
    """Write ``count`` task directories under ``folder`` and return it. What ``before_each`` raises gives it up."""
    manifest = {"format": FORMAT, "count": count, "seed": seed, "families": list(families), "held_out": held_out}
    stamp = folder / ".manifest.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == manifest:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for index, module in enumerate(modules(count, seed, families, held_out)):
        before_each()
        _write_task(folder / f"{'held-out' if held_out else 'train'}-{index:05d}", module)
    stamp.write_text(json.dumps(manifest))
    return folder


def _write_task(directory: Path, module: code.Module) -> None:
    fault = module.fault
    assert fault is not None
    sound = code.fix(module)
    check = (resources.files("venusrl") / "tasks" / "repair" / "data" / "check.py").read_text()
    cases = {
        "file": f"{module.name}.py",
        "function": module.function,
        "calls": [list(call) for call in module.calls],
        "expected": code.evaluate(sound, module.function, module.calls),
    }
    files = {
        "instruction.md": instruction(module) + "\n",
        "task.toml": f'version = "1.0"\n\n[metadata]\nfamily = "{fault.family}"\nline = {fault.line}\n\n'
        "[agent]\ntimeout_sec = 120.0\n\n[verifier]\ntimeout_sec = 20.0\n",
        f"environment/{module.name}.py": module.source,
        "tests/test.sh": _TEST_SH,
        "tests/check.py": check,
        "tests/cases.json": json.dumps(cases) + "\n",
        "solution/solve.sh": f"#!/bin/sh\n{code.sed(fault.line, fault.wrong, fault.right, f'{module.name}.py')}\n",
    }
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
