"""The text that the demo policy is pre-trained on: generated sessions of reading, copying, editing, tool use.

Owns: the kinds of session and their shares. Pure: everything comes from the ``random.Random`` handed in.

What it never holds: a faulty module, or the sentence that the demo's RL tasks use ("its tests fail"). Modules here
are sound: what their docstrings say is what they do. A session either is told the exact edit (it learns to read, to
copy and to edit), or is asked vaguely to work on a function and makes an arbitrary valid edit (it learns what edits
look like, not which one mends anything). Which edit makes failing tests pass is left for reinforcement learning to
find out.
"""

from __future__ import annotations

import random

from venusrl.tasks.repair import code, words
from venusrl.types import Message

VAGUE_REASONS = (
    "a review is due",
    "it needs care",
    "someone asked for it",
    "its style is off",
    "its tests are slow",
    "its docs fail to load",
    "a user wants it",
    "it is old",
)
EXPLICIT = (
    "In {file}, change {old} to {new} in {function}.",
    "In {function} of {file}, put {new} for {old}.",
    "Edit {file}: {function} must have {new} where it has {old}.",
)


def numbered(source: str) -> str:
    """``cat -n`` of a file, as an observation shows it."""
    return "\n".join(f"{i:6d}\t{line}" for i, line in enumerate(source.rstrip("\n").split("\n"), start=1))


def fenced(command: str) -> str:
    return f"```sh\n{command}\n```"


def _session(instruction: str, *steps: tuple[str, str]) -> list[Message]:
    messages = [Message("user", instruction)]
    for command, observation in steps:
        messages.append(Message("assistant", fenced(command)))
        messages.append(Message("user", observation or "[no output]"))
    messages.append(Message("assistant", fenced("submit")))
    return messages


def _edit(rng: random.Random, vague: bool) -> list[Message]:
    shape = rng.choice(tuple(code.SHAPES))
    module, start = code.build(rng, shape, words.NOUNS, rng.choice((0, 1, 1)))
    subject = next(f for f in module.functions if f.name == module.function)
    offset, old, new = rng.choice(subject.sites)
    file = f"{module.name}.py"
    if vague:
        instruction = f"Work on {subject.name} in {file}: {rng.choice(VAGUE_REASONS)}."
    else:
        instruction = rng.choice(EXPLICIT).format(file=file, old=old, new=new, function=subject.name)
    command = f"sed -i '{start + offset}s/{old}/{new}/' {file}"
    return _session(instruction, (f"cat -n {file}", numbered(module.source)), (command, ""))


def _copy(rng: random.Random) -> list[Message]:
    listed = rng.sample(words.NOUNS, rng.randrange(3, 9))
    file = f"{rng.choice(words.MODULES)}.txt"
    which = rng.randrange(4)
    if which == 0:
        index, place = rng.choice(((0, "first"), (len(listed) - 1, "last"), (1, "second")))
        instruction = f"Write the {place} word of {file} to out.txt."
        return _session(instruction, (f"cat {file}", " ".join(listed)), (f"echo {listed[index]} > out.txt", ""))
    if which == 1:
        line = rng.randrange(len(listed))
        instruction = f"Write line {line + 1} of {file} to out.txt."
        return _session(
            instruction, (f"cat -n {file}", numbered("\n".join(listed))), (f"echo {listed[line]} > out.txt", "")
        )
    if which == 2:
        line = rng.randrange(len(listed))
        instruction = f"On which line of {file} is {listed[line]}? Write it to out.txt."
        return _session(
            instruction, (f"cat -n {file}", numbered("\n".join(listed))), (f"echo {line + 1} > out.txt", "")
        )
    instruction = "Write the name of the only file to out.txt."
    return _session(instruction, ("ls", file), (f"echo {file} > out.txt", ""))


def session(rng: random.Random) -> list[Message]:
    """One session: 50% explicit edits, 30% vague edits, 20% reading and copying."""
    draw = rng.random()
    if draw < 0.5:
        return _edit(rng, vague=False)
    if draw < 0.8:
        return _edit(rng, vague=True)
    return _copy(rng)
