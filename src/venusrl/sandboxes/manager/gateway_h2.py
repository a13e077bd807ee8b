"""What an HTTP/2 connection that passes through says: the heads of its requests.

Owns: ``RequestHeads``, a reader of the frames a client sends, and ``refusal``, an answer in HTTP/2.

Must not know: sockets, sandboxes.

Guarantees: bounded memory whatever arrives; every request's head is seen, so that a connection shared by several
clients cannot carry one past the check of another.
"""

from __future__ import annotations

import hpack
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import RequestReceived
from h2.exceptions import H2Error
from multidict import CIMultiDict

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_HEAD = 1 << 16
MAX_FRAME = 1 << 24
_HEADER = 9
_DATA, _HEADERS, _CONTINUATION = 0x0, 0x1, 0x9
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20


class BadHttp2(ValueError):
    """Not HTTP/2, or more than is allowed."""


class RequestHeads:
    """Fed with what a client sends, preface included; gives the heads of its requests."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MAX_HEAD)
        # The server inside may allow its client a larger table than the default; what is larger still is refused.
        self._decoder.max_allowed_table_size = MAX_HEAD
        self._buffer = bytearray()
        self._preface = len(PREFACE)
        self._skip = 0
        self._block: bytearray | None = None

    def feed(self, data: bytes) -> list[CIMultiDict[str]]:
        """Raises BadHttp2."""
        self._buffer += data
        heads: list[CIMultiDict[str]] = []
        while self._advance(heads):
            pass
        return heads

    def _advance(self, heads: list[CIMultiDict[str]]) -> bool:
        if self._preface:
            if len(self._buffer) < self._preface:
                return False
            if bytes(self._buffer[: self._preface]) != PREFACE:
                raise BadHttp2("the connection does not begin as HTTP/2 does")
            del self._buffer[: self._preface]
            self._preface = 0
        if self._skip:
            passed = min(self._skip, len(self._buffer))
            del self._buffer[:passed]
            self._skip -= passed
            return self._skip == 0
        if len(self._buffer) < _HEADER:
            return False
        length = int.from_bytes(self._buffer[:3], "big")
        kind, flags = self._buffer[3], self._buffer[4]
        if (kind == _CONTINUATION) != (self._block is not None):
            raise BadHttp2("a head's frames must follow each other")
        if kind not in (_HEADERS, _CONTINUATION):
            del self._buffer[:_HEADER]
            self._skip = length
            return True
        return self._head_frame(length, kind, flags, heads)

    def _head_frame(self, length: int, kind: int, flags: int, heads: list[CIMultiDict[str]]) -> bool:
        so_far = len(self._block) if self._block is not None else 0
        if so_far + length > MAX_HEAD:
            raise BadHttp2(f"a head of more than {MAX_HEAD} bytes")
        if len(self._buffer) < _HEADER + length:
            return False
        payload = bytes(self._buffer[_HEADER : _HEADER + length])
        del self._buffer[: _HEADER + length]
        if kind == _HEADERS:
            self._block = bytearray(_unpadded(payload, flags))
        else:
            assert self._block is not None
            # An empty frame after the other costs nothing to send and something to read.
            if not payload and not flags & _END_HEADERS:
                raise BadHttp2("an empty continuation")
            self._block += payload
        if flags & _END_HEADERS:
            block, self._block = bytes(self._block), None
            heads.append(self._decoded(block))
        return True

    def _decoded(self, block: bytes) -> CIMultiDict[str]:
        try:
            pairs = self._decoder.decode(block, raw=True)
            return CIMultiDict((name.decode("ascii"), value.decode("latin-1")) for name, value in pairs)
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            raise BadHttp2(f"malformed head: {error}") from None


def _unpadded(payload: bytes, flags: int) -> bytes:
    start = 1 if flags & _PADDED else 0
    padding = payload[0] if start and payload else 0
    start += 5 if flags & _PRIORITY else 0
    if start + padding > len(payload):
        raise BadHttp2("a head with more padding than there is room for")
    return payload[start : len(payload) - padding]


def refusal(received: bytes, status: int, body: bytes, content_type: str) -> bytes:
    """What to send to a client whose first request is answered here, after ``received`` came from it."""
    connection = H2Connection(H2Configuration(client_side=False, header_encoding="latin-1"))
    connection.initiate_connection()
    try:
        for event in connection.receive_data(received):
            if isinstance(event, RequestReceived) and event.stream_id is not None:
                headers = [(":status", str(status)), ("content-type", content_type)]
                connection.send_headers(event.stream_id, [*headers, ("content-length", str(len(body)))])
                connection.send_data(event.stream_id, body, end_stream=True)
                break
        connection.close_connection(ErrorCodes.NO_ERROR)
    except H2Error:
        connection.close_connection(ErrorCodes.PROTOCOL_ERROR)
    return bytes(connection.data_to_send())
