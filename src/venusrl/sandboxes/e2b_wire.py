"""E2B's wire as a client speaks it: requests of the control plane, commands and files inside a sandbox.

Owns: ``Wire``: one HTTP session, its retries, the frames of a command's stream, errors as ``SandboxError``.

Must not know: what a run wants of its sandboxes.

Guarantees: an answer of the service is bounded and checked before it is believed; every failure is a ``SandboxError``
(or FileNotFoundError for a file); only requests that may be repeated are.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import struct
from collections.abc import AsyncIterator
from typing import Any, Literal
from urllib.parse import quote

import aiohttp
import msgspec

from venusrl.sandboxes.protocol import (
    BadPath,
    DiskFull,
    RuntimeUnavailable,
    SandboxDenied,
    SandboxError,
    SandboxGone,
    TemplateNotFound,
)

ENVD_PORT = 49983
_FRAME = struct.Struct(">BI")
_END = 0x02
_MAX_FRAME = 32 << 20
_MAX_ANSWER = 4 << 20
_REQUIRE_S = 10.0
_ATTEMPTS = 4
_BACKOFF_S = 0.2
_FOLLOW_AGAIN = 6
"""So often in a row a running command is connected to again."""
_NOT_NOW = (409, 429, 503)


class Made(msgspec.Struct, frozen=True):
    """A sandbox as its create was answered."""

    id: str = msgspec.field(name="sandboxID")
    token: str = msgspec.field(name="envdAccessToken", default="")
    domain: str | None = None


class _Left(SandboxError):
    """The service ended a stream in order, and says that the sandbox cannot be reached: it moves, or has ended."""


class Printed(msgspec.Struct, frozen=True):
    """A piece of a command's output."""

    data: bytes


class Ended(msgspec.Struct, frozen=True):
    """The end of a command: ``code`` as a shell gives it. ``cause``: "out_of_memory", "out_of_disk" as our own service
    says it, else ""."""

    code: int
    cause: str = ""


class Started(msgspec.Struct, frozen=True):
    pid: int


