"""Which templates there are: names, tags, builds and their logs, on disk.

Owns: one file a template, one a build, one log a build, below one directory.

Must not know: layers, runtimes, how a build is done, HTTP.

Guarantees: every record is replaced atomically; what a call returns is on disk. Several processes may use the same
directory (the service and the command line): changes are made under one lock and are seen at the next look. Names are
unique within a tenant; what belongs to nobody ("") everybody sees, what belongs to another tenant nobody does.
"""

from __future__ import annotations

import fcntl
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from venusrl.sandboxes.protocol import TemplateNotFound
from venusrl.sandboxes.templates.errors import BadTemplate, TemplateTaken
from venusrl.sandboxes.templates.store import disk_errors, put

BuildState = Literal["waiting", "building", "ready", "error"]
Level = Literal["debug", "info", "warn", "error"]
DEFAULT_TAG = "default"
RESERVED = ("host",)
"""Names that mean something by themselves."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_LOG_BYTES = 4 << 20
_LINE_BYTES = 4096
_TICK_NS = 100_000_000
_T = TypeVar("_T")


class Reason(msgspec.Struct, frozen=True):
    """Why a build failed. ``step`` is "base", a step's number from 1, or "finalize"."""

    message: str
    step: str = ""


class LogEntry(msgspec.Struct, frozen=True):
    """One line of a build's log; ``time`` in seconds since the epoch."""

    time: float
    level: Level
    message: str
    step: str = ""


class Build(msgspec.Struct, frozen=True):
    """One build of a template. Times in seconds since the epoch; ``image`` once it is ready."""

    id: str
    template: str
    state: BuildState
    created: float
    updated: float
    cpus: int
    memory_mib: int
    disk_mib: int
    tags: tuple[str, ...] = (DEFAULT_TAG,)
    """Tags it gets once it is ready."""
    image: str = ""
    maker: str = ""
    """The process that builds it (pid and start time), while it does."""
    finished: float | None = None
    reason: Reason | None = None


class Tag(msgspec.Struct, frozen=True):
    """A tag's build, and since when."""

    build: str
    assigned: float


class Template(msgspec.Struct, frozen=True):
    """A template: a name (of a tenant, "" = everybody's), its builds and which of them its tags mean."""

    id: str
    tenant: str
    names: tuple[str, ...]
    created: float
    updated: float
    builds: tuple[str, ...] = ()
    tags: dict[str, Tag] = {}
    public: bool = False
    description: str = ""


