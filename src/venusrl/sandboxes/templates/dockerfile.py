"""A Dockerfile as build steps.

Owns: the instructions that are understood (FROM, RUN, COPY, ENV, WORKDIR, USER, CMD, ENTRYPOINT) and the packing of the
files that COPY names.

Must not know: how steps are run, where layers are kept.

Guarantees: what is not understood is an error that says where; nothing is skipped. Only files below the context are
packed, and of those none that .dockerignore names; the same files give the same archive.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from venusrl.sandboxes.templates.api import DEFAULT_USER
from venusrl.sandboxes.templates.build import Step
from venusrl.sandboxes.templates.errors import BadTemplate
from venusrl.sandboxes.templates.unpack import clean_name

_PATTERN = re.compile(r"[*?\[]")
_FLAG = re.compile(r"--([a-z]+)=(\S+)\s+")


class Recipe(msgspec.Struct, frozen=True):
    """What a Dockerfile says. ``uploads``: archives by their hash, as COPY's steps name them."""

    base: str
    steps: tuple[Step, ...]
    start: str
    uploads: dict[str, bytes]


def read(text: str, context: Path) -> Recipe:
    """Raises BadTemplate with the line's number."""
    reader = _Reader(context)
    for number, line in _lines(text):
        word, _, rest = line.partition(" ")
        try:
            reader.instruction(word.upper(), rest.strip())
        except BadTemplate as error:
            raise BadTemplate(f"line {number}: {error}") from None
    return reader.recipe()


