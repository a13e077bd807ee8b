"""Sandboxes of a host without a kernel: a runtime whose sandboxes are records.

Owns: ``FakeRuntime``, an implementation of ``runtimes.base.Runtime`` for tests of hosts, managers and admission. Its
sandboxes live in memory or, given a directory, in files there: those outlive the process that made them, as real ones
do, so that a test can kill a host at any instant and look at what is left.

Must not know: hosts, HTTP, real processes.

Guarantees: the errors and the order of effects of a real runtime (a half-made sandbox is there before ``create``
returns, and ``sweep`` removes it); ``alive`` is what exists; every call can be delayed or failed from outside.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from venusrl.sandboxes.agent.api import Agent
from venusrl.sandboxes.protocol import SandboxError, SandboxGone, SandboxPaused
from venusrl.sandboxes.runtimes.base import Abilities, Footprint, Network, Shortages, Snapshot, Spec
from venusrl.sandboxes.templates.api import Image

Operation = Literal["create", "restore", "adopt", "pause", "resume", "snapshot", "set_network", "footprint", "kill"]
Hook = Callable[[Operation, str], Awaitable[None]]
"""Called in the middle of an operation with the sandbox's id: may wait, may raise."""


class FakeState(msgspec.Struct):
    """One sandbox as the world holds it. ``made`` False: ``create`` has begun and not ended."""

    spec: Spec
    made: bool = False
    paused: bool = False
    private: int = 1 << 20
    left: bool = False
    """Stopped: it was given to another host."""


