"""The way in to sandboxes: which one a request is for, whether it may, whether the sandbox can answer now.

Owns: ``Gateway``, and ``Directory``: what it must know of the manager.

Must not know: how requests are answered inside, how sandboxes are made, placed, moved.

Guarantees: no request reaches a sandbox without the token that sandbox asks for; the answers to what cannot be reached
are those that E2B's clients tell apart; while a sandbox is pausing, resuming or moving a request waits, at most
``park_s`` and at most ``max_parked`` at once, and is then told so; nothing of a body is read before it is known where
it goes.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from multidict import CIMultiDict

from venusrl.sandboxes.agent.api import Stream
from venusrl.sandboxes.envd import answers, following
from venusrl.sandboxes.envd.door import INTERNAL
from venusrl.sandboxes.envd.signing import BadSignature, Signed, matches, verify
from venusrl.sandboxes.host.api import ENVD_PORT, Host, State
from venusrl.sandboxes.manager.errors import refused
from venusrl.sandboxes.manager.gateway_address import (
    ID_HEADER,
    PORT_HEADER,
    Address,
    BadAddress,
    address,
    is_shared,
    names_sandbox,
)
from venusrl.sandboxes.protocol import SandboxError, SandboxGone, SandboxMoving, SandboxPaused

ACCESS_HEADER = "X-Access-Token"
_OPEN = {("GET", "/health"), ("HEAD", "/health")}
_SIGNABLE = {("GET", "/files"), ("POST", "/files")}
_IN_TRANSIT: frozenset[State] = frozenset({"pausing", "resuming", "moving"})
_ATTEMPTS = 5
"""How often a sandbox may change hands under one request."""

_TURNS = 256
"""How often under one stream."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Route:
    """A sandbox as the gateway sees it. ``host`` None: it has none now (it moves, or is still being made)."""

    sandbox: str
    state: State
    host: Host | None
    envd_token: str = ""
    """Asked of requests for E2B's own services; "" = nobody asks."""
    traffic_token: str = ""
    """Asked of requests for other ports; "" = they are public."""
    wakes: bool = False
    """Whether traffic may resume it when paused."""
    mask_host: str = ""
    """What services inside see as Host, ``${PORT}`` being the port; "" = as it came."""


class Directory(Protocol):
    """What the manager tells the gateway."""

    def find(self, sandbox: str) -> Route | None:
        """None = there is none, or it has ended."""
        ...

    def secured(self) -> Iterable[tuple[str, str]]:
        """Id and access token of every living sandbox that has one: a signed URL may name none of them."""
        ...

    async def settled(self, sandbox: str) -> None:
        """Return once the sandbox is not pausing, resuming, moving or being made (at once if it is not)."""
        ...

    async def wake(self, sandbox: str) -> None:
        """Resume a paused sandbox because somebody talks to it. Raises SandboxGone, SandboxDenied, Refused."""
        ...

    async def disputed(self, sandbox: str, error: SandboxGone | SandboxPaused) -> None:
        """The route said it runs, its host says it does not (paused for memory's sake, moved, dead). Find out which:
        the next ``find`` is right, or says it is in transit."""
        ...


@dataclass(frozen=True)
class GatewayLimits:
    """``park_s``: how long a request waits for a sandbox in transit; ``max_parked``: how many may wait, in all."""

    park_s: float = 60.0
    max_parked: int = 4096


class Answered(Exception):
    """The request ends here, with ``response``."""

    def __init__(self, response: web.Response) -> None:
        super().__init__(response.status)
        self.response = response