class _Reader:
    def __init__(self, context: Path) -> None:
        self._context = context
        self._ignored = _ignored(context)
        self._base = ""
        self._start = ""
        self._steps: list[Step] = []
        self._uploads: dict[str, bytes] = {}
        self._said: set[str] = set()

    def instruction(self, word: str, rest: str) -> None:
        if not rest:
            raise BadTemplate(f"{word} says nothing")
        if word == "FROM":
            self._from(rest)
            return
        if not self._base:
            raise BadTemplate("a Dockerfile begins with FROM")
        self._said.add(word)
        match word:
            case "RUN":
                if rest.startswith("--"):
                    raise BadTemplate("RUN's options are not supported: leave them out")
                self._add("RUN", _command(rest))
            case "COPY":
                self._copy(rest)
            case "ENV":
                self._add("ENV", *_variables(rest))
            case "WORKDIR":
                self._add("WORKDIR", rest)
            case "USER":
                self._add("USER", rest.partition(":")[0])
            case "CMD" | "ENTRYPOINT":
                self._start = _command(rest)
            case _:
                raise BadTemplate(
                    f"{word} is not supported: use FROM, RUN, COPY, ENV, WORKDIR, USER and CMD (or build an image "
                    "elsewhere and import it with --oci)"
                )

    def recipe(self) -> Recipe:
        if not self._base:
            raise BadTemplate("the Dockerfile has no FROM")
        first = [Step("USER", ("root",)), Step("WORKDIR", ("/",))]  # where Docker begins
        last = [] if "USER" in self._said else [Step("USER", (DEFAULT_USER,))]
        last += [] if "WORKDIR" in self._said else [Step("WORKDIR", (f"/home/{DEFAULT_USER}",))]
        return Recipe(self._base, (*first, *self._steps, *last), self._start, self._uploads)

    def _from(self, rest: str) -> None:
        if self._base:
            raise BadTemplate("only one FROM is supported: build the stages elsewhere")
        if " " in rest or rest.startswith("--"):
            raise BadTemplate("FROM takes an image's or a template's name alone here")
        self._base = rest

    def _add(self, kind: str, *args: str) -> None:
        self._steps.append(Step(kind, args))

    def _copy(self, rest: str) -> None:
        owner = mode = ""
        while flag := _FLAG.match(rest):
            name, value = flag.groups()
            if name == "chown":
                owner = value
            elif name == "chmod":
                mode = value
            else:
                raise BadTemplate(f"COPY --{name} is not supported")
            rest = rest[flag.end() :]
        words = _json(rest) or shlex.split(rest)
        if len(words) < 2:
            raise BadTemplate("COPY needs a source and a target")
        *sources, target = words
        if len(sources) > 1 and not target.endswith("/"):
            raise BadTemplate("COPY of several sources needs a target that ends with /")
        for source in sources:
            name = clean_name(source, "COPY")
            archive = self._pack(name)
            digest = hashlib.sha256(archive).hexdigest()
            self._uploads[digest] = archive
            self._steps.append(Step("COPY", (name or ".", target, owner, mode), digest))

    def _pack(self, source: str) -> bytes:
        """An archive of what ``source`` names, by paths relative to the context."""
        found = sorted({path for match in self._matches(source) for path in self._below(match)})
        if not found:
            raise BadTemplate(f"COPY: nothing in {self._context} is named {source!r}")
        buffer = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as made,
        ):
            for path in found:
                info = made.gettarinfo(self._context / path, arcname=path)
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                info.mtime = int(info.mtime)
                if info.isreg():
                    with (self._context / path).open("rb") as file:
                        made.addfile(info, file)
                else:
                    made.addfile(info)
        return buffer.getvalue()

    def _matches(self, source: str) -> list[str]:
        if not _PATTERN.search(source):
            return [source] if os.path.lexists(self._context / source) else []
        return [str(path.relative_to(self._context)) for path in self._context.glob(source)]

    def _below(self, path: str) -> Iterator[str]:
        place = self._context / path
        if path and not self._ignores(path):
            yield path
        if place.is_dir() and not place.is_symlink():
            for name in sorted(os.listdir(place)):
                yield from self._below(f"{path}/{name}" if path else name)

    def _ignores(self, path: str) -> bool:
        parts = path.split("/")
        heads = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        ignored = False
        for keep, pattern in self._ignored:
            if any(pattern.fullmatch(head) for head in heads):
                ignored = not keep
        return ignored


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Instructions with the number of their first line; comments and continuations dealt with."""
    begun, whole = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#") or (not stripped and not whole):
            continue
        if "<<" in stripped and not whole and stripped.split(" ")[0].upper() in ("RUN", "COPY"):
            raise BadTemplate(f"line {number}: here-documents are not supported: use a file")
        begun = begun or number
        if stripped.endswith("\\"):
            whole += stripped[:-1] + " "
            continue
        yield begun, (whole + stripped).strip()
        begun, whole = 0, ""
    if whole:
        yield begun, whole.strip()


def _command(rest: str) -> str:
    words = _json(rest)
    return shlex.join(words) if words else rest


def _json(rest: str) -> list[str]:
    """The words of the form ["a", "b"]; none when it is not in that form."""
    if not rest.startswith("["):
        return []
    try:
        found = json.loads(rest)
    except ValueError:
        return []
    return found if isinstance(found, list) and all(isinstance(word, str) for word in found) else []


def _variables(rest: str) -> list[str]:
    words = shlex.split(rest)
    if "=" not in words[0]:
        name, _, value = rest.partition(" ")
        return [name, value.strip()]
    pairs = [word.partition("=") for word in words]
    if any(not sign for _, sign, _ in pairs):
        raise BadTemplate("ENV needs name=value")
    return [part for name, _, value in pairs for part in (name, value)]


def _ignored(context: Path) -> list[tuple[bool, re.Pattern[str]]]:
    """.dockerignore: whether a pattern keeps what an earlier one ignored, and the pattern."""
    try:
        lines = (context / ".dockerignore").read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in (each.strip() for each in lines):
        if line and not line.startswith("#"):
            keep = line.startswith("!")
            pattern = clean_name(line[1:] if keep else line, ".dockerignore")
            words = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
            means = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
            found.append((keep, re.compile("".join(means.get(word, re.escape(word)) for word in words))))
    return found
