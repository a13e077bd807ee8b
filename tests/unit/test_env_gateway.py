"""The way in: which sandbox, which token, what is said when it cannot answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast
from urllib.parse import quote

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.env_front import TOKEN, Front, MemoryHost, front
from tests.waiting import until

from venusrl.sandboxes.envd.signing import BadSignature, Signed, signature, verify
from venusrl.sandboxes.host.api import Host
from venusrl.sandboxes.manager.errors import TooMany
from venusrl.sandboxes.manager.gateway import GatewayLimits
from venusrl.sandboxes.manager.gateway_address import Address, BadAddress, address, is_shared
from venusrl.sandboxes.protocol import SandboxDenied, SandboxError, SandboxGone, SandboxMoving

FEW = settings(max_examples=40)
ID = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=20)
PORT = st.integers(1, 65535)


@FEW
@given(ID, PORT)
def test_a_host_names_a_sandbox(sandbox: str, port: int) -> None:
    assert address(f"{port}-{sandbox}.example.test:443", "", "") == Address(sandbox, port)


@FEW
@given(ID, PORT, ID, PORT)
def test_headers_do_not_count_where_the_host_names_a_sandbox(sandbox: str, port: int, other: str, wrong: int) -> None:
    assert address(f"{port}-{sandbox}.example.test", other, str(wrong)) == Address(sandbox, port)
    for shared in ("localhost:3000", "127.0.0.1", "[::1]:3000", "10.0.0.7:80", "sandbox.example.test"):
        assert address(shared, other, str(wrong)) == Address(other, wrong)
        assert address(shared, "", "") is None


@FEW
@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=10))
def test_whatever_comes_is_an_address_or_refused(host: str, sandbox: str, port: str) -> None:
    try:
        found = address(host, sandbox, port)
    except BadAddress:
        return
    assert found is None or (0 < found.port < 65536 and found.sandbox.isalnum())


def test_hosts_that_name_nothing() -> None:
    for host in (
        "example.test",
        "3000.example.test",
        "x-y.example.test",
        "0-a.example.test",
        "70000-a.b",
        "1-A..",
        "1-a",
    ):
        if host == "1-A..":
            assert address(host, "", "") == Address("a", 1)
            continue
        with pytest.raises(BadAddress):
            address(host, "a", "1")
    with pytest.raises(BadAddress, match="missing header E2b-Sandbox-Id"):
        address("localhost", "", "1")
    assert not is_shared("sandbox.")


@FEW
@given(st.text(), st.sampled_from(["read", "write"]), st.text(), st.text(min_size=1), st.integers(0, 2**40))
def test_what_was_signed_verifies_until_it_expires(path: str, operation: Any, user: str, token: str, end: int) -> None:
    for expiration in ("", str(end)):
        made = signature(path, operation, user, token, expiration)
        verify(Signed(path, operation, user, made, expiration), token, end)
        with pytest.raises(BadSignature, match="invalid"):
            verify(Signed(path + "x", operation, user, made, expiration), token, end)
        with pytest.raises(BadSignature, match="invalid"):
            verify(Signed(path, operation, user, made, expiration), token + "x", end)
    with pytest.raises(BadSignature, match="already expired"):
        verify(Signed(path, operation, user, made, str(end)), token, end + 1)
    with pytest.raises(BadSignature, match="missing"):
        verify(Signed(path, operation, user, ""), token, 0)


async def get(it: Front, path: str, headers: dict[str, str], method: str = "GET") -> tuple[int, Any]:
    async with it.http.request(method, it.url + path, headers=headers) as answer:
        return answer.status, await (answer.json() if answer.content_type == "application/json" else answer.read())


async def test_the_control_plane_is_left_alone() -> None:
    async with front() as it:
        assert await get(it, "/sandboxes", {}) == (200, {"control": "/sandboxes"})
        assert await get(it, "/files?path=x", {}) == (200, {"control": "/files"})
        assert await get(it, "/health", {"Host": "api.example.test"}) == (200, {"control": "/health"})


async def test_what_is_not_there_is_said_in_e2b_s_words() -> None:
    async with front() as it:
        status, answer = await get(it, "/health", it.headers(49983, "nobody"))
        assert (status, answer) == (
            502,
            {"sandboxId": "nobody", "message": "The sandbox was not found", "code": 502},
        )
        status, answer = await get(it, "/", it.headers(8000))
        assert (status, answer["message"], answer["port"]) == (
            502,
            "The sandbox is running but port is not open",
            8000,
        )
        assert (await get(it, "/", {"Host": "x-y.example.test", "E2b-Sandbox-Port": "1"}))[0] == 400
        it.register.set(it.id, state="paused")
        assert "was not found" in (await get(it, "/health", it.headers()))[1]["message"]


async def test_tokens_forged_missing_and_right() -> None:
    async with front() as it:
        for given in ({}, {"X-Access-Token": ""}, {"X-Access-Token": TOKEN[:-1]}, {"X-Access-Token": TOKEN + "é"}):
            headers = {name: value for name, value in it.headers().items() if name != "X-Access-Token"} | given
            assert (await get(it, "/metrics", headers))[0] == 401
            assert (await get(it, "/health", headers))[0] == 204
            async with it.http.post(f"{it.url}/process.Process/List", json={}, headers=headers) as answer:
                assert (answer.status, (await answer.json())["code"]) == (401, "unauthenticated")
        assert (await get(it, "/metrics", it.headers()))[0] == 200
        assert it.host.forwarded[-1].path == "/metrics"
        assert len(it.host.forwarded) == 5
        for path in ("/init", "/freeze", "/fsthaw"):
            assert (await get(it, path, it.headers(), "POST"))[0] == 404


async def test_a_token_of_one_sandbox_opens_no_other() -> None:
    async with front() as it:
        it.add("other", envd_token="another-token")
        assert (await get(it, "/metrics", it.headers(49983, "other")))[0] == 401


async def test_private_ports_ask_for_the_traffic_token() -> None:
    async with front() as it:
        it.register.set(it.id, traffic_token="secret")
        status, answer = await get(it, "/", it.headers(8000))
        assert (status, answer["code"], "is missing" in answer["message"]) == (403, 403, True)
        status, answer = await get(it, "/", it.headers(8000, e2b_traffic_access_token="wrong"))
        assert (status, "is invalid" in answer["message"]) == (403, True)
        assert (await get(it, "/", it.headers(8000, e2b_traffic_access_token="secret")))[0] == 502
        assert (await get(it, "/metrics", it.headers()))[0] == 200


def signed_query(path: str, token: str, operation: Any = "read", expiration: str = "") -> str:
    made = signature(path, operation, "user", token, expiration)
    end = f"&signature_expiration={expiration}" if expiration else ""
    return f"/files?path={quote(path)}&username=user&signature={quote(made, safe='')}{end}"


async def test_signed_urls_with_and_without_a_sandbox() -> None:
    async with front() as it:
        other = it.add("other", envd_token="another-token")
        now = int(time.time())
        headers = {"Content-Type": "application/octet-stream"}
        url = it.url + signed_query("f", "another-token", "write", str(now + 60))
        async with it.http.post(url, data=b"data", headers=headers) as answer:
            assert answer.status == 200
        assert other.nodes["/home/user/f"].data == b"data"
        named = {"Host": "49983-other.example.test"}
        for headers in ({}, named):
            assert await get(it, signed_query("f", "another-token"), headers) == (200, b"data")
            assert await get(it, signed_query("f", "another-token", expiration=str(now - 9)), headers) == (
                401,
                {"code": 401, "message": "signature is already expired"},
            )
            for forged in (signed_query("f", "no-such-token"), signed_query("f", "another-token", "write")):
                assert (await get(it, forged, headers))[0] == 401
        assert (await get(it, "/files?path=f", named))[1]["message"] == "missing signature query parameter"
        assert (await get(it, signed_query("f", TOKEN), named))[0] == 401


async def test_requests_wait_while_a_sandbox_moves() -> None:
    async with front() as it:
        it.register.set(it.id, state="moving", host=None)
        waiting = asyncio.create_task(get(it, "/metrics", it.headers()))
        await until(lambda: it.gateway.parked > 0, "the request's waiting")
        it.register.set(it.id, state="running", host=it.host)
        it.register.moved.set()
        assert (await waiting)[0] == 200
        assert it.gateway.parked == 0


async def test_waiting_is_bounded_in_time_and_number() -> None:
    for limits in (GatewayLimits(park_s=0.02), GatewayLimits(max_parked=0)):
        async with front(limits) as it:
            it.register.set(it.id, state="pausing")
            status, answer = await get(it, "/metrics", it.headers())
            assert (status, answer["message"]) == (
                409,
                "The sandbox is still transitioning. Try again in a moment.",
            )


async def test_traffic_wakes_what_may_be_woken() -> None:
    async with front() as it:
        it.register.set(it.id, state="paused", wakes=True)
        assert (await get(it, "/metrics", it.headers()))[0] == 200
        cases: list[tuple[SandboxError, int]] = [
            (TooMany("quota"), 429),
            (SandboxDenied("full", 3.0), 503),
            (SandboxGone("gone"), 502),
        ]
        for error, status in cases:
            it.register.set(it.id, state="paused")
            it.register.on_wake = error
            async with it.http.get(f"{it.url}/metrics", headers=it.headers()) as answer:
                assert answer.status == status
                assert answer.headers.get("Retry-After") == ("3" if status == 503 else None)


async def test_a_forged_request_wakes_nothing() -> None:
    async with front() as it:
        it.register.set(it.id, state="paused", wakes=True)
        assert (await get(it, "/metrics", it.headers() | {"X-Access-Token": "forged"}))[0] == 401
        assert it.register.routes[it.id].state == "paused"


async def test_a_sandbox_that_its_host_does_not_have_is_disputed() -> None:
    async with front() as it:
        it.host.paused.add(it.id)
        assert (await get(it, "/metrics", it.headers()))[0] == 502
        assert it.register.disputes == [it.id]


async def test_a_sandbox_that_runs_and_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def undecided(sandbox: str, error: Exception) -> None:
        return None

    async with front() as it:
        it.host.paused.add(it.id)
        monkeypatch.setattr(it.register, "disputed", undecided)
        status, answer = await get(it, "/metrics", it.headers())
        assert (status, answer["port"]) == (502, 49983)
        assert "port is not open" in answer["message"]


@pytest.mark.parametrize(
    ("error", "goes", "status"),
    [
        (SandboxMoving("it goes on elsewhere"), False, 409),
        (SandboxGone("a node that it left says no more"), True, 409),
        (SandboxGone("it is not here"), False, 502),
    ],
)
async def test_an_upload_that_a_move_cuts_is_to_be_sent_again(
    monkeypatch: pytest.MonkeyPatch, error: SandboxGone, goes: bool, status: int
) -> None:
    """Not taken for a closed port; nothing of it reaches the next host by itself."""
    asked: list[str] = []

    async def cut(request: web.Request, sandbox: str, port: int) -> web.StreamResponse:
        asked.append(sandbox)
        await request.content.readexactly(5)
        raise error

    async def settled(sandbox: str, error: Exception) -> None:
        if goes:
            it.register.set(sandbox, host=cast(Host, MemoryHost()))

    async with front() as it:
        monkeypatch.setattr(it.host, "forward", cut)
        monkeypatch.setattr(it.register, "disputed", settled)
        async with it.http.post(f"{it.url}/files?path=x", data=b"12345678", headers=it.headers()) as answer:
            assert answer.status == status
            assert answer.headers.get("Retry-After") == ("1" if status == 409 else None)
            said = await answer.json()
            assert ("moved" if status == 409 else "port is not open") in said["message"]
        assert asked == [it.id]


async def test_services_inside_may_see_another_host() -> None:
    async with front() as it:
        it.register.set(it.id, mask_host="inner.test:${PORT}")
        await get(it, "/", it.headers(8000))
        assert it.host.forwarded[-1].headers["Host"] == "inner.test:8000"
