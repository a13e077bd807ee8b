"""Sandboxes of a host without a kernel that move while they run.

Owns: ``MovableRuntime``: ``FakeRuntime`` with ``runtimes.moving.Movable``, and the steps at which a test makes it fail.

Must not know: hosts, virtual machines.

Guarantees: the order of a real one: it says that it stopped, then (once the other side has all of it) that it is given,
and only then does the other side run it. ``running`` is what really runs, on whichever side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from venusrl.sandboxes.protocol import SandboxError
from venusrl.sandboxes.runtimes.base import Instance, Spec
from venusrl.sandboxes.runtimes.moving import Dial, Objection, Streams
from venusrl.testing.runtimes import FakeInstance, FakeRuntime, FakeState

Step = Literal["dialled", "copied", "stopped", "given", "accepted", "loaded", "run", "lent", "borrowed", "parted"]
_ANSWER_S = 10.0
_STREAM = "memory"


class MovableRuntime(FakeRuntime):
    """``at`` is awaited at every step and may raise or wait. ``objects`` is what it says of every passport."""

    at: Callable[[Step], Awaitable[None]] | None = None
    objects = Objection()

    def running(self) -> list[str]:
        """Those that run here, none that is paused or was given away."""
        states = [self.world.get(sandbox) for sandbox in self.world.ids()]
        return [one.spec.id for one in states if one is not None and one.made and not one.paused and not one.left]

    def passport(self, instance: Instance) -> bytes:
        return b"fake"

    def objection(self, passport: bytes) -> Objection:
        return self.objects

    def has_memory(self, instance: Instance) -> bool:
        return True

    async def lend(self, instance: Instance, streams: Streams) -> None:
        await self._step("lent")
        streams[1].write(b"template\n")
        await _hear(streams[0], b"have\n")

    async def borrow(self, spec: Spec, streams: Streams) -> None:
        await _hear(streams[0], b"template\n")
        await self._step("borrowed")
        streams[1].write(b"have\n")

    async def part(self, instance: Instance) -> None:
        await self._step("parted")

    async def send(self, instance: Instance, dial: Dial, stopped: Callable[[], None], give: Callable[[], None]) -> None:
        reader, writer = await dial(_STREAM)
        given = False
        try:
            await self._step("dialled")
            state = self._found(instance)
            writer.write(msgspec.json.encode(state) + b"\n")
            await self._step("copied")
            self.world.put(msgspec.structs.replace(state, left=True))
            stopped()
            await self._step("stopped")
            await _hear(reader, b"loaded\n")
            give()
            given = True
            await self._step("given")
            writer.write(b"go\n")
            await _hear(reader, b"running\n")
        finally:
            writer.close()
            if not given:
                await self.stay(instance)

    async def receive(self, spec: Spec, dial: Dial) -> FakeInstance:
        reader, writer = await dial(_STREAM)
        try:
            await self._step("accepted")
            state = msgspec.json.decode(await asyncio.wait_for(reader.readline(), _ANSWER_S), type=FakeState)
            self.world.put(FakeState(spec))
            await self._step("loaded")
            writer.write(b"loaded\n")
            await _hear(reader, b"go\n")
            await self._step("run")
            self.world.put(FakeState(spec, made=True, private=state.private))
            writer.write(b"running\n")
            await writer.drain()
        except msgspec.MsgspecError as error:
            raise SandboxError(f"nothing arrived: {error}") from None
        except BaseException:  # whatever it was, cancelled included, leaves nothing behind
            self.world.remove(spec.id)
            raise
        finally:
            writer.close()
        return self._instance(spec)

    async def stay(self, instance: Instance) -> None:
        self.world.put(msgspec.structs.replace(self._found(instance), left=False))

    def _found(self, instance: Instance) -> FakeState:
        state = self.world.get(instance.spec.id)
        if state is None:
            raise SandboxError(f"sandbox {instance.spec.id} ended")
        return state

    async def _step(self, step: Step) -> None:
        if self.at is not None:
            await self.at(step)


async def _hear(reader: asyncio.StreamReader, wanted: bytes) -> None:
    line = await asyncio.wait_for(reader.readline(), _ANSWER_S)
    if line != wanted:
        raise SandboxError(f"the other side said {line!r} instead of {wanted!r}")