class Gateway:
    """Answers requests meant for sandboxes."""

    def __init__(self, directory: Directory, limits: GatewayLimits | None = None) -> None:
        self._directory = directory
        self._limits = limits or GatewayLimits()
        self.parked = 0
        """How many requests wait now for a sandbox in transit."""
        self.counters: dict[str, float] = {"requests": 0, "refused": 0, "parked": 0, "woken": 0, "carried_on": 0}

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """For an application that serves both the control plane and sandboxes on one port."""
        if not self.is_for_sandbox(request):
            return await handler(request)
        return await self.handle(request)

    def is_for_sandbox(self, request: web.Request) -> bool:
        """Whether a request on a port that also serves the control plane is for a sandbox."""
        if ID_HEADER in request.headers or PORT_HEADER in request.headers:
            return True
        return names_sandbox(request.host) or _names_none(request)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        self.counters["requests"] += 1
        try:
            where = self.address_of(request)
            route = self._admitted(where, request)
            return await self._forwarded(request, where, route)
        except Answered as end:
            self.counters["refused"] += 1
            return end.response

    async def open(self, where: Address, headers: CIMultiDict[str]) -> Stream:
        """A raw connection to a port inside, for protocols that are not HTTP/1.1. Raises Answered."""
        self.counters["requests"] += 1
        if where.port == ENVD_PORT:
            raise Answered(answers.sandbox_answer(400, where.sandbox, "E2B's services speak HTTP/1.1 here"))
        self.permit(where, headers)
        for _ in range(_ATTEMPTS):
            host = await self._reachable(where)
            try:
                return await host.connect(where.sandbox, where.port)
            except (SandboxGone, SandboxPaused) as error:
                await self._directory.disputed(where.sandbox, error)
            except SandboxError:
                raise Answered(_port_closed(where)) from None
        raise Answered(self._unanswered(where))

    def permit(self, where: Address, headers: CIMultiDict[str]) -> None:
        """Check the traffic token that a port other than E2B's own asks for. Raises Answered."""
        route = self._directory.find(where.sandbox)
        if route is None:
            raise Answered(_not_found(where.sandbox))
        _check_traffic(route, headers.get(answers.TRAFFIC_HEADER))

    def address_of(self, request: web.Request) -> Address:
        """Raises Answered."""
        try:
            where = address(request.host, request.headers.get(ID_HEADER, ""), request.headers.get(PORT_HEADER, ""))
        except BadAddress as error:
            raise Answered(answers.error_answer(400, str(error))) from None
        if where is not None:
            return where
        if not _names_none(request):
            message = f"the request names no sandbox: send {ID_HEADER} and {PORT_HEADER}"
            raise Answered(answers.error_answer(400, message))
        return self._signed_for(request)

    def _signed_for(self, request: web.Request) -> Address:
        signed = _signed(request)
        for sandbox, token in self._directory.secured():
            if matches(signed, token):
                return Address(sandbox, ENVD_PORT)
        raise Answered(answers.error_answer(401, "invalid signature"))

    def _admitted(self, where: Address, request: web.Request) -> Route:
        route = self._directory.find(where.sandbox)
        if route is None:
            raise Answered(_not_found(where.sandbox))
        if where.port != ENVD_PORT:
            _check_traffic(route, request.headers.get(answers.TRAFFIC_HEADER))
        elif request.path in INTERNAL:
            raise Answered(answers.sandbox_answer(404, where.sandbox, f"{request.path} is not served"))
        else:
            _check_access(route, request)
        return route

    async def _forwarded(self, request: web.Request, where: Address, route: Route) -> web.StreamResponse:
        follow = following.begin(request) if where.port == ENVD_PORT else None
        answer = await self._sent(request, where, route)
        for _ in range(_TURNS):
            if follow is None or follow.parted is None:
                break
            # The client's stream waits, and goes on elsewhere.
            self.counters["carried_on"] += 1
            await self._directory.disputed(where.sandbox, SandboxMoving(f"sandbox {where.sandbox} moves"))
            try:
                answer = await self._sent(follow.turn(), where, route)
            except Answered as end:
                answer = end.response
            if answer is not follow.response:
                return await follow.end(answer)
        return answer if follow is None or follow.parted is None else await follow.end(_transitioning(where.sandbox))

    async def _sent(self, request: web.Request, where: Address, route: Route) -> web.StreamResponse:
        """To where it is. Raises Answered."""
        for _ in range(_ATTEMPTS):
            host = await self._reachable(where)
            sent = _masked(request, route, where.port)
            try:
                return await host.forward(sent, where.sandbox, where.port)
            except (SandboxGone, SandboxPaused) as error:
                await self._directory.disputed(where.sandbox, error)
                if _consumed(sent):
                    raise Answered(self._cut_off(where, host, error)) from None
            except SandboxError as error:
                return answers.sandbox_answer(502, where.sandbox, f"The sandbox could not be reached: {error}")
        raise Answered(self._unanswered(where))

    def _cut_off(self, where: Address, host: Host, error: SandboxError) -> web.Response:
        """A request of which something was taken already, so that it is the client's to send again."""
        route = self._directory.find(where.sandbox)
        if route is not None and (isinstance(error, SandboxMoving) or route.host is not host):
            return answers.sandbox_answer(409, where.sandbox, answers.MOVED, {"Retry-After": "1"})
        return self._unanswered(where)

    def _unanswered(self, where: Address) -> web.Response:
        """It was tried as often as is sensible, and its host would not have it."""
        route = self._directory.find(where.sandbox)
        if route is None:
            return _not_found(where.sandbox)
        # Running, says the manager: then what answers inside is what is missing.
        return _port_closed(where) if route.state == "running" else _transitioning(where.sandbox)

    async def _reachable(self, where: Address) -> Host:
        """Where the sandbox runs; waits while it is in transit and wakes it where traffic may. Raises Answered."""
        for _ in range(_ATTEMPTS):
            route = self._directory.find(where.sandbox)
            if route is None:
                break
            if route.state in _IN_TRANSIT or (route.state == "running" and route.host is None):
                await self._park(where.sandbox)
            elif route.state == "running" and route.host is not None:
                return route.host
            elif route.wakes:
                await self._wake(where.sandbox)
            else:
                break
        else:
            raise Answered(_transitioning(where.sandbox))
        raise Answered(_not_found(where.sandbox))

    async def _park(self, sandbox: str) -> None:
        if self.parked >= self._limits.max_parked:
            raise Answered(_transitioning(sandbox))
        self.parked += 1
        self.counters["parked"] += 1
        try:
            async with asyncio.timeout(self._limits.park_s):
                await self._directory.settled(sandbox)
        except TimeoutError:
            raise Answered(_transitioning(sandbox)) from None
        finally:
            self.parked -= 1

    async def _wake(self, sandbox: str) -> None:
        self.counters["woken"] += 1
        try:
            async with asyncio.timeout(self._limits.park_s):
                await self._directory.wake(sandbox)
        except TimeoutError:
            raise Answered(_transitioning(sandbox)) from None
        except SandboxGone:
            raise Answered(_not_found(sandbox)) from None
        except SandboxError as error:
            answer = refused(error)
            wait = {} if answer.retry_after_s is None else {"Retry-After": str(max(1, round(answer.retry_after_s)))}
            raise Answered(answers.sandbox_answer(answer.status, sandbox, str(answer), wait)) from None


