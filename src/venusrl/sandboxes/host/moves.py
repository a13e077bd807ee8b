"""A sandbox's way from one host to another.

Owns: ``send`` at the origin, ``Receiver`` at the target, and what goes between them over one TCP connection.

Must not know: how a runtime isolates, E2B, who asked for the move.

Guarantees: one owner at every instant. Until the origin's record says ``given_to`` it is the origin's; then it is the
target's, if the target has its record, and an answer is not guessed: the origin serves it no more until an ``offer``
tells (a target that has it says AlreadyExists; one that does not has forgotten every earlier try). A connection has
one use, expires, and proves the token before anything else. What arrives is bounded: plain files and directories only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import shutil
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path, PurePosixPath

import msgspec

from venusrl.sandboxes.host.api import Address, Host, Moving
from venusrl.sandboxes.host.cells import Cell, Cells, is_paused
from venusrl.sandboxes.host.errors import AlreadyExists, HostLost, MoveUnsupported, within
from venusrl.sandboxes.host.records import Record, check_id
from venusrl.sandboxes.protocol import Limits, SandboxDenied, SandboxError, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Instance, Runtime, Snapshot, Spec
from venusrl.sandboxes.templates.api import Image

_NOT_THERE = (SandboxDenied, MoveUnsupported, TemplateNotFound)
"""Said by a target that has looked: it neither has the sandbox nor will have it by an earlier try."""
_STEP_S = 30.0
_PIECE = 1 << 20
_LARGEST = 1 << 40
_FILES = 100_000
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Word(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the conversation."""

    say: str
    token: str = ""
    size: int = 0
    memory: bool = False
    paused: bool = False
    error: str = ""


class Taken(msgspec.Struct, frozen=True):
    """What arrived."""

    record: Record
    snapshot: Snapshot
    paused: bool


Take = Callable[[Taken], Awaitable[None]]


async def _say(writer: asyncio.StreamWriter, word: _Word) -> None:
    writer.write(msgspec.json.encode(word) + b"\n")
    await writer.drain()


async def _hear(reader: asyncio.StreamReader, wanted: str, seconds: float = _STEP_S) -> _Word:
    """Raises HostLost when it hung up or said nothing, SandboxError when it gave up."""
    try:
        line = await asyncio.wait_for(reader.readline(), seconds)
        word = msgspec.json.decode(line, type=_Word) if line else None
    except (TimeoutError, OSError, ValueError) as error:
        raise HostLost(f"the other host of a move said nothing of {wanted!r}: {error!r}") from None
    if word is None:
        raise HostLost(f"the other host of a move hung up before {wanted!r}")
    if word.say != wanted:
        raise SandboxError(f"the other host gave the move up: {word.error[:500] or word.say[:50]}")
    return word


# -- the origin


