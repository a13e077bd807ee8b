"""A sandbox's way from another host to this one: the target's side.

Owns: ``Arrivals``: who may come, the listener of each move, what arrives, making a sandbox of it.

Must not know: how a runtime isolates, E2B, who asked for the move. ``moves.py`` is the other side.

Guarantees: a listener is for one move, expires, and every connection proves the token before anything else; each
stream is taken once. A sandbox that is here is on disk before it is said to be; one that ``has`` denied will not be
here by any earlier try. What arrives is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from venusrl.clock import Clock
from venusrl.sandboxes.admission.api import Pause
from venusrl.sandboxes.host import archive
from venusrl.sandboxes.host.api import Address, Moving, Order
from venusrl.sandboxes.host.cells import Cells
from venusrl.sandboxes.host.errors import AlreadyExists, HostLost, MoveUnsupported, within
from venusrl.sandboxes.host.move_line import MAIN, STEP_S, Word, hear, say
from venusrl.sandboxes.host.records import Record, check_id
from venusrl.sandboxes.protocol import Limits, SandboxError, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Instance, Runtime, Snapshot, Spec
from venusrl.sandboxes.runtimes.moving import Dial, Movable, Streams
from venusrl.sandboxes.templates.api import Image

_PIECE = 1 << 20
_LARGEST = 1 << 40
_COME_S = 120.0
"""How long the origin may take to connect."""
_SAID_S = 10.0
_TEMPLATE_S = 900.0
Resolve = Callable[[str, str], Awaitable[Image]]
Admit = Callable[[Image, Order, Limits, int | None], tuple[Pause, ...]]
How = Callable[[Runtime, Spec], Awaitable[Instance]]
Start = Callable[[Record, tuple[Pause, ...], How, bool], Awaitable[None]]
"""Make a sandbox of a record, once those are paused, and put it on disk; whether its template is prepared before."""


class Taken(msgspec.Struct, frozen=True):
    """What arrived as a snapshot."""

    record: Record
    snapshot: Snapshot
    paused: bool


Take = Callable[[Taken], Awaitable[None]]


class Arrivals:
    """``listen`` is the address of this machine that other hosts connect to; ``scratch`` a directory of its own."""

    def __init__(
        self,
        name: str,
        listen: str,
        scratch: Path,
        cells: Cells,
        resolve: Resolve,
        admit: Admit,
        start: Start,
        own: Callable[[Spec], Awaitable[Spec]],
        clock: Clock,
    ) -> None:
        """``own``: the spec of a sandbox over the pages that it may share."""
        self._name = name
        self._listen = listen
        self._scratch = scratch
        self._cells = cells
        self._resolve = resolve
        self._admit = admit
        self._start = start
        self._own = own
        self._clock = clock
        self._open: dict[str, asyncio.Task[None]] = {}

    def clear(self) -> None:
        """Remove what a crash left. Blocks."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def close(self) -> None:
        for sandbox in list(self._open):
            await self._forget(sandbox)

    async def has(self, sandbox: str) -> bool:
        """As ``Host.has``."""
        await self._forget(sandbox)
        if sandbox not in self._cells:
            return False
        making = self._cells.get(sandbox).making
        if making is not None and not making.done():
            raise HostLost(f"sandbox {sandbox} is just arriving on {self._name}: ask again")
        return True

    async def offer(self, move: Moving) -> Address:
        """Make ready for one move; an earlier try of the same sandbox is over. Raises SandboxDenied, MoveUnsupported,
        AlreadyExists, TemplateNotFound."""
        record = _record_of(move, self._name)
        if await self.has(move.sandbox):
            raise AlreadyExists(f"sandbox {move.sandbox} is on {self._name}")
        runtime = self._cells.runtime(move.runtime)
        lacks = self._objection(runtime, move)
        record.image = await image_here(self._resolve, record, self._name)
        self._admit(record.image, record.order, limits_of(record), move.private or None)
        return msgspec.structs.replace(await self._listen_for(move.sandbox, record), live_lacks=lacks)

    def _objection(self, runtime: Runtime, move: Moving) -> str:
        """Why it cannot come while it runs. Raises MoveUnsupported when it cannot come."""
        if not isinstance(runtime, Movable) or not move.passport:
            return f"{move.runtime} sandboxes cannot move while they run"
        found = runtime.objection(move.passport)
        if found.memory:
            raise MoveUnsupported(f"sandbox {move.sandbox} cannot come to {self._name}: {found.memory}")
        return found.live

    # -- a listener

    async def _listen_for(self, sandbox: str, record: Record) -> Address:
        token = secrets.token_hex(32)
        streams = _Streams()

        async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                word = await hear(reader, "hello", seconds=_SAID_S)
            except SandboxError:
                word = Word("")
            if not hmac.compare_digest(word.token.encode(), token.encode()) or not streams.put(
                word.stream, (reader, writer)
            ):
                writer.close()

        server = await asyncio.start_server(met, self._listen, 0)
        port = server.sockets[0].getsockname()[1]
        task = asyncio.create_task(self._receive(server, streams, record), name=f"arrival of {sandbox}")
        self._open[sandbox] = task
        task.add_done_callback(lambda done: self._done(sandbox, done))
        return Address(self._listen, port, token)

    async def _forget(self, sandbox: str) -> None:
        task = self._open.pop(sandbox, None)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    def _done(self, sandbox: str, task: asyncio.Task[None]) -> None:
        if self._open.get(sandbox) is task:
            del self._open[sandbox]
        if not task.cancelled():
            task.exception()  # it was told to the origin

    async def _receive(self, server: asyncio.Server, streams: _Streams, record: Record) -> None:
        writer: asyncio.StreamWriter | None = None
        here = False
        try:
            async with within(self._cells.time_limits.move, "move", f"sandbox {record.order.id}"):
                reader, origin = await streams.get(MAIN, _COME_S)
                writer = origin
                await self._converse(reader, origin, streams, record)
                here = True
                await say(origin, Word("taken"))
        except (SandboxError, OSError, TimeoutError) as error:
            if writer is not None and not here:  # else the origin must ask again, not take it back
                with contextlib.suppress(OSError):
                    await say(writer, Word("error", error=str(error)[:500]))
            raise
        finally:
            server.close()
            streams.close()

    async def _converse(
        self, reader: asyncio.StreamReader, origin: asyncio.StreamWriter, streams: _Streams, record: Record
    ) -> None:
        """Until the sandbox is here."""
        word = await hear(reader, "live", "lend", "state", seconds=self._cells.time_limits.move)
        runtime = self._cells.runtime(record.order.runtime)
        if isinstance(runtime, Movable) and word.say == "live":
            await self._take_live(runtime, record, lambda name: streams.get(name, STEP_S))
            return
        if isinstance(runtime, Movable) and word.say == "lend":
            async with within(_TEMPLATE_S, "move", f"the template of sandbox {record.order.id}"):
                await runtime.borrow(await self._own(spec_of(record)), (reader, origin))
            word = await hear(reader, "state", seconds=self._cells.time_limits.move)
        work = self._scratch / f"take-{secrets.token_hex(6)}"
        try:
            taken = await self._state(reader, word, work, record)
            await say(origin, Word("kept"))
            await hear(reader, "go")
            await self.take(taken)
        finally:
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)

    async def _state(self, reader: asyncio.StreamReader, word: Word, work: Path, record: Record) -> Taken:
        await asyncio.to_thread(work.mkdir, mode=0o700, parents=True)
        room = shutil.disk_usage(work).free
        if word.say != "state" or not 0 < word.size <= min(_LARGEST, room):
            raise SandboxError(f"a move of {word.size} bytes does not fit here ({room} bytes are free)")
        left = word.size
        with (work / "tar").open("xb") as file:
            while left:
                piece = await asyncio.wait_for(reader.read(min(left, _PIECE)), STEP_S)
                if not piece:
                    raise HostLost("the origin of a move hung up")
                await asyncio.to_thread(file.write, piece)
                left -= len(piece)
        await asyncio.to_thread(archive.unpack, work / "tar", work / "data", word.size)
        snapshot = Snapshot(str(work / "data"), word.memory, word.size, record.order.runtime)
        return Taken(record, snapshot, word.paused)

    # -- making a sandbox of it

    async def take(self, taken: Taken) -> None:
        """What arrived as a snapshot becomes a sandbox of this host, paused if it was."""
        record = self._fresh(taken.record)
        displaced = self._admit(record.image, record.order, limits_of(record), record.footprint.total or None)

        async def rebuild(runtime: Runtime, spec: Spec) -> Instance:
            return await _rebuilt(runtime, spec, taken)

        # What a movable runtime leans on came along: another template would be made for nothing.
        prepared = not isinstance(self._cells.runtime(record.order.runtime), Movable)
        await self._start(record, displaced, rebuild, prepared)
        self._cells.count("moved_here")  # nothing that can fail may follow: it is here now

    async def _take_live(self, movable: Movable, record: Record, streams: Dial) -> None:
        record = self._fresh(record)
        displaced = self._admit(record.image, record.order, limits_of(record), record.footprint.total or None)

        async def receive(_: Runtime, spec: Spec) -> Instance:
            return await movable.receive(spec, streams)

        await self._start(record, displaced, receive, False)
        self._cells.count("moved_here")
        self._cells.count("moved_here_live")

    def _fresh(self, record: Record) -> Record:
        record.state, record.runtime, record.changed = "running", b"", self._clock.time()
        return record