class _World:
    """The sandboxes that exist: in memory, or one file each."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._states: dict[str, FakeState] = {}
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def ids(self) -> list[str]:
        if self._directory is None:
            return list(self._states)
        return sorted(path.stem for path in self._directory.glob("*.json"))

    def get(self, sandbox: str) -> FakeState | None:
        if self._directory is None:
            return self._states.get(sandbox)
        try:
            return msgspec.json.decode((self._directory / f"{sandbox}.json").read_bytes(), type=FakeState)
        except FileNotFoundError:
            return None

    def put(self, state: FakeState) -> None:
        if self._directory is None:
            self._states[state.spec.id] = state
            return
        part = self._directory / f"{state.spec.id}.part"
        part.write_bytes(msgspec.json.encode(state))
        part.rename(part.with_suffix(".json"))

    def remove(self, sandbox: str) -> None:
        self._states.pop(sandbox, None)
        if self._directory is not None:
            (self._directory / f"{sandbox}.json").unlink(missing_ok=True)


class FakeInstance:
    """Implements ``runtimes.base.Instance``."""

    def __init__(self, runtime: FakeRuntime, spec: Spec, agent: Agent) -> None:
        self._runtime = runtime
        self._spec = spec
        self._agent = agent
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.short = Shortages()

    @property
    def spec(self) -> Spec:
        return self._spec

    @property
    def agent(self) -> Agent:
        if self._state().paused or self._state().left:
            raise SandboxPaused(f"sandbox {self._spec.id} is paused")
        return self._agent

    def record(self) -> bytes:
        return msgspec.json.encode(self._spec)

    async def pause(self, *, memory: bool = True) -> None:
        await self._runtime.reach("pause", self._spec.id)
        self._put(paused=True, private=self._runtime.paused_private)

    async def resume(self) -> None:
        await self._runtime.reach("resume", self._spec.id)
        self._put(paused=False, private=1 << 20)

    async def snapshot(self, directory: Path, *, memory: bool = True) -> Snapshot:
        state = self._state()
        directory.mkdir(mode=0o700, parents=True)  # noqa: ASYNC240 - one small local directory
        try:
            (directory / "state.json").write_bytes(msgspec.json.encode(state))
            await self._runtime.reach("snapshot", self._spec.id)
        except BaseException:  # whatever it was, cancelled included, leaves nothing behind
            shutil.rmtree(directory)
            raise
        size = (directory / "state.json").stat().st_size
        return Snapshot(str(directory), memory, size, self._runtime.name)

    async def set_network(self, network: Network) -> None:
        await self._runtime.reach("set_network", self._spec.id)
        self._spec = msgspec.structs.replace(self._spec, network=network)

    async def footprint(self) -> Footprint:
        await self._runtime.reach("footprint", self._spec.id)
        return Footprint(private=self._state().private)

    async def shortages(self, disk: bool = True) -> Shortages:
        return self.short

    async def died(self) -> str:
        return await asyncio.shield(self.ended)

    async def kill(self) -> None:
        await self._runtime.reach("kill", self._spec.id)
        self._runtime.world.remove(self._spec.id)
        self._runtime.instances.pop(self._spec.id, None)

    def _state(self) -> FakeState:
        state = self._runtime.world.get(self._spec.id)
        if state is None:
            raise SandboxGone(f"sandbox {self._spec.id} ended")
        return state

    def _put(self, *, paused: bool, private: int) -> None:
        state = self._state()
        state.paused, state.private = paused, private
        self._runtime.world.put(state)


class FakeRuntime:
    """Implements ``runtimes.base.Runtime``. ``agents`` makes the agent of each sandbox; ``hook`` is awaited in the
    middle of every operation; ``world`` is the directory that outlives the process."""

    def __init__(
        self,
        agents: Callable[[Spec], Agent],
        *,
        name: str = "fake",
        world: Path | None = None,
        hook: Hook | None = None,
        abilities: Abilities | None = None,
    ) -> None:
        self.world = _World(world)
        self.instances: dict[str, FakeInstance] = {}
        self.paused_private = 0
        self.shared_bytes: dict[str, int] = {}
        self.prepared: list[str] = []
        self._agents = agents
        self._name = name
        self._hook = hook
        self._abilities = abilities or Abilities(memory_snapshot=True, live_migration=False, egress=False)
        self._faults: list[tuple[Operation, SandboxError]] = []

    @property
    def name(self) -> str:
        return self._name

    @property
    def alive(self) -> list[str]:
        """Every sandbox there is, half-made ones included."""
        return self.world.ids()

    def fail_next(self, operation: Operation, error: SandboxError) -> None:
        """Make the next ``operation`` raise; several calls queue up."""
        self._faults.append((operation, error))

    def end(self, sandbox: str, cause: str) -> None:
        """The sandbox ends by itself."""
        self.world.remove(sandbox)
        self.instances.pop(sandbox).ended.set_result(cause)

    def set_private(self, sandbox: str, private: int) -> None:
        """What its footprint is from now on."""
        state = self.world.get(sandbox)
        assert state is not None
        state.private = private
        self.world.put(state)

    async def reach(self, operation: Operation, sandbox: str) -> None:
        """The middle of an operation: where it may wait or fail."""
        if self._hook is not None:
            await self._hook(operation, sandbox)
        for fault in self._faults:
            if fault[0] == operation:
                self._faults.remove(fault)
                raise fault[1]

    async def start(self) -> Abilities:
        return self._abilities

    async def prepare(self, image: Image, *, network: bool = False) -> None:
        self.prepared.append(image.id)

    async def forget(self, image_id: str) -> None:
        if image_id in self.prepared:
            self.prepared.remove(image_id)

    async def derived(self) -> set[str]:
        return set(self.prepared)

    async def shared(self, images: Sequence[str]) -> dict[str, int]:
        return {image: self.shared_bytes.get(image, 0) for image in images}

    async def create(self, spec: Spec) -> FakeInstance:
        return await self._make("create", spec)

    async def restore(self, spec: Spec, snapshot: Snapshot) -> FakeInstance:
        kept = Path(snapshot.directory) / "state.json"
        if not kept.is_file():
            raise SandboxError(f"the snapshot in {snapshot.directory} is damaged")
        return await self._make("restore", spec)

    async def adopt(self, record: bytes) -> FakeInstance | None:
        spec = msgspec.json.decode(record, type=Spec)
        await self.reach("adopt", spec.id)
        state = self.world.get(spec.id)
        return None if state is None or not state.made else self._instance(spec)

    async def sweep(self, known: set[str]) -> list[str]:
        unknown = [sandbox for sandbox in self.world.ids() if sandbox not in known]
        for sandbox in unknown:
            self.world.remove(sandbox)
        return unknown

    async def close(self) -> None:
        self.instances.clear()

    async def _make(self, operation: Operation, spec: Spec) -> FakeInstance:
        if self.world.get(spec.id) is not None:
            raise SandboxError(f"there is a sandbox {spec.id} already")
        self.world.put(FakeState(spec))
        try:
            await self.reach(operation, spec.id)
            self.world.put(FakeState(spec, made=True))
        except BaseException:  # whatever it was, cancelled included, leaves nothing behind
            self.world.remove(spec.id)
            raise
        return self._instance(spec)

    def _instance(self, spec: Spec) -> FakeInstance:
        instance = FakeInstance(self, spec, self._agents(spec))
        self.instances[spec.id] = instance
        return instance