class Sender:
    """Gives sandboxes of ``cells`` away. ``scratch`` is a directory of its own."""

    def __init__(self, name: str, cells: Cells, scratch: Path) -> None:
        self._name = name
        self._cells = cells
        self._scratch = scratch

    async def send(self, cell: Cell, to: Host, *, memory: bool) -> None:
        """Under the cell's lock. On return it is ``to``'s. Raises SandboxError: it is here as before, unless the
        error is HostLost and its record says ``given_to``; then moving it there again finds out."""
        record = cell.record
        if record.given_to and record.given_to != to.name:
            raise HostLost(f"sandbox {cell.id} was given to {record.given_to}: move it there first")
        paused = record.was_paused if record.given_to else record.state == "paused"
        if not record.given_to:
            self._cells.begin_move(cell, to.name)
        sent = self._moving(cell)
        try:
            address = await to.offer(sent)
        except AlreadyExists:
            if not record.given_to:
                self._cells.end_move(cell)
                raise
            await self._cells.remove(cell)  # the answer that was lost: it is there
            return
        except SandboxError as error:
            if not record.given_to or isinstance(error, _NOT_THERE):
                await self._undo(cell, paused)
            raise
        record.given_to = ""  # nothing of an earlier try is left there
        await self._stream(cell, to, address, paused, memory)

    def _moving(self, cell: Cell) -> Moving:
        record = msgspec.structs.replace(cell.record, epoch=cell.record.epoch + 1, sending_to="", given_to="")
        return Moving(
            id=secrets.token_hex(8),
            sandbox=cell.id,
            origin=self._name,
            runtime=record.order.runtime,
            epoch=record.epoch,
            record=msgspec.json.encode(record),
            private=record.footprint.total,
        )

    async def _stream(self, cell: Cell, to: Host, address: Address, paused: bool, memory: bool) -> None:
        work = self._scratch / f"send-{secrets.token_hex(6)}"
        try:
            work.mkdir(mode=0o700, parents=True)
            instance = cell.alive()
            if not is_paused(instance):
                await instance.pause()
            snapshot = await instance.snapshot(work / "data", memory=memory)
            await asyncio.to_thread(_pack, work / "data", work / "tar")
            async with _dial(address) as (reader, writer):
                await self._hand_over(cell, to, (reader, writer), work / "tar", snapshot.memory, paused)
        except BaseException:  # whatever it was, cancellation too: raised again below
            if not cell.record.given_to:
                await self._undo(cell, paused)
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
        await self._cells.remove(cell)

    async def _hand_over(
        self, cell: Cell, to: Host, streams: Streams, archive: Path, memory: bool, paused: bool
    ) -> None:
        reader, writer = streams
        size = (await asyncio.to_thread(archive.stat)).st_size
        await _say(writer, _Word("state", size=size, memory=memory, paused=paused))
        with archive.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, _PIECE):
                writer.write(piece)
                await writer.drain()
        await _hear(reader, "kept", self._cells.time_limits.move)
        cell.alive()  # a kill that came meanwhile ends it here
        self._cells.give(cell, to.name, paused)
        try:
            await _say(writer, _Word("go"))
            await _hear(reader, "taken", self._cells.time_limits.move)
        except HostLost:
            raise
        except SandboxError:
            cell.record.given_to = ""  # it said that it does not have it
            raise
        except OSError as error:
            raise HostLost(f"the connection of a move to {to.name} broke: {error}") from None

    async def _undo(self, cell: Cell, paused: bool) -> None:
        """It stays; the epoch passes what was offered."""
        instance = cell.alive()
        if not paused and is_paused(instance):
            await self._resume(instance)
        self._cells.end_move(cell)

    async def _resume(self, instance: Instance) -> None:
        with contextlib.suppress(SandboxError):  # then it stays paused, and its record says so
            await instance.resume()


@contextlib.asynccontextmanager
async def _dial(address: Address) -> AsyncIterator[Streams]:
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), _STEP_S)
    except (TimeoutError, OSError) as error:
        raise MoveUnsupported(f"the other host does not listen on {address.host}:{address.port}: {error!r}") from None
    try:
        await _say(writer, _Word("hello", token=address.token))
        yield reader, writer
    except OSError as error:
        raise HostLost(f"the connection of a move broke: {error}") from None
    finally:
        writer.close()


# -- the target


def read_offer(move: Moving, target: str) -> Record:
    """Raises MoveUnsupported."""
    try:
        record = msgspec.json.decode(move.record, type=Record)
    except msgspec.MsgspecError as error:
        raise MoveUnsupported(f"the hosts {move.origin} and {target} are of different versions: {error}") from None
    if check_id(move.sandbox) != record.order.id or record.order.limits is None:
        raise MoveUnsupported(f"the offer of sandbox {move.sandbox} does not fit its record")
    return record


