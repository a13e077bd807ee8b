"""A helper process's end of the socket to its owner: whole frames in, whole frames out, never waiting.

Owns: the buffers of both directions, their place in the helper's selector.

Must not know: what the frames say.

Guarantees: frames are taken in order; what the owner does not read at once is kept; ``here`` is false once it has gone.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

import msgspec

from venusrl.sandboxes.runtimes.namespace import wire

_READ = 1 << 18


class Owner:
    """Calls ``take`` with each frame's body. Handlers in ``selector`` are functions without arguments."""

    def __init__(
        self, connection: socket.socket, selector: selectors.BaseSelector, take: Callable[[bytes], None]
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._selector = selector
        self._take = take
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.here = True
        selector.register(connection, selectors.EVENT_READ, self._on_ready)

    def reply(self, message: msgspec.Struct) -> None:
        self._outgoing += wire.encode(message)
        self._flush()

    def _on_ready(self) -> None:
        try:
            data = self._connection.recv(_READ)
        except BlockingIOError:
            self._flush()
            return
        except ConnectionError:
            data = b""
        if not data:
            self.here = False
            return
        self._incoming += data
        while len(self._incoming) >= wire.HEADER_BYTES:
            end = wire.HEADER_BYTES + wire.body_length(bytes(self._incoming[: wire.HEADER_BYTES]))
            if len(self._incoming) < end:
                break
            body = bytes(self._incoming[wire.HEADER_BYTES : end])
            del self._incoming[:end]
            self._take(body)

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.here = False
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._selector.modify(self._connection, events, self._on_ready)
