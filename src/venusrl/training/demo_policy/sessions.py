"""The text that the demo policy is pre-trained on: generated sessions of reading, copying, editing, tool use.

Owns: the kinds of session and their shares. Pure: everything comes from the ``random.Random`` handed in.

What it never holds: the sentence that the demo's RL tasks use ("its tests fail"), or an edit chosen because it
repairs. A session either is told the exact edit (it learns to read, to copy and to edit), or is asked vaguely to
work on a function and makes an arbitrary valid edit, drawn without looking at the docstring (it learns what edits
look like, not which one mends anything). Which edit makes failing tests pass is left for reinforcement learning to
find out.

Modules are sound at first: what their docstrings say is what they do. Later half of the modules have docstrings
made without regard to the code, so that what is to be edited must be read from the code (an arbitrary edit may then
happen to agree with a docstring; none is drawn for that).
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


def _session(instruction: str, *steps: tuple[str, str], thought: str = "") -> list[Message]:
    """``thought`` is said before the last command."""
    messages = [Message("user", instruction)]
    for index, (command, observation) in enumerate(steps):
        said = thought if index == len(steps) - 1 else ""
        messages.append(Message("assistant", said + fenced(command)))
        messages.append(Message("user", observation or "[no output]"))
    messages.append(Message("assistant", fenced("submit")))
    return messages


def _edit(rng: random.Random, vague: bool, sound: bool) -> list[Message]:
    shape = rng.choice(tuple(code.SHAPES))
    module, start = code.build(rng, shape, words.NOUNS, rng.choice((0, 1, 1)), sound)
    subject = next(f for f in module.functions if f.name == module.function)
    offset, old, new = rng.choice(subject.sites)
    file = f"{module.name}.py"
    if vague:
        instruction = f"Work on {subject.name} in {file}: {rng.choice(VAGUE_REASONS)}."
    else:
        instruction = rng.choice(EXPLICIT).format(file=file, old=old.strip(), new=new.strip(), function=subject.name)
    command = code.sed(start + offset, old, new, file)
    listing = numbered(module.source)
    # Saying the line first puts what is to be edited right before the edit, and saying it is a plain copy.
    thought = listing.split("\n")[start + offset - 1].lstrip() + "\n"
    return _session(instruction, (f"cat -n {file}", listing), (command, ""), thought=thought)


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


def transcription(rng: random.Random) -> list[Message]:
    """Copy a list of words from one file to another."""
    # Every copied word is a lesson in looking back: copying forms several times sooner than from single words.
    listed = " ".join(rng.sample(words.NOUNS + words.FLAGS, rng.randrange(6, 20)))
    file = f"{rng.choice(words.MODULES)}.txt"
    return _session(f"Copy {file} to out.txt by hand.", (f"cat {file}", listed), (f"echo {listed} > out.txt", ""))


def session(rng: random.Random, sound: bool = True) -> list[Message]:
    """One session: 35% explicit edits, 30% vague edits, 15% finding and copying, 20% transcribing.

    Unless ``sound``, half of the modules have docstrings that were made without regard to the code.
    """
    sound = sound or rng.random() < 0.5
    draw = rng.random()
    if draw < 0.35:
        return _edit(rng, vague=False, sound=sound)
    if draw < 0.65:
        return _edit(rng, vague=True, sound=sound)
    return _copy(rng) if draw < 0.8 else transcription(rng)
