"""Sandboxes without a kernel: files in memory, results from a script.

Owns: ``FakeSandboxes``, an implementation of the ``Sandboxes`` protocol for tests of agents, episodes and
runs. A script decides what each command does; without one every command succeeds and prints nothing.

Must not know: real processes, real files, the wall clock.

Guarantees: the same errors as the embedded node (unknown sandbox, missing file, unknown template, full
node, oversized read); ids are never reused; ``alive``, ``killed`` and ``commands`` tell a test everything
that happened; ``running`` is zero once no ``run`` is in progress, cancelled ones included.
"""

from __future__ import annotations

import posixpath
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import (
    CommandResult,
    Limits,
    Mount,
    SandboxDenied,
    SandboxError,
    SandboxGone,
    TemplateNotFound,
)


class FakeCall(msgspec.Struct, frozen=True):
    """One command as the script sees it. ``files`` is the sandbox's own mapping: a script may change it."""

    sandbox: str
    command: str
    files: dict[str, bytes]
    """Absolute path to content."""
    env: dict[str, str]
    mounts: tuple[Mount, ...]
    cwd: str
    timeout_s: float | None
    metadata: dict[str, str]


Reply = CommandResult | str | int | None
"""A whole result, or only its output (exit 0), or only its exit code; None = exit 0, no output."""
Script = Callable[[FakeCall], Reply | Awaitable[Reply]]


class _Sandbox(msgspec.Struct):
    template: str
    limits: Limits
    metadata: dict[str, str]
    files: dict[str, bytes]


class FakeSandboxes:
    """In-memory sandboxes whose commands are answered by ``script``.

    ``script`` may be a callable (plain or async: it may await a virtual clock, an event or for ever) or a
    mapping from a command to its reply. It may raise a ``SandboxError`` to fail the command.
    """

    def __init__(
        self,
        script: Script | dict[str, Reply] | None = None,
        *,
        max_sandboxes: int | None = None,
        before_create: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._script = script
        self._max = max_sandboxes
        self._before_create = before_create
        self._sandboxes: dict[str, _Sandbox] = {}
        self._next = 0
        self._faults: list[SandboxError] = []
        self.killed: list[str] = []
        self.commands: list[FakeCall] = []
        self.created = 0
        self.running = 0

    @property
    def alive(self) -> list[str]:
        """Ids of the sandboxes that exist now, oldest first."""
        return list(self._sandboxes)

    def fail_next(self, error: SandboxError) -> None:
        """Make the next create, run, write or read raise ``error``; several calls queue up."""
        self._faults.append(error)

    def lose(self, sandbox: str) -> None:
        """The node lost this sandbox: everything but ``kill`` now raises SandboxGone."""
        self._sandboxes.pop(sandbox, None)

    def files(self, sandbox: str) -> dict[str, bytes]:
        """The files of a living sandbox by absolute path."""
        return self._get(sandbox).files

    async def create(self, template: str, limits: Limits, metadata: dict[str, str]) -> str:
        self._maybe_fail()
        if self._before_create is not None:
            await self._before_create()
        if template != "host" and not Path(template).is_dir():  # noqa: ASYNC240 - one stat of a local path
            raise TemplateNotFound(f'there is no template {template!r}: use "host" or a root file system directory')
        if self._max is not None and len(self._sandboxes) >= self._max:
            raise SandboxDenied(f"the node already runs {self._max} sandboxes", retry_after_s=1.0)
        self._next += 1
        self.created += 1
        sandbox = f"fake-{self._next:06d}"
        self._sandboxes[sandbox] = _Sandbox(template, limits, dict(metadata), {})
        return sandbox

    async def run(
        self,
        sandbox: str,
        command: str,
        *,
        timeout_s: float | None = None,
        env: dict[str, str] | None = None,
        mounts: tuple[Mount, ...] = (),
        cwd: str = "/work",
    ) -> CommandResult:
        state = self._get(sandbox)
        self._maybe_fail()
        call = FakeCall(sandbox, command, state.files, env or {}, mounts, cwd, timeout_s, state.metadata)
        self.commands.append(call)
        self.running += 1
        try:
            reply = await self._answer(call)
        finally:
            self.running -= 1
        self._get(sandbox)
        return _result(reply)

    async def write(self, sandbox: str, files: dict[str, bytes]) -> None:
        state = self._get(sandbox)
        self._maybe_fail()
        state.files.update({_absolute(path): content for path, content in files.items()})

    async def read(self, sandbox: str, path: str, max_bytes: int = 1 << 20) -> bytes:
        state = self._get(sandbox)
        self._maybe_fail()
        try:
            content = state.files[_absolute(path)]
        except KeyError:
            raise FileNotFoundError(path) from None
        if len(content) > max_bytes:
            raise SandboxError(f"{path} has {len(content)} bytes, more than the {max_bytes} that may be read")
        return content

    async def kill(self, sandbox: str) -> None:
        if self._sandboxes.pop(sandbox, None) is not None:
            self.killed.append(sandbox)

    def _get(self, sandbox: str) -> _Sandbox:
        try:
            return self._sandboxes[sandbox]
        except KeyError:
            raise SandboxGone(f"sandbox {sandbox} does not exist (any more)") from None

    def _maybe_fail(self) -> None:
        if self._faults:
            raise self._faults.pop(0)

    async def _answer(self, call: FakeCall) -> Reply:
        if self._script is None:
            return None
        if isinstance(self._script, dict):
            return self._script.get(call.command)
        reply = self._script(call)
        return await reply if isinstance(reply, Awaitable) else reply


def _absolute(path: str) -> str:
    return posixpath.normpath(posixpath.join("/work", path))


def _result(reply: Reply) -> CommandResult:
    if isinstance(reply, CommandResult):
        return reply
    if isinstance(reply, str):
        return CommandResult(exit_code=0, output=reply, truncated_bytes=0, wall_s=0.0)
    return CommandResult(exit_code=reply or 0, output="", truncated_bytes=0, wall_s=0.0)
