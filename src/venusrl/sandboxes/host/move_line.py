"""What two hosts say to each other while a sandbox moves, and over which connections.

Owns: the words, one line of JSON each; connections that prove a move's token first; the origin's end (``Line``).

Must not know: sandboxes, who owns one when, what runtimes send over the streams they ask for.

Guarantees: every wait has a limit and ends in an error that says what was waited for; the token is said before anything
else, on every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from venusrl.sandboxes.host.api import Address
from venusrl.sandboxes.host.errors import HostLost, MoveUnsupported
from venusrl.sandboxes.protocol import SandboxError
from venusrl.sandboxes.runtimes.moving import Streams

STEP_S = 30.0
MAIN = "move"
"""The connection of the two hosts themselves; every other name is a runtime's stream."""


class Word(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the conversation."""

    say: str
    token: str = ""
    stream: str = ""
    size: int = 0
    memory: bool = False
    paused: bool = False
    error: str = ""


async def say(writer: asyncio.StreamWriter, word: Word) -> None:
    writer.write(msgspec.json.encode(word) + b"\n")
    await writer.drain()


async def hear(reader: asyncio.StreamReader, *wanted: str, seconds: float = STEP_S) -> Word:
    """One of ``wanted``. Raises HostLost when it hung up or said nothing, SandboxError when it gave up."""
    what = " or ".join(wanted)
    try:
        line = await asyncio.wait_for(reader.readline(), seconds)
        word = msgspec.json.decode(line, type=Word) if line else None
    except (TimeoutError, OSError, ValueError) as error:
        raise HostLost(f"the other host of a move said nothing of {what!r}: {error!r}") from None
    if word is None:
        raise HostLost(f"the other host of a move hung up before {what!r}")
    if word.say not in wanted:
        raise SandboxError(f"the other host gave the move up: {word.error[:500] or word.say[:50]}")
    return word


class Line:
    """The origin's connections to one ``Address``; ``open`` gives one."""

    def __init__(self, address: Address, main: Streams) -> None:
        self._address = address
        self.streams = main

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, address: Address) -> AsyncIterator[Line]:
        """Closed at the end. Raises MoveUnsupported when nobody listens there, HostLost when the line breaks."""
        main = await _dial(address, MAIN)
        try:
            yield cls(address, main)
        except OSError as error:
            raise HostLost(f"the connection of a move broke: {error}") from None
        finally:
            main[1].close()

    async def dial(self, name: str) -> Streams:
        """A runtime's stream."""
        return await _dial(self._address, name)

    async def say(self, word: Word) -> None:
        await say(self.streams[1], word)

    async def hear(self, *wanted: str, seconds: float = STEP_S) -> Word:
        return await hear(self.streams[0], *wanted, seconds=seconds)


async def _dial(address: Address, name: str) -> Streams:
    where = f"{address.host}:{address.port}"
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), STEP_S)
    except (TimeoutError, OSError) as error:
        raise MoveUnsupported(
            f"the other host does not listen on {where}: {error!r}; it must listen on an address that this one reaches"
        ) from None
    try:
        await say(writer, Word("hello", token=address.token, stream=name))
    except OSError as error:
        writer.close()
        raise HostLost(f"the connection of a move to {where} broke: {error}") from None
    return reader, writer
