"""E2B's uploads and downloads.

Owns: GET and POST of /files, /files/compose: query, multipart and gzip, ``X-Metadata-*``.

Must not know: keys and signatures (checked before), how an agent is reached.

Guarantees: a file is never held whole in memory, in either direction and however it is compressed; a client that
stalls is let go after ``STALL_S``; paths are the agent's to resolve, as the asking user.

The server in front must hand bodies over as they came (``auto_decompress=False``).
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import Any, Protocol

import msgspec
from aiohttp import BodyPartReader, ClientPayloadError, web

from venusrl.sandboxes.agent.api import Agent, AgentError, Entry
from venusrl.sandboxes.envd.answers import error_answer
from venusrl.sandboxes.envd.connect import Fault, decode, whole
from venusrl.sandboxes.envd.entries import follow, home_relative, uploaded
from venusrl.sandboxes.envd.streams import STALL_S
from venusrl.sandboxes.protocol import BadPath, DiskFull

PIECE = 1 << 16
MAX_FILES = 1000
_METADATA = "x-metadata-"
_KEY_BYTES = 246
_METADATA_BYTES = 4096
_NAMESPACE_BYTES = len("user.e2b.")
_STATUS = {
    "invalid_argument": 400,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "failed_precondition": 400,
    "resource_exhausted": 507,
    "unavailable": 503,
    "unimplemented": 501,
    "unauthenticated": 401,
}


class Bad(Exception):
    """A request that is answered with ``status``."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Readable(Protocol):
    async def read(self, n: int = -1) -> bytes: ...


class Compose(msgspec.Struct, frozen=True):
    """The body of /files/compose."""

    source_paths: list[str] = []
    destination: str = ""
    username: str = ""


async def files(agent: Agent, request: web.Request, user: str) -> web.StreamResponse:
    """Any request below /files."""
    try:
        match request.method, request.path:
            case "GET", "/files":
                return await _download(agent, request, user)
            case "POST", "/files":
                return await _upload(agent, request, user)
            case "POST", "/files/compose":
                return await _compose(agent, request, user)
            case _:
                return error_answer(405, f"{request.method} of {request.path} is not supported")
    except Bad as error:
        return error_answer(error.status, str(error))
    except AgentError as error:
        return error_answer(_STATUS.get(error.code, 500), str(error))
    except BadPath as error:
        return error_answer(400, str(error))
    except DiskFull as error:
        return error_answer(507, str(error))
    except Fault as error:
        return error_answer(413 if error.code == "resource_exhausted" else 400, error.message)
    except (ConnectionError, ClientPayloadError):
        return error_answer(400, "the upload ended before the file was whole")


def metadata(headers: Any) -> dict[str, str]:
    """The ``X-Metadata-*`` headers; of one sent twice the first counts. Raises Bad."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        key = name.lower().removeprefix(_METADATA)
        if name.lower() == key or key in found:
            continue
        if not key or not _printable(key) or not _printable(value):
            raise Bad(400, f"metadata {key!r} must be printable ASCII, and its name not empty")
        if len(key) > _KEY_BYTES:
            raise Bad(400, f"a metadata name of {len(key)} bytes is over the limit of {_KEY_BYTES}")
        found[key] = value
    size = sum(_NAMESPACE_BYTES + len(key) + len(value) for key, value in found.items())
    if size > _METADATA_BYTES:
        raise Bad(400, f"metadata of {size} bytes is over the limit of {_METADATA_BYTES}")
    return found


def wants_gzip(accepted: str | None) -> bool:
    """Whether to compress: only when gzip is the one coding asked for (most clients accept it unasked, and on a short
    way compressing costs more than it saves). Raises Bad when neither gzip nor plain bytes will do."""
    if accepted is None:
        return False
    weights: dict[str, float] = {}
    for item in accepted.lower().split(","):
        coding, _, parameters = item.strip().partition(";")
        if coding.strip():
            weights[coding.strip()] = _weight(parameters)
    identity = weights.get("identity", weights.get("*", 1.0))
    gzip = weights.get("gzip", weights.get("*", 0.0))
    if gzip > 0 and (identity == 0 or (set(weights) <= {"gzip", "identity"} and gzip >= weights.get("identity", 0.0))):
        return True
    if identity == 0:
        raise Bad(406, "no acceptable encoding found, supported: [identity, gzip]")
    return False


async def pieces(body: Readable) -> AsyncGenerator[bytes, None]:
    """A body bit by bit. Raises Bad when the client stalls."""
    while True:
        try:
            async with asyncio.timeout(STALL_S):
                piece = await body.read(PIECE)
        except TimeoutError:
            raise Bad(408, f"nothing of the upload arrived for {STALL_S:g} s") from None
        if not piece:
            return
        yield piece


async def gunzipped(compressed: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Never more than ``PIECE`` at once, whatever it expands to. Raises Bad."""
    inflater = zlib.decompressobj(wbits=31)
    try:
        async for piece in compressed:
            while piece:
                if inflater.eof:
                    # Files in gzip's format may follow each other.
                    inflater = zlib.decompressobj(wbits=31)
                yield inflater.decompress(piece, PIECE)
                piece = inflater.unconsumed_tail or inflater.unused_data
    except zlib.error as error:
        raise Bad(400, f"the body is not gzip: {error}") from None
    if not inflater.eof:
        raise Bad(400, "the gzip body ended early")