class _Streams:
    """The connections of one move by name, each put once and got once; all are closed at the end."""

    def __init__(self) -> None:
        self._arrived: dict[str, asyncio.Future[Streams]] = {}
        self._all: list[Streams] = []

    def put(self, name: str, streams: Streams) -> bool:
        """Whether it was wanted."""
        waiting = self._future(name)
        if not name or waiting.done() or len(self._arrived) > 8:
            return False
        self._all.append(streams)
        waiting.set_result(streams)
        return True

    async def get(self, name: str, seconds: float) -> Streams:
        """Raises HostLost when it does not come."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._future(name)), seconds)
        except TimeoutError:
            raise HostLost(f"the origin of a move did not open its {name!r} connection within {seconds:g} s") from None

    def close(self) -> None:
        for _, writer in self._all:
            writer.close()

    def _future(self, name: str) -> asyncio.Future[Streams]:
        if name not in self._arrived:
            self._arrived[name] = asyncio.get_running_loop().create_future()
        return self._arrived[name]


def _record_of(move: Moving, target: str) -> Record:
    """Raises MoveUnsupported."""
    try:
        record = msgspec.json.decode(move.record, type=Record)
    except msgspec.MsgspecError as error:
        raise MoveUnsupported(f"the hosts {move.origin} and {target} are of different versions: {error}") from None
    if check_id(move.sandbox) != record.order.id or record.order.limits is None:
        raise MoveUnsupported(f"the offer of sandbox {move.sandbox} does not fit its record")
    return record


def limits_of(record: Record) -> Limits:
    assert record.order.limits is not None  # ``_record_of`` saw to it
    return record.order.limits


def spec_of(record: Record) -> Spec:
    order = record.order
    return Spec(order.id, record.image, limits_of(record), order.network, order.env, order.tenant)


async def image_here(resolve: Resolve, record: Record, target: str) -> Image:
    """The same template on this host. Raises MoveUnsupported, TemplateNotFound."""
    try:
        image = await resolve(record.image.id, record.order.tenant)
    except TemplateNotFound:
        image = await resolve(record.order.template, record.order.tenant)
    if image.id != record.image.id:
        raise MoveUnsupported(f"{target} has another template {record.image.name!r}: build or import it there too")
    return image


async def _rebuilt(runtime: Runtime, spec: Spec, taken: Taken) -> Instance:
    """The sandbox as it was, paused if it was; nothing is left when it fails."""
    instance = await runtime.restore(spec, taken.snapshot)
    if taken.paused:
        try:
            await instance.pause(memory=taken.snapshot.memory)
        except BaseException:  # whatever it was, cancellation too: raised again below
            await instance.kill()
            raise
        taken.record.state = "paused"
    return instance