def _names_none(request: web.Request) -> bool:
    """A signed URL made under one base URL for all sandboxes: nothing but its signature says whose it is."""
    if (request.method, request.path) not in _SIGNABLE or "signature" not in request.query:
        return False
    return is_shared(request.host) and ID_HEADER not in request.headers


def _signed(request: web.Request) -> Signed:
    query = request.query
    return Signed(
        path=query.get("path", ""),
        operation="read" if request.method == "GET" else "write",
        user=query.get("username", ""),
        signature=query.get("signature", ""),
        expiration=query.get("signature_expiration", ""),
    )


def _check_access(route: Route, request: web.Request) -> None:
    if not route.envd_token or (request.method, request.path) in _OPEN:
        return
    signable = (request.method, request.path) in _SIGNABLE
    given = request.headers.get(ACCESS_HEADER)
    if given is not None or not signable:
        if given is None or not _same(given, route.envd_token):
            raise Answered(_unauthorized(request.path))
        return
    try:
        verify(_signed(request), route.envd_token, time.time())
    except BadSignature as error:
        raise Answered(answers.error_answer(401, str(error))) from None


def _unauthorized(path: str) -> web.Response:
    if path.startswith(("/process.Process/", "/filesystem.Filesystem/")):
        return web.json_response({"code": "unauthenticated", "message": answers.UNAUTHORIZED}, status=401)
    return answers.error_answer(401, answers.UNAUTHORIZED)


def _check_traffic(route: Route, given: str | None) -> None:
    if not route.traffic_token:
        return
    if not given:
        raise Answered(answers.sandbox_answer(403, route.sandbox, answers.NO_TRAFFIC_TOKEN))
    if not _same(given, route.traffic_token):
        raise Answered(answers.sandbox_answer(403, route.sandbox, answers.BAD_TRAFFIC_TOKEN))


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


def _masked(request: web.Request, route: Route, port: int) -> web.Request:
    if not route.mask_host or port == ENVD_PORT:
        return request
    headers = request.headers.copy()
    headers["Host"] = route.mask_host.replace("${PORT}", str(port))
    return request.clone(headers=headers)


def _consumed(request: web.Request) -> bool:
    """Whether something of the body was taken already, so that it cannot be sent again."""
    if (follow := following.of(request)) is not None and follow.message:
        return False
    # aiohttp tells what arrived (total_bytes); what was taken of it only its cursor knows.
    return bool(getattr(request.content, "_cursor", 0))


def _not_found(sandbox: str) -> web.Response:
    return answers.sandbox_answer(502, sandbox, answers.NOT_FOUND)


def _transitioning(sandbox: str) -> web.Response:
    return answers.sandbox_answer(409, sandbox, answers.TRANSITIONING, {"Retry-After": "1"})


def _port_closed(where: Address) -> web.Response:
    return answers.sandbox_answer(502, where.sandbox, answers.PORT_CLOSED, port=where.port)
