"""The embedded node: sandboxes of this machine for the process that owns it.

Owns: ``EmbeddedNode``, the ``Sandboxes`` implementation a run uses. Admission by count, a bound on
concurrent commands, ownership on disk, reaping of orphans, supervision of the launcher process.

Must not know: agents, engines, tasks; how a sandbox is isolated (``runtimes/namespace``).

Guarantees: those of ``sandboxes/protocol.py``. A killed owner's sandboxes stop by themselves (the launcher
ends with its owner) and whatever is left on disk is reaped by the next ``start`` on the same root. A launcher
that dies takes its sandboxes along (SandboxGone); the next ``create`` starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from venusrl.sandboxes import ownership
from venusrl.sandboxes.protocol import (
    CommandResult,
    Limits,
    Mount,
    RuntimeUnavailable,
    SandboxDenied,
    SandboxError,
    SandboxGone,
)
from venusrl.sandboxes.runtimes.namespace import program, wire
from venusrl.sandboxes.runtimes.namespace.helper import LAUNCHER, Helper
from venusrl.sandboxes.templates import roots as templates

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_ANSWER_S = 30.0
"""How long the launcher may take over anything that is not a command."""
_RETRY_AFTER_S = 1.0
_LONGEST_COMMAND = 120_000
_NOT_EXECUTABLE = 126


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What this node admits and how it isolates."""

    max_sandboxes: int = 256
    concurrent_commands: int = 8
    uid_base: int | None = None
    """First host uid and gid given to sandboxes when started by root; None = a range nobody else uses."""
    require_cgroup: bool = False
    """Refuse to start where memory and process limits cannot be set by cgroup (else rlimits stand in)."""
    lease_s: float = 60.0


class NodeStats(msgspec.Struct, frozen=True):
    """A glance for the live view."""

    sandboxes: int
    running: int
    waiting: int
    launcher_restarts: int