class Records:
    """The records below one directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._templates = root / "templates"
        self._builds = root / "builds"
        self._logs = root / "logs"
        self._seen: tuple[int, dict[str, Template]] = (-1, {})

    def prepare(self) -> None:
        with disk_errors(self._root):
            for folder in (self._root, self._templates, self._builds, self._logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def all(self, tenant: str) -> list[Template]:
        """What ``tenant`` may see, its own first."""
        seen = [t for t in self._load().values() if t.tenant == tenant or t.public or not t.tenant]
        return sorted(seen, key=lambda t: (t.tenant != tenant, t.created, t.id))

    def everything(self) -> list[Template]:
        """Of all tenants."""
        return list(self._load().values())

    def find(self, tenant: str, wanted: str) -> Template:
        """By id or name (its tag, if any, is not looked at). Raises TemplateNotFound."""
        name = wanted.partition(":")[0]
        for template in self.all(tenant):
            if name == template.id or name.lower() in template.names:
                return template
        raise TemplateNotFound(
            f"there is no template {wanted!r}: see venusrl env template list; make it with venusrl env template build"
        )

    def taken(self, tenant: str, name: str) -> bool:
        """Whether a build under this name would replace nothing of the tenant's because another owns it."""
        return name.lower() in RESERVED or any(name.lower() in t.names and t.tenant != tenant for t in self.all(tenant))

    def create(self, tenant: str, name: str, now: float, public: bool = False) -> Template:
        """The tenant's template of that name, made if there is none. Raises BadTemplate, TemplateTaken."""
        name = checked_name(name)
        if name in RESERVED:
            raise TemplateTaken(f'the name "{name}" is reserved: choose another')
        with self._changing():
            for template in self._load().values():
                if template.tenant == tenant and name in template.names:
                    return template
            template = Template(new_id(), tenant, (name,), now, now, public=public)
            self._put(template)
            return template

    def change(self, identity: str, make: Callable[[Template], Template]) -> Template:
        """Replace a template's record. Raises TemplateNotFound."""
        with self._changing():
            template = self._load().get(identity)
            if template is None:
                raise TemplateNotFound(f"the template {identity} has been removed")
            template = make(template)
            self._put(template)
            return template

    def remove(self, identity: str) -> None:
        """The template with its builds and logs."""
        with self._changing():
            template = self._load().get(identity)
            if template is None:
                return
            (self._templates / f"{identity}.json").unlink(missing_ok=True)
            for build in template.builds:
                (self._builds / f"{build}.json").unlink(missing_ok=True)
                self._log(build).unlink(missing_ok=True)

    def build(self, identity: str) -> Build:
        """Raises TemplateNotFound."""
        if _NAME.fullmatch(identity) is None:
            raise TemplateNotFound(f"there is no build {identity!r}")
        try:
            content = (self._builds / f"{identity}.json").read_bytes()
        except FileNotFoundError:
            raise TemplateNotFound(f"there is no build {identity!r}") from None
        return msgspec.json.decode(content, type=Build)

    def put_build(self, build: Build) -> None:
        with disk_errors(self._root):
            put(self._builds / f"{build.id}.json", msgspec.json.encode(build))

    def builds(self) -> list[Build]:
        """Every build."""
        return [self.build(path.stem) for path in sorted(self._builds.glob("*.json"))]

    def log(self, build: str, entry: LogEntry) -> None:
        """Append one entry; lines are cut, and past a size the log only keeps what is worse than "info"."""
        path = self._log(build)
        size = path.stat().st_size if path.exists() else 0
        if (size > _LOG_BYTES and entry.level in ("debug", "info")) or size > 2 * _LOG_BYTES:
            return
        entry = msgspec.structs.replace(entry, message=entry.message[:_LINE_BYTES])
        with disk_errors(self._root), path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")

    def logs(self, build: str, offset: int, limit: int) -> list[LogEntry]:
        """At most ``limit`` entries from number ``offset`` on."""
        try:
            lines = self._log(build).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [msgspec.json.decode(line, type=LogEntry) for line in lines[offset : offset + limit]]

    def _log(self, build: str) -> Path:
        return self._logs / f"{build}.jsonl"

    def _put(self, template: Template) -> None:
        with disk_errors(self._root):
            put(self._templates / f"{template.id}.json", msgspec.json.encode(template))

    def _load(self) -> dict[str, Template]:
        """All templates; read again only when one changed (replacing a file touches its directory)."""
        with disk_errors(self._root):
            stamp = self._templates.stat().st_mtime_ns
            if stamp != self._seen[0]:
                found = {}
                for path in self._templates.glob("[!.]*.json"):
                    template = _read(path, Template)
                    if template is not None:
                        found[template.id] = template
                settled = time.time_ns() - stamp > _TICK_NS  # two changes within one tick of the clock look alike
                self._seen = (stamp if settled else -1, found)
        return self._seen[1]

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with (self._root / "records.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._seen = (-1, {})
            yield
            self._seen = (-1, {})


def checked_name(name: str) -> str:
    """A template's name in its one form. Raises BadTemplate."""
    name = name.lower()
    if _NAME.fullmatch(name) is None:
        raise BadTemplate(f"{name!r} cannot name a template: use letters, digits, '-', '_' and '.', at most 128")
    return name


def new_id() -> str:
    """Twenty letters and digits, as E2B's ids are."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(20))


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None  # removed meanwhile