class Receiver:
    """Listens for one move each. ``take`` makes the sandbox here, durably, or raises."""

    def __init__(self, listen: str, scratch: Path, take: Take, seconds: float) -> None:
        self._listen = listen
        self._scratch = scratch
        self._take = take
        self._seconds = seconds
        self._open: dict[str, asyncio.Task[None]] = {}

    def clear(self) -> None:
        """Remove what a crash left. Blocks."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def offer(self, move: Moving, record: Record) -> Address:
        """An earlier try of the same sandbox is over from now on."""
        await self.forget(move.sandbox)
        token = secrets.token_hex(32)
        arrived: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()

        async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                word = await _hear(reader, "hello", 10.0)
            except SandboxError:
                word = _Word("")
            if not hmac.compare_digest(word.token.encode(), token.encode()) or arrived.done():
                writer.close()
                return
            arrived.set_result((reader, writer))

        server = await asyncio.start_server(met, self._listen, 0)
        port = server.sockets[0].getsockname()[1]
        task = asyncio.create_task(self._receive(server, arrived, record), name=f"arrival of {move.sandbox}")
        self._open[move.sandbox] = task
        task.add_done_callback(lambda done: self._done(move.sandbox, done))
        return Address(self._listen, port, token)

    async def forget(self, sandbox: str) -> None:
        task = self._open.pop(sandbox, None)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def close(self) -> None:
        for sandbox in list(self._open):
            await self.forget(sandbox)

    def _done(self, sandbox: str, task: asyncio.Task[None]) -> None:
        if self._open.get(sandbox) is task:
            del self._open[sandbox]
        if not task.cancelled():
            task.exception()  # it was told to the origin

    async def _receive(self, server: asyncio.Server, arrived: asyncio.Future[Streams], record: Record) -> None:
        work = self._scratch / f"take-{secrets.token_hex(6)}"
        writer: asyncio.StreamWriter | None = None
        here = False
        try:
            async with within(self._seconds, "move", f"sandbox {record.order.id}"):
                reader, origin = await asyncio.wait_for(arrived, _STEP_S * 4)
                writer = origin
                server.close()
                work.mkdir(mode=0o700, parents=True)
                taken = await self._state(reader, work, record)
                await _say(origin, _Word("kept"))
                await _hear(reader, "go")
                await self._take(taken)
                here = True
                await _say(origin, _Word("taken"))
        except (SandboxError, OSError, TimeoutError) as error:
            if writer is not None and not here:  # else the origin must ask again, not take it back
                with contextlib.suppress(OSError):
                    await _say(writer, _Word("error", error=str(error)[:500]))
            raise
        finally:
            server.close()
            if arrived.done() and not arrived.cancelled():
                arrived.result()[1].close()
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)

    async def _state(self, reader: asyncio.StreamReader, work: Path, record: Record) -> Taken:
        word = await _hear(reader, "state", self._seconds)
        room = shutil.disk_usage(work).free
        if not 0 < word.size <= min(_LARGEST, room):
            raise SandboxError(f"a move of {word.size} bytes does not fit here ({room} bytes are free)")
        left = word.size
        with (work / "tar").open("xb") as file:
            while left:
                piece = await asyncio.wait_for(reader.read(min(left, _PIECE)), _STEP_S)
                if not piece:
                    raise HostLost("the origin of a move hung up")
                await asyncio.to_thread(file.write, piece)
                left -= len(piece)
        await asyncio.to_thread(_unpack, work / "tar", work / "data", word.size)
        snapshot = Snapshot(str(work / "data"), word.memory, word.size, record.order.runtime)
        return Taken(record, snapshot, word.paused)


def limits_of(record: Record) -> Limits:
    assert record.order.limits is not None  # ``read_offer`` saw to it
    return record.order.limits


def refuse_known(cells: Cells, sandbox: str, target: str) -> None:
    """Raises AlreadyExists when it is here, HostLost when that is not decided yet."""
    if sandbox not in cells:
        return
    making = cells.get(sandbox).making
    if making is not None and not making.done():
        raise HostLost(f"sandbox {sandbox} is just arriving on {target}: ask again")
    raise AlreadyExists(f"sandbox {sandbox} is on {target}")


async def image_here(resolve: Callable[[str, str], Awaitable[Image]], record: Record, target: str) -> Image:
    """The same template on this host. Raises MoveUnsupported, TemplateNotFound."""
    try:
        image = await resolve(record.image.id, record.order.tenant)
    except TemplateNotFound:
        image = await resolve(record.order.template, record.order.tenant)
    if image.id != record.image.id:
        raise MoveUnsupported(f"{target} has another template {record.image.name!r}: build or import it there too")
    return image


async def rebuild(runtime: Runtime, spec: Spec, taken: Taken) -> Instance:
    """The sandbox as it was, paused if it was; nothing is left when it fails."""
    instance = await runtime.restore(spec, taken.snapshot)
    if taken.paused:
        try:
            await instance.pause()
        except BaseException:  # whatever it was, cancellation too: raised again below
            await instance.kill()
            raise
        taken.record.state = "paused"
    return instance


# -- the archive


def _pack(directory: Path, target: Path) -> None:
    with tarfile.open(target, "x", format=tarfile.PAX_FORMAT) as archive:
        archive.add(directory, ".", recursive=True)


def _unpack(source: Path, target: Path, bound: int) -> None:
    """Raises SandboxError for anything but plain files and directories below ``target``."""
    target.mkdir(mode=0o700)
    seen = total = 0
    try:
        with tarfile.open(source) as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                seen, total = seen + 1, total + member.size
                if path.is_absolute() or ".." in path.parts or seen > _FILES or total > bound:
                    raise SandboxError(f"a move's archive is out of bounds at {member.name[:100]!r}")
                if member.isdir():
                    (target / path).mkdir(mode=0o700, parents=True, exist_ok=True)
                elif member.isreg() and (content := archive.extractfile(member)) is not None:
                    with (target / path).open("xb") as file:
                        shutil.copyfileobj(content, file, _PIECE)
                    (target / path).chmod(member.mode & 0o700)
                else:
                    raise SandboxError(f"a move's archive has something that is no plain file: {member.name[:100]!r}")
    except (tarfile.TarError, OSError) as error:
        raise SandboxError(f"a move's archive cannot be unpacked: {error}") from None
