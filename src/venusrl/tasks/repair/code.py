"""Small Python modules with one fault, generated.

Owns: the vocabulary, the function shapes and the fault families of the built-in task set. Pure: everything
comes from the ``random.Random`` handed in. The demo policy's pre-training reads (sound) modules made by the
same shapes; faults are made here only.

Must not know: tasks, directories, sandboxes.

Guarantees: ``faulty`` modules fail at least one of their calls and pass all of them once ``fix`` is applied
(checked at generation by running both, see ``expected``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from venusrl.tasks.repair.words import FLAGS, MODULES, NOUNS, VERBS

FAMILIES = ("operator", "off_by_one", "wrong_variable", "missing_negation", "wrong_default", "swapped_arguments")

ARITHMETIC = {
    "+": ("the sum of {a} and {b}", "{a} plus {b}"),
    "-": ("the difference of {a} and {b}", "{a} minus {b}"),
    "*": ("the product of {a} and {b}", "{a} times {b}"),
}
COMPARISON = {
    "<": "{a} is less than {b}",
    "<=": "{a} is at most {b}",
    ">": "{a} is more than {b}",
    ">=": "{a} is at least {b}",
}


class Function(msgspec.Struct, frozen=True):
    """One generated function: its source lines, and what its shape offers to an editor.

    ``sites`` are (line offset, old text, new text) edits that keep the module valid Python; a word or an operator there
    takes the space before it along, so that it is the same token as in a listing.
    """

    name: str
    params: tuple[str, ...]
    lines: tuple[str, ...]
    shape: str
    calls: tuple[tuple[Any, ...], ...]
    sites: tuple[tuple[int, str, str], ...]


class Fault(msgspec.Struct, frozen=True):
    """``new`` stands where ``old`` should be, on ``line`` (1-based) of the module."""

    family: str
    function: str
    line: int
    wrong: str
    right: str


class Module(msgspec.Struct, frozen=True):
    """A generated module. ``calls``: function name and argument lists that tell right from wrong."""

    name: str
    source: str
    function: str
    calls: tuple[tuple[Any, ...], ...]
    functions: tuple[Function, ...]
    fault: Fault | None = None


# --- shapes -----------------------------------------------------------------------------------------
def _name(rng: random.Random, nouns: Sequence[str]) -> str:
    return f"{rng.choice(VERBS)}_{rng.choice(nouns)}"


def _numbers(rng: random.Random, count: int, width: int) -> tuple[tuple[Any, ...], ...]:
    rows = [tuple(rng.sample(range(2, 30), width)) for _ in range(count)]
    return tuple(rows)


def arithmetic(rng: random.Random, nouns: Sequence[str], sound: bool) -> Function:
    """``return a op b``, with two or three parameters."""
    params = tuple(rng.sample(NOUNS, rng.choice((2, 3))))
    a, b = rng.sample(params, 2)
    op = rng.choice(tuple(ARITHMETIC))
    told_op, (told_a, told_b) = (op, (a, b)) if sound else (rng.choice(tuple(ARITHMETIC)), rng.sample(params, 2))
    doc = rng.choice(ARITHMETIC[told_op]).format(a=told_a, b=told_b)
    name = _name(rng, nouns)
    lines = (f"def {name}({', '.join(params)}):", f'    """Return {doc}."""', f"    return {a} {op} {b}")
    sites = [(2, f" {op}", f" {other}") for other in ARITHMETIC if other != op]
    sites += [(2, f" {used}", f" {spare}") for used in (a, b) for spare in params if spare not in (a, b)]
    return Function(name, params, lines, "arithmetic", _numbers(rng, 6, len(params)), tuple(sites))


def comparison(rng: random.Random, nouns: Sequence[str], sound: bool) -> Function:
    """``return a < b``."""
    params = tuple(rng.sample(NOUNS, 2))
    a, b = rng.sample(params, 2)
    op = rng.choice(tuple(COMPARISON))
    name = _name(rng, nouns)
    doc = COMPARISON[op if sound else rng.choice(tuple(COMPARISON))].format(a=a, b=b)
    lines = (f"def {name}({', '.join(params)}):", f'    """Tell whether {doc}."""', f"    return {a} {op} {b}")
    n = rng.randrange(3, 20)
    calls = ((n, n), (n, n + 1), (n + 1, n), (n, n + 5), (n + 5, n))
    sites = tuple((2, f" {op}", f" {other}") for other in COMPARISON if other != op)
    return Function(name, params, lines, "comparison", calls, sites)


def condition(rng: random.Random, nouns: Sequence[str], sound: bool) -> Function:
    """``return a and not b``: which of the two flags is negated, if any."""
    params = tuple(rng.sample(FLAGS, 2))
    a, b = rng.sample(params, 2)
    left, right = rng.choice(((False, True), (True, False), (False, False), (True, True)))
    words = {False: "{} is set", True: "{} is not set"}
    body = f"{'not ' * left}{a} and {'not ' * right}{b}"
    name = _name(rng, nouns)
    told = (left, right) if sound else (rng.random() < 0.5, rng.random() < 0.5)
    doc = f"{words[told[0]].format(a)} and {words[told[1]].format(b)}"
    lines = (f"def {name}({', '.join(params)}):", f'    """Tell whether {doc}."""', f"    return {body}")
    calls = ((True, True), (True, False), (False, True), (False, False))
    sites = [(2, f" not {x}", f" {x}") if n else (2, f" {x}", f" not {x}") for x, n in ((a, left), (b, right))]
    sites.append((2, " and", " or"))
    return Function(name, params, lines, "condition", calls, tuple(sites))


def default(rng: random.Random, nouns: Sequence[str], sound: bool) -> Function:
    """``def f(a, b=5)`` with the default stated in words of the docstring."""
    a, b = rng.sample(NOUNS, 2)
    value = rng.randrange(2, 10)
    told = value if sound else rng.randrange(2, 10)
    op = rng.choice(tuple(ARITHMETIC))
    name = _name(rng, nouns)
    doc = f"Return {rng.choice(ARITHMETIC[op]).format(a=a, b=b)}; {b} is {told} unless given"
    lines = (f"def {name}({a}, {b}={value}):", f'    """{doc}."""', f"    return {a} {op} {b}")
    calls = tuple((n,) for n in rng.sample(range(2, 30), 3)) + _numbers(rng, 3, 2)
    sites = tuple((0, f"={value}", f"={other}") for other in range(2, 10) if other != value)
    return Function(name, (a, b), lines, "default", calls, sites)


def call(rng: random.Random, nouns: Sequence[str], sound: bool) -> Function:
    """``return minus(a, b)``: a call of a helper where the order of the arguments matters."""
    params = tuple(rng.sample(NOUNS, 2))
    a, b = rng.sample(params, 2)
    name = _name(rng, nouns)
    taken, source = (b, a) if sound else rng.sample(params, 2)
    doc = f'    """Take {taken} from {source}."""'
    lines = (f"def {name}({', '.join(params)}):", doc, f"    return minus({a}, {b})")
    sites = ((2, f"({a}, {b}", f"({b}, {a}"), (2, f"({a}", f"({b}"), (2, f" {b}", f" {a}"))
    return Function(name, params, lines, "call", _numbers(rng, 5, 2), sites)


HELPER = Function(
    "minus",
    ("x", "y"),
    ("def minus(x, y):", '    """Return x minus y."""', "    return x - y"),
    "helper",
    ((5, 3), (3, 9)),
    (),
)

SHAPES: dict[str, Callable[[random.Random, Sequence[str], bool], Function]] = {
    "arithmetic": arithmetic,
    "comparison": comparison,
    "condition": condition,
    "default": default,
    "call": call,
}
_SHAPE_OF = {
    "operator": "arithmetic",
    "off_by_one": "comparison",
    "wrong_variable": "arithmetic",
    "missing_negation": "condition",
    "wrong_default": "default",
    "swapped_arguments": "call",
}
_LINE_JOIN = "\n\n\n"


# --- modules ------------------------------------------------------------------------------------------
def build(rng: random.Random, shape: str, nouns: Sequence[str], others: int, sound: bool = True) -> tuple[Module, int]:
    """A module whose subject has ``shape``, among ``others`` further functions. Unless ``sound``, docstrings are
    made without regard to the code.

    Returns it with the 1-based line of the subject's ``def``.
    """
    subject = SHAPES[shape](rng, nouns, sound)
    functions = [subject]
    while len(functions) <= others:
        extra = SHAPES[rng.choice(tuple(SHAPES))](rng, nouns, sound)
        if extra.name not in {f.name for f in functions}:
            functions.append(extra)
    rng.shuffle(functions)
    if any(f.shape == "call" for f in functions):
        functions.insert(0, HELPER)
    line = 1 + sum(len(f.lines) + 2 for f in functions[: functions.index(subject)])
    return Module(rng.choice(MODULES), _source(functions), subject.name, subject.calls, tuple(functions)), line


def _source(functions: list[Function]) -> str:
    return _LINE_JOIN.join("\n".join(f.lines) for f in functions) + "\n"


def _candidate_faults(rng: random.Random, family: str, subject: Function) -> list[tuple[int, str, str]]:
    """Edits (line offset, right, wrong) of a sound function that make a fault of ``family``."""
    strict = {" <": " <=", " <=": " <", " >": " >=", " >=": " >"}
    arithmetic_sites = {f" {op}" for op in ARITHMETIC}
    keep: dict[str, Callable[[tuple[int, str, str]], bool]] = {
        "operator": lambda s: s[1] in arithmetic_sites,
        "off_by_one": lambda s: strict.get(s[1]) == s[2],
        "wrong_variable": lambda s: s[1] not in arithmetic_sites,
        "missing_negation": lambda s: s[1].startswith(" not "),
        "wrong_default": lambda s: True,
        "swapped_arguments": lambda s: "," in s[1],
    }
    return [site for site in subject.sites if keep[family](site)]


def faulty(rng: random.Random, family: str, nouns: Sequence[str]) -> Module:
    """A module with one fault of ``family`` in its subject (retries until a call tells right from wrong)."""
    while True:
        module, start = build(rng, _SHAPE_OF[family], nouns, rng.choice((0, 1, 1)))
        subject = next(f for f in module.functions if f.name == module.function)
        candidates = _candidate_faults(rng, family, subject)
        if not candidates:
            continue
        offset, right, wrong = rng.choice(candidates)
        line = start + offset
        source = substitute(module.source, line, right, wrong)
        fault = Fault(family, subject.name, line, wrong, right)
        broken = msgspec.structs.replace(module, source=source, fault=fault)
        if _differ(broken.source, module.source, module) and fix(broken) == module.source:
            return broken


def substitute(source: str, line: int, old: str, new: str) -> str:
    """Replace the first ``old`` on ``line`` (1-based), as ``sed 'LINEs/old/new/'`` does."""
    lines = source.split("\n")
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    return "\n".join(lines)


def sed(line: int, old: str, new: str, file: str) -> str:
    """The command that makes the substitution in a shell (``*`` alone means something to sed in what is sought)."""
    return f"sed -i '{line}s/{old.replace('*', chr(92) + '*')}/{new}/' {file}"


def fix(module: Module) -> str:
    """The module's source with its fault mended."""
    assert module.fault is not None
    return substitute(module.source, module.fault.line, module.fault.wrong, module.fault.right)


def evaluate(source: str, function: str, calls: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """Results of the calls. Runs generated code of this module only, never a model's."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "<generated>", "exec"), namespace)
    return [namespace[function](*arguments) for arguments in calls]


def _differ(broken: str, sound: str, module: Module) -> bool:
    return evaluate(broken, module.function, module.calls) != evaluate(sound, module.function, module.calls)