class EmbeddedNode:
    """Sandboxes on this machine. ``await start()`` first, ``await close()`` last (kills every sandbox).

    ``root`` is the node's own directory (records of ownership; created if absent). Several nodes, of several
    processes, may share it. ``owner`` is a human name for the records (the run's name).
    """

    def __init__(self, root: Path, owner: str, config: NodeConfig | None = None) -> None:
        self._root = root.absolute()
        self._owner = owner
        self._config = config or NodeConfig()
        self._registry = ownership.Registry(self._root)
        self._node_id = uuid.uuid4().hex[:12]
        self._client: Helper[wire.Reply] | None = None
        self._starting = asyncio.Lock()
        self._launches = 0
        self._commands = asyncio.Semaphore(self._config.concurrent_commands)
        self._running = 0
        self._waiting = 0
        self._created = 0
        self._limits: dict[str, Limits] = {}
        self._creating = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clearing: asyncio.Task[None] | None = None
        self._lease: asyncio.Task[None] | None = None
        self._open = False
        self.report: wire.Report | None = None
        """How the running launcher isolates and limits."""

    def stats(self) -> NodeStats:
        """What goes on now."""
        return NodeStats(len(self._limits), self._running, self._waiting, max(0, self._launches - 1))

    async def start(self) -> int:
        """Check the machine, reap orphans of dead owners, start serving. Returns how many orphans were reaped.

        Raises RuntimeUnavailable with the mend, HostDiskFull.
        """
        self._registry.prepare()
        orphans = await asyncio.to_thread(self._registry.reap)
        for orphan in orphans:
            _log.warning("reaped sandbox %s of a dead owner", orphan.id)
        self._registry.put_node(self._record(None, ()))
        self._open = True
        try:
            await self._launcher()
        except SandboxError:
            self._open = False
            self._registry.remove_node(self._node_id)
            raise
        self._lease = asyncio.create_task(self._keep_lease(), name="sandbox lease")
        return len(orphans)

    async def close(self) -> None:
        """Kill every sandbox of this node and stop. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self._lease is not None:
            self._lease.cancel()
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for sandbox in list(self._limits):
            self._forget(sandbox)
        self._registry.remove_node(self._node_id)

    async def create(self, template: str, limits: Limits, metadata: dict[str, str]) -> str:
        resolved = templates.resolve(template)
        if len(self._limits) + self._creating >= self._config.max_sandboxes:
            raise SandboxDenied(f"this node already has {self._config.max_sandboxes} sandboxes", _RETRY_AFTER_S)
        self._created += 1
        sandbox = f"{self._node_id}-{self._created:06d}"
        record = ownership.SandboxRecord(sandbox, self._node_id, template, metadata)
        making = self._supervise(self._create(record, resolved, limits))
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.shield(self._supervise(self._undo(making, sandbox)))
            raise
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
        limits = self._known(sandbox)
        if "\0" in command or len(command.encode(errors="surrogateescape")) > _LONGEST_COMMAND:
            return CommandResult(_NOT_EXECUTABLE, "sh: the command is too long or holds a NUL byte\n", 0, 0.0)
        _check_environment(env or {})
        timeout = limits.command_timeout_s if timeout_s is None else timeout_s
        self._waiting += 1
        try:
            await self._commands.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            return await self._run(
                lambda number: wire.Run(number, sandbox, command, timeout, env or {}, mounts, cwd), sandbox, timeout
            )
        finally:
            self._running -= 1
            self._commands.release()

    async def write(self, sandbox: str, files: dict[str, bytes]) -> None:
        client = self._serving(sandbox)
        await client.ask(lambda number: wire.Write(number, sandbox, files), _ANSWER_S)

    async def read(self, sandbox: str, path: str, max_bytes: int = 1 << 20) -> bytes:
        client = self._serving(sandbox)
        reply = await client.ask(lambda number: wire.Read(number, sandbox, path, max_bytes), _ANSWER_S)
        assert isinstance(reply, wire.Content)
        return reply.data

    async def kill(self, sandbox: str) -> None:
        if sandbox in self._limits:
            await asyncio.shield(self._supervise(self._kill(sandbox)))

    # -- inside

    async def _create(self, record: ownership.SandboxRecord, template: templates.Template, limits: Limits) -> None:
        self._creating += 1
        try:
            client = await self._launcher()
            self._registry.put_sandbox(record)
            try:
                await client.ask(lambda number: wire.Create(number, record.id, template, limits), _ANSWER_S)
            except SandboxError:
                self._registry.remove_sandbox(record.id)
                raise
            if client.ended is not None:
                self._registry.remove_sandbox(record.id)
                raise SandboxGone(client.ended)
            self._limits[record.id] = limits
        finally:
            self._creating -= 1

    async def _undo(self, making: asyncio.Task[None], sandbox: str) -> None:
        """After a cancelled create: take back what waits, wait until it is known what there is, and remove it."""
        await self._kill(sandbox)
        await asyncio.wait((making,))
        if making.exception() is None:
            await self._kill(sandbox)

    async def _run(self, build: Callable[[int], wire.Request], sandbox: str, timeout_s: float) -> CommandResult:
        client = self._serving(sandbox)
        number, future = client.submit(build)
        try:
            reply = await client.wait(future, timeout_s + _ANSWER_S)
        except asyncio.CancelledError:
            await asyncio.shield(self._supervise(self._stop(client, number)))
            raise
        assert isinstance(reply, wire.Ran)
        return reply.result

    async def _stop(self, client: Helper[wire.Reply], number: int) -> None:
        with suppress(SandboxGone):  # a launcher that ended has ended its commands
            await client.ask(lambda mine: wire.Cancel(mine, number), _ANSWER_S)

    async def _kill(self, sandbox: str) -> None:
        self._limits.pop(sandbox, None)
        client = self._client
        if client is not None:
            with suppress(SandboxGone):  # the launcher's end was the sandbox's too
                await client.ask(lambda number: wire.Kill(number, sandbox), _ANSWER_S)
        self._forget(sandbox)

    def _forget(self, sandbox: str) -> None:
        self._limits.pop(sandbox, None)
        self._registry.remove_sandbox(sandbox)

    def _known(self, sandbox: str) -> Limits:
        try:
            return self._limits[sandbox]
        except KeyError:
            raise SandboxGone(f"sandbox {sandbox} does not exist (any more)") from None

    def _serving(self, sandbox: str) -> Helper[wire.Reply]:
        self._known(sandbox)
        if self._client is None:
            raise SandboxGone(f"sandbox {sandbox} went with its launcher")
        return self._client

    async def _launcher(self) -> Helper[wire.Reply]:
        """The running launcher; a new one when there is none."""
        async with self._starting:
            if not self._open:
                raise RuntimeUnavailable("the sandbox node is not started, or already closed")
            if self._client is None:
                self._client = await self._launch()
            return self._client

    async def _launch(self) -> Helper[wire.Reply]:
        bubblewrap = await asyncio.to_thread(program.find)
        if self._clearing is not None:
            await self._clearing
        client = await Helper.start(LAUNCHER, self._registry.log(self._node_id), self._on_end)
        config = self._config
        try:
            report = await client.ask(
                lambda number: wire.Setup(number, self._node_id, bubblewrap, config.uid_base, config.require_cgroup),
                _ANSWER_S,
            )
            assert isinstance(report, wire.Report)
            launcher = ownership.Process(report.pid, report.start_time)
            self._registry.put_node(self._record(launcher, report.cgroup_directories))
        except SandboxError:
            await client.close()
            raise
        self._launches += 1
        self.report = report
        return client

    def _on_end(self, reason: str) -> None:
        """The launcher has ended, and every sandbox with it."""
        self._client = None
        lost = list(self._limits)
        if self._open:
            _log.error("%s; %d sandboxes are lost", reason, len(lost))
            groups = () if self.report is None else self.report.cgroup_directories
            self._clearing = self._supervise(asyncio.to_thread(ownership.end_processes, self._node_id, groups))
        for sandbox in lost:
            self._forget(sandbox)

    def _record(self, launcher: ownership.Process | None, cgroups: tuple[str, ...]) -> ownership.NodeRecord:
        process = ownership.process_of(os.getpid())
        assert process is not None
        return ownership.NodeRecord(
            node_id=self._node_id,
            owner=self._owner,
            process=process,
            boot_id=ownership.boot_id(),
            pid_namespace=ownership.pid_namespace(),
            lease_s=self._config.lease_s,
            launcher=launcher,
            cgroups=cgroups,
        )

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / 3)
            try:
                self._registry.renew(self._node_id)
            except SandboxError as error:
                # The lease protects us only from nodes that cannot see our process: no reason to stop a run.
                _log.warning("the sandbox lease could not be renewed: %s", error)

    def _supervise(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """A task that outlives its caller's cancellation and is waited for by ``close``."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _check_environment(env: dict[str, str]) -> None:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise SandboxError(f"{name!r} cannot be an environment variable of a command")