class Wire:
    """One endpoint and one key. ``sandbox_url`` "" = sandboxes are at https://49983-ID.DOMAIN."""

    def __init__(self, api_url: str, api_key: str, sandbox_url: str) -> None:
        self._api = api_url.rstrip("/")
        self._key = api_key
        self._sandbox_url = sandbox_url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # The control plane

    async def create(self, template: str, ttl_s: int, metadata: dict[str, str], repeat: str, within_s: float) -> Made:
        """Raises SandboxDenied, TemplateNotFound, RuntimeUnavailable, SandboxError."""
        body = {"templateID": template, "timeout": ttl_s, "metadata": metadata, "envVars": {}}
        _, data = await self._control(
            "POST", "/v2/sandboxes", body, within_s, {"Idempotency-Key": repeat}, missing=TemplateNotFound
        )
        try:
            return msgspec.json.decode(data, type=Made)
        except msgspec.MsgspecError as error:
            raise SandboxError(f"{self._api} answered a create with what is no sandbox: {error}") from error

    async def kill(self, sandbox: str, within_s: float) -> None:
        """One that is gone is as good."""
        await self._control("DELETE", f"/sandboxes/{quote(sandbox, safe='')}", None, within_s, gone_ok=True)

    async def extend(self, sandbox: str, ttl_s: int, within_s: float) -> None:
        """Raises SandboxGone."""
        path = f"/sandboxes/{quote(sandbox, safe='')}/timeout"
        await self._control("POST", path, {"timeout": ttl_s}, within_s)

    async def _require(self, sandbox: str) -> None:
        """Raises SandboxGone when the service has it no more. One that is just being ended is asked for again."""
        for attempt in range(_ATTEMPTS):
            await self._control("GET", f"/sandboxes/{quote(sandbox, safe='')}", None, _REQUIRE_S)
            await asyncio.sleep(_BACKOFF_S * 2**attempt)

    async def _control(
        self,
        method: str,
        path: str,
        body: Any,
        within_s: float,
        headers: dict[str, str] | None = None,
        *,
        missing: type[SandboxError] = SandboxGone,
        gone_ok: bool = False,
    ) -> tuple[int, bytes]:
        sent = {"X-API-KEY": self._key, **(headers or {})}
        failure = ""
        try:
            async with asyncio.timeout(within_s):
                for attempt in range(_ATTEMPTS):
                    try:
                        async with self.session().request(
                            method, self._api + path, json=body, headers=sent
                        ) as response:
                            data = await _bounded(response)
                    except (aiohttp.ClientError, ConnectionError) as error:
                        # Safe: a create has its Idempotency-Key, all others may come twice.
                        failure = f"{type(error).__name__}: {error}"
                        await asyncio.sleep(_BACKOFF_S * 2**attempt)
                        continue
                    if response.status == 404 and gone_ok:
                        return response.status, data
                    _check(response, data, missing)
                    return response.status, data
        except TimeoutError:
            failure = failure or f"no answer within {within_s:g} s"
        raise SandboxError(f"{method} {self._api}{path}: {failure}")

    # Inside a sandbox

    async def start(
        self, made: Made, user: str, args: list[str], env: dict[str, str], cwd: str, timeout_s: float
    ) -> AsyncIterator[Started | Printed | Ended]:
        """Run a program, and follow it to its end, over a move of its sandbox too. Raises SandboxGone, SandboxError,
        TimeoutError (it was to end after ``timeout_s``)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        command = {"cmd": args[0], "args": args[1:], "envs": env, "cwd": cwd}
        call, message = "Start", {"process": command, "stdin": False}
        pid = left = 0
        while call:
            follow, call = call, ""
            try:
                async for event in self._followed(made, user, follow, message, max(0.001, deadline - loop.time())):
                    if not isinstance(event, Started):
                        left = 0
                        yield event
                    elif not pid:
                        pid = event.pid
                        yield event
            except _Left as error:
                await self._require(made.id)
                left += 1
                if not pid or left > _FOLLOW_AGAIN:
                    raise SandboxError(f"the sandbox {made.id} does not answer any more: {error}") from error
                call, message = "Connect", {"process": {"pid": pid}}
                await asyncio.sleep(_BACKOFF_S * 2**left)

    async def _followed(
        self, made: Made, user: str, call: str, message: dict[str, Any], timeout_s: float
    ) -> AsyncIterator[Started | Printed | Ended]:
        """The events of one stream. Raises _Left when the service let go of the program: what it says from then on is
        kept for who connects to it. A connection that breaks is an error: what was on its way is lost."""
        data = json.dumps(message).encode()
        headers = self._headers(made, user) | {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Connect-Timeout-Ms": str(max(1, int(timeout_s * 1000))),
        }
        url = self._inside(made, f"/process.Process/{call}")
        try:
            async with self.session().post(url, data=_FRAME.pack(0, len(data)) + data, headers=headers) as response:
                if response.status in _NOT_NOW and call == "Connect":
                    raise _Left(f"status {response.status}")
                if response.status != 200:
                    _check(response, await _bounded(response), SandboxGone)
                async for flags, payload in _frames(response.content):
                    if flags & _END:
                        _check_end(payload)
                        return
                    event = _event(payload)
                    if event is not None:
                        yield event
        except (aiohttp.ClientError, ConnectionError) as error:
            # The service breaks off what runs in a sandbox that ends, as E2B does: its control plane says which it was.
            await self._require(made.id)
            raise SandboxError(f"the connection to {made.id} broke: {error}") from error
        raise SandboxError(f"the stream of a command in {made.id} ended without its end")

    async def write(self, made: Made, user: str, path: str, data: bytes, within_s: float) -> None:
        """Raises SandboxGone, DiskFull, BadPath."""
        url = self._inside(made, f"/files?path={quote(path, safe='')}&username={quote(user, safe='')}")
        headers = self._headers(made, user) | {"Content-Type": "application/octet-stream"}
        await self._inner("POST", url, headers, within_s, data)

    async def read(self, made: Made, user: str, path: str, most: int, within_s: float) -> bytes:
        """Raises FileNotFoundError, SandboxGone, BadPath, SandboxError (more than ``most`` bytes)."""
        url = self._inside(made, f"/files?path={quote(path, safe='')}&username={quote(user, safe='')}")
        found = await self._inner("GET", url, self._headers(made, user), within_s, None, most + 1)
        if len(found) > most:
            raise SandboxError(f"{path} has more than the {most} bytes that may be read")
        return found

    async def _inner(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        within_s: float,
        data: bytes | None,
        most: int = _MAX_ANSWER,
    ) -> bytes:
        try:
            async with (
                asyncio.timeout(within_s),
                self.session().request(method, url, data=data, headers=headers) as response,
            ):
                if response.status >= 400:
                    _check_file(response, await _bounded(response))
                return await _first(response, most)
        except TimeoutError:
            raise SandboxError(f"{method} {url}: no answer within {within_s:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise SandboxError(f"{method} {url}: {type(error).__name__}: {error}") from error

    def _inside(self, made: Made, path: str) -> str:
        if self._sandbox_url:
            return self._sandbox_url + path
        return f"https://{ENVD_PORT}-{made.id}.{made.domain}{path}"

    def _headers(self, made: Made, user: str) -> dict[str, str]:
        basic = base64.b64encode(f"{user}:".encode()).decode()
        headers = {
            "E2b-Sandbox-Id": made.id,
            "E2b-Sandbox-Port": str(ENVD_PORT),
            "Authorization": f"Basic {basic}",
        }
        return headers | ({"X-Access-Token": made.token} if made.token else {})


async def _first(response: aiohttp.ClientResponse, most: int) -> bytes:
    found = bytearray()
    async for piece in response.content.iter_chunked(1 << 16):
        found += piece
        if len(found) >= most:
            break
    return bytes(found[:most])


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    return await _first(response, _MAX_ANSWER)


async def _frames(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    while True:
        try:
            flags, size = _FRAME.unpack(await stream.readexactly(_FRAME.size))
            if size > _MAX_FRAME:
                raise SandboxError(f"a frame of {size} bytes is more than a service may send")
            yield flags, await stream.readexactly(size)
        except asyncio.IncompleteReadError:
            return


def _event(payload: bytes) -> Started | Printed | Ended | None:
    try:
        event = json.loads(payload)["event"]
        kind: Literal["start", "data", "end", "keepalive"] = next(iter(event))
        value = event[kind] or {}
        if kind == "start":
            return Started(int(value["pid"]))
        if kind == "data":
            return Printed(base64.b64decode(value.get("stdout") or value.get("stderr") or value.get("pty") or ""))
        if kind == "end":
            return Ended(_code(value), str(value.get("cause", "")))
    except (ValueError, KeyError, TypeError, StopIteration, AttributeError, binascii.Error) as error:
        raise SandboxError(f"the service sent what is no event of a process: {error}") from error
    return None


def _code(end: dict[str, Any]) -> int:
    """-1 is a signal: 128 + its number as a shell has it, 137 when only its name is known."""
    code = int(end.get("exitCode", 0))
    if code >= 0:
        return code
    words = {"interrupt": 130, "aborted": 134, "segmentation fault": 139, "terminated": 143}
    status = str(end.get("status", ""))
    return next((number for word, number in words.items() if word in status), 137)


def _check_end(payload: bytes) -> None:
    error = _parsed(payload).get("error")
    if not isinstance(error, dict):
        return
    code, message = error.get("code"), str(error.get("message", ""))
    if code == "deadline_exceeded":
        raise TimeoutError(message)
    if code == "unavailable":
        raise _Left(message)
    raise SandboxError(f"{code}: {message}")


def _check(response: aiohttp.ClientResponse, data: bytes, missing: type[SandboxError]) -> None:
    """Raises what a status means."""
    status = response.status
    if status < 400:
        return
    text = str(_parsed(data).get("message", "")) or f"status {status}"
    if status in (429, 503):
        raise SandboxDenied(text, _retry_after(response))
    if status in (401, 403):
        raise RuntimeUnavailable(f"{response.url.host} refuses the key: {text}")
    if status in (404, 502):
        raise missing(text) if status == 404 else SandboxGone(text)
    raise SandboxError(text)


def _check_file(response: aiohttp.ClientResponse, data: bytes) -> None:
    text = str(_parsed(data).get("message", "")) or f"status {response.status}"
    if response.status == 404:
        raise FileNotFoundError(text)
    if response.status == 400:
        raise BadPath(text)
    if response.status == 507:
        raise DiskFull(text)
    _check(response, data, SandboxGone)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data) if data else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _retry_after(response: aiohttp.ClientResponse) -> float:
    try:
        return min(600.0, max(0.1, float(response.headers.get("Retry-After", "1"))))
    except ValueError:
        return 1.0