async def gzipped(plain: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    deflater = zlib.compressobj(level=1, wbits=31)
    async for piece in plain:
        if packed := deflater.compress(piece):
            yield packed
    yield deflater.flush()


async def _download(agent: Agent, request: web.Request, user: str) -> web.StreamResponse:
    path = home_relative(_query(request, "path"))
    compress = wants_gzip(request.headers.get("Accept-Encoding"))
    entry = await agent.stat(path, user)
    end = await follow(agent, entry, user)
    if end is None:
        raise Bad(404, f"path '{entry.path}' leads nowhere")
    if end.kind == "directory":
        raise Bad(400, f"path '{entry.path}' is a directory")
    # Without a Content-Length: files of /proc have none, and what a sandbox says of the others may change meanwhile.
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "Vary": "Accept-Encoding"})
    if compress:
        response.headers["Content-Encoding"] = "gzip"
    source = agent.read(path, user)
    first = await anext(source, b"")
    await response.prepare(request)
    plain = _chained(first, source)
    try:
        async for piece in gzipped(plain) if compress else plain:
            async with asyncio.timeout(STALL_S):
                await response.write(piece)
        await response.write_eof()
    except (AgentError, ConnectionError, TimeoutError):
        # Too late for a status: a connection that breaks off tells the client that the file is not whole.
        if request.transport is not None:
            request.transport.abort()
    return response


async def _upload(agent: Agent, request: web.Request, user: str) -> web.StreamResponse:
    attributes = metadata(request.headers)
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip"):
        raise Bad(415, f"Content-Encoding {encoding} is not supported: identity or gzip")
    if request.content_type == "application/octet-stream":
        path = _query(request, "path")
        body = pieces(request.content)
        data = gunzipped(body) if encoding == "gzip" else body
        written = [await agent.write(home_relative(path), user, data, attributes)]
    elif request.content_type == "multipart/form-data":
        if encoding == "gzip":
            raise Bad(415, "gzip is supported for application/octet-stream only")
        written = await _parts(agent, request, user, attributes)
    else:
        raise Bad(415, "uploads are multipart/form-data or application/octet-stream")
    return web.Response(
        body=msgspec.json.encode([uploaded(entry) for entry in written]), content_type="application/json"
    )


async def _parts(agent: Agent, request: web.Request, user: str, attributes: dict[str, str]) -> list[Entry]:
    fixed = request.query.get("path")
    written: list[Entry] = []
    try:
        reader = await request.multipart()
        while (part := await reader.next()) is not None:
            if not isinstance(part, BodyPartReader) or part.name != "file":
                continue
            path = fixed if fixed is not None else _filename(part)
            if not path:
                raise Bad(400, "a file's part has no filename, and the query no path")
            if len(written) >= MAX_FILES or (written and fixed is not None):
                raise Bad(400, "too many files" if fixed is None else "several files cannot go to the same path")
            written.append(await agent.write(home_relative(path), user, pieces(_Part(part)), attributes))
    except ValueError as error:
        raise Bad(400, f"malformed multipart body: {error}") from None
    return written


def _filename(part: BodyPartReader) -> str:
    """As sent: aiohttp's own reading takes the slash off the front of an absolute path."""
    message = Message()
    message["Content-Disposition"] = part.headers.get("Content-Disposition", "")
    name = message.get_param("filename", "", header="Content-Disposition")
    return collapse_rfc2231_value(name) if name else ""


class _Part:
    """A part as something to ``read`` from."""

    def __init__(self, part: BodyPartReader) -> None:
        self._part = part

    async def read(self, n: int = -1) -> bytes:
        return bytes(await self._part.read_chunk(n))


async def _compose(agent: Agent, request: web.Request, user: str) -> web.StreamResponse:
    asked = decode(await whole(request.content), Compose)
    user = asked.username or user
    if not asked.source_paths or not asked.destination:
        raise Bad(400, "source_paths and destination are needed")
    if len(asked.source_paths) > MAX_FILES:
        raise Bad(400, f"more than {MAX_FILES} source paths")
    sources = [await agent.stat(home_relative(path), user) for path in asked.source_paths]
    for entry in sources:
        if entry.kind != "file":
            raise Bad(400, f"path '{entry.path}' is not a regular file")

    async def joined() -> AsyncGenerator[bytes, None]:
        for entry in sources:
            async for piece in agent.read(entry.path, user):
                yield piece

    # Written beside its place: the destination may be one of the sources.
    target = home_relative(asked.destination)
    part = await agent.write(target + ".composing", user, joined(), {})
    for path in {entry.path for entry in sources}:
        await agent.remove(path, user)
    written = await agent.move(part.path, target, user)
    return web.Response(body=msgspec.json.encode(uploaded(written)), content_type="application/json")


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    if first:
        yield first
    async for piece in rest:
        yield piece


def _query(request: web.Request, name: str) -> str:
    value = request.query.get(name)
    if value is None:
        raise Bad(400, f"the query parameter {name} is missing")
    return value


def _printable(text: str) -> bool:
    return all(0x20 <= ord(letter) <= 0x7E for letter in text)


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.strip().partition("=")
        if name == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
