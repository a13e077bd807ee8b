"""E2B's control plane over a fake host: what each call answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args
from urllib.parse import quote, urlencode

import pytest
from tests.unit.environments import Environment, environment, fake_hosts

from venusrl.sandboxes.agent.api import AgentError, Code
from venusrl.sandboxes.host import wire
from venusrl.sandboxes.manager.errors import refused
from venusrl.sandboxes.protocol import HostDiskFull, SandboxDenied, SandboxError
from venusrl.testing.clock import VirtualClock


@pytest.fixture
async def env(tmp_path: Path) -> AsyncIterator[Environment]:
    async with environment(tmp_path) as made:
        yield made


async def test_create_answers_as_e2b_does(env: Environment) -> None:
    status, answer, _ = await env.call(
        "POST", "/v2/sandboxes", {"templateID": "base", "metadata": {"a": "b"}, "envVars": {"X": "1"}, "unknown": 1}
    )
    assert status == 201
    assert answer["templateID"] == "base-id"
    assert answer["alias"] == "base"
    assert answer["envdVersion"] == "0.6.13"
    assert answer["envdAccessToken"] == env.service.secret.envd_token(answer["sandboxID"])
    assert answer["trafficAccessToken"] is None
    made = env.hosts[0].sandboxes[answer["sandboxID"]]
    assert made.order.env == {"X": "1"}
    assert made.order.network.internet is False


async def test_the_older_create_has_a_token_only_when_asked(env: Environment) -> None:
    _, plain, _ = await env.call("POST", "/sandboxes", {"templateID": "base"})
    _, secure, _ = await env.call("POST", "/sandboxes", {"templateID": "base", "secure": True})
    assert "envdAccessToken" not in plain
    assert secure["envdAccessToken"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "templateID"),
        ({"templateID": "base", "timeout": "300"}, "timeout"),
        ({"templateID": "base", "timeout": -1}, "timeout"),
        ({"templateID": "base", "timeout": 10**9}, "timeout"),
        ({"templateID": "base", "volumeMounts": [{"name": "v", "path": "/v"}]}, "volumeMounts"),
        ({"templateID": "base", "network": {"egressProxy": {"address": "a:1"}}}, "egressProxy"),
        ({"templateID": "base", "network": {"denyOut": ["example.com"]}}, "denyOut"),
        ({"templateID": "base", "network": {"allowOut": ["not a host"]}}, "allowOut"),
        ({"templateID": "base", "network": {"allowOut": ["example.com"]}}, "denyOut"),
        ({"templateID": "base", "autoResume": {"enabled": True}}, "autoPause"),
        ({"templateID": "base", "metadata": {"venusrl.priority": "much"}}, "priority"),
        ({"templateID": "base", "envVars": {"A=B": "1"}}, "envVars"),
    ],
)
async def test_what_is_wrong_or_not_supported_is_refused_by_name(
    env: Environment, body: dict[str, object], word: str
) -> None:
    status, answer, _ = await env.call("POST", "/v2/sandboxes", body)
    assert (status, answer["code"]) == (400, 400)
    assert word in answer["message"]
    assert env.hosts[0].sandboxes == {}
    assert env.book.records == {}


async def test_an_unknown_template_is_404(env: Environment) -> None:
    status, answer, _ = await env.call("POST", "/v2/sandboxes", {"templateID": "nowhere"})
    assert (status, answer["code"]) == (404, 404)


async def test_keys_are_asked_for_and_tenants_do_not_see_each_other(env: Environment) -> None:
    sandbox = await env.create()
    for given, expected in (("", 401), ("e2b_" + "0" * 40, 401)):
        assert (await env.call("GET", "/v2/sandboxes", key=given))[0] == expected
    _, other = env.new_key("other")
    for method, path, body in (
        ("GET", f"/sandboxes/{sandbox}", None),
        ("DELETE", f"/sandboxes/{sandbox}", None),
        ("POST", f"/sandboxes/{sandbox}/pause", {}),
        ("POST", f"/v2/sandboxes/{sandbox}/connect", {}),
        ("POST", f"/sandboxes/{sandbox}/timeout", {"timeout": 5}),
        ("POST", f"/sandboxes/{sandbox}/fork", {}),
        ("POST", f"/sandboxes/{sandbox}/snapshots", {}),
        ("PUT", f"/sandboxes/{sandbox}/network", {}),
        ("GET", f"/sandboxes/{sandbox}/metrics", None),
        ("GET", f"/v2/sandboxes/{sandbox}/logs", None),
    ):
        assert (await env.call(method, path, body, key=other))[0] == 404, (method, path)
    assert (await env.call("GET", "/v2/sandboxes", key=other))[1] == []
    assert sandbox in env.hosts[0].sandboxes
    _, answer, _ = await env.call("GET", f"/sandboxes/metrics?sandbox_ids={sandbox}", key=other)
    assert answer == {"sandboxes": {}}


async def test_a_revoked_key_is_refused_at_once_and_bearer_works(env: Environment) -> None:
    key, text = env.new_key("short")
    assert (await env.call("GET", "/v2/sandboxes", key=text))[0] == 200
    assert (await env.call("GET", "/v2/sandboxes", key="", Authorization=f"Bearer {text}"))[0] == 200
    env.store.remove_key(key.id)
    assert (await env.call("GET", "/v2/sandboxes", key=text))[0] == 401


async def test_the_quota_counts_what_is_being_created_too(env: Environment) -> None:
    _, text = env.new_key("small", max_sandboxes=2)
    host = env.hosts[0]
    host.gate = asyncio.Event()
    body = {"templateID": "base"}
    tasks = [asyncio.create_task(env.call("POST", "/v2/sandboxes", body, key=text)) for _ in range(5)]
    refusals = asyncio.as_completed(tasks)
    for _ in range(3):
        assert (await next(refusals))[0] == 429  # while the other two still wait for their host
    host.gate.set()
    answers = [await task for task in tasks]
    assert sorted(status for status, _, _ in answers) == [201, 201, 429, 429, 429]
    refused = next(headers for status, _, headers in answers if status == 429)
    assert int(refused["Retry-After"]) >= 1
    first = next(answer["sandboxID"] for status, answer, _ in answers if status == 201)
    assert (await env.call("POST", f"/sandboxes/{first}/pause", {}, key=text))[0] == 204
    assert (await env.call("POST", "/v2/sandboxes", body, key=text))[0] == 201
    assert (await env.call("POST", f"/v2/sandboxes/{first}/connect", {}, key=text))[0] == 429


async def test_the_rate_of_creation_is_limited(env: Environment) -> None:
    _, text = env.new_key("slow", creates_per_minute=2)
    statuses = [(await env.call("POST", "/v2/sandboxes", {"templateID": "base"}, key=text))[0] for _ in range(3)]
    assert statuses == [201, 201, 429]
    await env.clock.run_for(31)
    assert (await env.call("POST", "/v2/sandboxes", {"templateID": "base"}, key=text))[0] == 201


async def test_no_room_is_503_with_retry_after(env: Environment) -> None:
    env.admission.most = 0
    status, answer, headers = await env.call("POST", "/v2/sandboxes", {"templateID": "base"})
    assert (status, answer["error_code"]) == (503, "sandbox_capacity_unavailable")
    assert headers["Retry-After"] == "2"
    assert headers["Should-Retry"] == "true"
    assert env.book.records == {}


@pytest.mark.parametrize("error", [SandboxDenied("full", 3.0), HostDiskFull("no space")])
async def test_what_one_host_refuses_another_may_take(tmp_path: Path, error: SandboxError) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock) as env:
        hosts[0].fail("create", error)
        sandbox = await env.create()
        assert sandbox in hosts[1].sandboxes
        hosts[0].fail("create", error)
        hosts[1].fail("create", error)
        status, _, headers = await env.call("POST", "/v2/sandboxes", {"templateID": "base"})
        assert status == 503
        assert "Retry-After" in headers


async def test_pause_connect_resume(env: Environment) -> None:
    sandbox = await env.create()
    assert (await env.call("POST", f"/sandboxes/{sandbox}/resume", {}))[0] == 409
    assert (await env.call("POST", f"/sandboxes/{sandbox}/pause"))[0] == 204
    assert (await env.call("POST", f"/sandboxes/{sandbox}/pause", {}))[0] == 409
    assert (await env.call("GET", f"/sandboxes/{sandbox}"))[1]["state"] == "paused"
    status, answer, _ = await env.call("POST", f"/v2/sandboxes/{sandbox}/connect", {"timeout": 60})
    assert (status, answer["sandboxID"]) == (201, sandbox)
    assert (await env.call("POST", f"/sandboxes/{sandbox}/connect", {"timeout": 60}))[0] == 200
    assert (await env.call("POST", f"/sandboxes/{sandbox}/pause", {"memory": False}))[0] == 204
    assert (await env.call("GET", f"/sandboxes/{sandbox}"))[1]["pauseMode"] == "filesystem"
    assert (await env.call("POST", f"/sandboxes/{sandbox}/resume", {"timeout": 60}))[0] == 201


async def test_a_reboot_drops_the_memory_and_keeps_the_id(env: Environment) -> None:
    sandbox = await env.create()
    await env.call("POST", f"/sandboxes/{sandbox}/pause", {})
    assert (await env.call("POST", f"/v2/sandboxes/{sandbox}/connect", {"memory": False}))[0] == 201
    host = env.hosts[0]
    assert [call for call, subject in host.calls if subject == sandbox][-3:] == ["resume", "pause", "resume"]
    assert host.sandboxes[sandbox].memory_kept is False


async def test_an_unhealthy_sandbox_is_not_paused_when_that_is_asked_for(env: Environment) -> None:
    sandbox = await env.create()
    env.hosts[0].fail("usage", SandboxError("it hangs"))
    status, answer, _ = await env.call("POST", f"/sandboxes/{sandbox}/pause", {"requireHealthyGuest": True})
    assert (status, answer["error_code"]) == (409, "sandbox_snapshot_guest_agent_unresponsive")
    assert env.book.records[sandbox].state == "running"


async def test_kill_is_204_then_404(env: Environment) -> None:
    sandbox = await env.create()
    assert (await env.call("DELETE", f"/sandboxes/{sandbox}"))[0] == 204
    assert (await env.call("DELETE", f"/sandboxes/{sandbox}"))[0] == 404
    assert env.hosts[0].sandboxes == {}
    _, answer, _ = await env.call("GET", f"/v2/sandboxes/{sandbox}/logs")
    assert [line["message"] for line in answer["logs"]][-1].startswith("sandbox ended")


async def test_pages_neither_repeat_nor_lose_what_was_there_throughout(env: Environment) -> None:
    made = [await env.create() for _ in range(5)]
    seen: list[str] = []
    token = ""
    for _ in range(3):
        _, page, headers = await env.call("GET", f"/v2/sandboxes?limit=2&nextToken={token}")
        seen += [one["sandboxID"] for one in page]
        token = headers.get("X-Next-Token", "")
        await env.create()  # newer than any page to come
        await env.call("DELETE", f"/sandboxes/{seen[-1]}")  # the very place where the next page begins
    assert seen == made[::-1]
    assert token == ""


async def test_list_filters_and_orders(env: Environment) -> None:
    made = [await env.create(metadata={"n": str(n), "odd one": "a&b=c"}) for n in range(5)]
    await env.call("POST", f"/sandboxes/{made[1]}/pause", {})
    assert (await env.call("GET", "/v2/sandboxes?limit=1"))[2]["X-Total-Running"] == "4"
    # As E2B's clients send it: every key and value quoted, the whole a form, the form a parameter.
    quoted = quote(urlencode({quote("odd one"): quote("a&b=c"), "n": "3"}), safe="")
    assert [one["sandboxID"] for one in (await env.call("GET", f"/v2/sandboxes?metadata={quoted}"))[1]] == [made[3]]
    _, paused, _ = await env.call("GET", "/v2/sandboxes?state=paused")
    assert [one["sandboxID"] for one in paused] == [made[1]]
    _, ascending, _ = await env.call("GET", "/v2/sandboxes?order=asc&state=running,paused")
    assert ascending[0]["sandboxID"] == made[0]
    started = ascending[2]["startedAt"]
    _, later, _ = await env.call("GET", f"/v2/sandboxes?order=asc&startedAfter={quote(started)}")
    assert later[0]["sandboxID"] == ascending[2]["sandboxID"]
    assert (await env.call("GET", "/v2/sandboxes?template=other"))[1] == []
    assert len((await env.call("GET", "/v2/sandboxes?template=base"))[1]) == 5
    _, v1, _ = await env.call("GET", "/sandboxes")
    assert made[1] not in [one["sandboxID"] for one in v1]


async def test_page_tokens_cannot_be_made_up_nor_moved(env: Environment) -> None:
    for _ in range(3):
        await env.create()
    _, _, headers = await env.call("GET", "/v2/sandboxes?limit=1")
    token = headers["X-Next-Token"]
    forged = token[:-4] + ("AAAA" if token[-4:] != "AAAA" else "BBBB")
    for path in (f"limit=1&nextToken={forged}", f"limit=1&order=asc&nextToken={token}", "nextToken=%00", "limit=0"):
        assert (await env.call("GET", f"/v2/sandboxes?{path}"))[0] == 400, path
    _, other = env.new_key("other")
    assert (await env.call("GET", f"/v2/sandboxes?limit=1&nextToken={token}", key=other))[0] == 400


async def test_timeouts_refreshes_and_their_ends(env: Environment) -> None:
    sandbox = await env.create(timeout=100)

    def left() -> float:
        return env.book.records[sandbox].ends - env.clock.time()

    assert (await env.call("POST", f"/sandboxes/{sandbox}/timeout", {"timeout": 50}))[0] == 204
    assert left() == pytest.approx(50)
    await env.call("POST", f"/v2/sandboxes/{sandbox}/connect", {"timeout": 10})
    assert left() == pytest.approx(50)
    await env.call("POST", f"/v2/sandboxes/{sandbox}/connect", {})
    assert left() == pytest.approx(300)
    assert (await env.call("POST", f"/sandboxes/{sandbox}/refreshes", {"duration": 600}))[0] == 204
    assert left() == pytest.approx(600)
    assert (await env.call("POST", f"/sandboxes/{sandbox}/refreshes", {"duration": 9999}))[0] == 400
    assert (await env.call("POST", f"/sandboxes/{sandbox}/timeout", {}))[0] == 400
    await env.clock.run_for(601)
    await settle(env, sandbox)
    assert (await env.call("GET", f"/sandboxes/{sandbox}"))[0] == 404


async def settle(env: Environment, sandbox: str) -> None:
    """Let what was begun end."""
    for _ in range(100):
        await asyncio.sleep(0)
        if sandbox not in env.book.records:
            return


async def test_snapshots_live_longer_than_their_sandbox(env: Environment) -> None:
    sandbox = await env.create()
    env.hosts[0].sandboxes[sandbox].files["/x"] = b"kept"
    status, first, _ = await env.call("POST", f"/sandboxes/{sandbox}/snapshots", {"name": "good"})
    assert status == 201
    assert first["names"] == ["good"]
    _, second, _ = await env.call("POST", f"/sandboxes/{sandbox}/snapshots", {})
    await env.call("DELETE", f"/sandboxes/{sandbox}")
    _, listed, headers = await env.call("GET", "/snapshots?limit=1")
    assert [one["snapshotID"] for one in listed] == [second["snapshotID"]]
    _, rest, headers = await env.call("GET", f"/snapshots?limit=1&nextToken={headers['X-Next-Token']}")
    assert [one["snapshotID"] for one in rest] == [first["snapshotID"]]
    assert "X-Next-Token" not in headers
    assert len((await env.call("GET", f"/snapshots?sandboxID={sandbox}"))[1]) == 2
    assert len((await env.call("GET", "/snapshots?name=good"))[1]) == 1
    for template in (first["snapshotID"], "good"):
        _, made, _ = await env.call("POST", "/v2/sandboxes", {"templateID": template})
        assert env.hosts[0].sandboxes[made["sandboxID"]].files == {"/x": b"kept"}
    _, other = env.new_key("other")
    assert (await env.call("POST", "/v2/sandboxes", {"templateID": first["snapshotID"]}, key=other))[0] == 404
    assert (await env.call("DELETE", f"/templates/{first['snapshotID']}", key=other))[0] == 404
    assert (await env.call("DELETE", f"/templates/{first['snapshotID']}"))[0] == 204
    assert (await env.call("DELETE", f"/templates/{first['snapshotID']}"))[0] == 404
    assert list(env.hosts[0].snapshots) == [second["snapshotID"]]


async def test_forks_succeed_or_fail_one_by_one(env: Environment) -> None:
    sandbox = await env.create(metadata={"who": "me"}, timeout=77)
    env.hosts[0].sandboxes[sandbox].files["/x"] = b"kept"
    env.hosts[0].fail("create", SandboxError("this one not"))
    status, results, _ = await env.call("POST", f"/sandboxes/{sandbox}/fork", {"count": 3, "timeout": 60})
    assert status == 201
    made = [one["sandbox"]["sandboxID"] for one in results if "sandbox" in one]
    failed = [one["error"] for one in results if "error" in one]
    assert len(made) == 2
    assert failed == [{"code": 500, "message": "this one not"}]
    for one in made:
        assert env.hosts[0].sandboxes[one].files == {"/x": b"kept"}
        record = env.book.records[one]
        assert (record.metadata, record.template) == ({"who": "me"}, "base-id")
        assert record.ends - env.clock.time() == pytest.approx(60, abs=1)
    assert env.hosts[0].snapshots == {}
    for count in (0, 21):
        assert (await env.call("POST", f"/sandboxes/{sandbox}/fork", {"count": count}))[0] == 400
    await env.call("POST", f"/sandboxes/{sandbox}/pause", {})
    assert (await env.call("POST", f"/sandboxes/{sandbox}/fork", {}))[0] == 409


async def test_network_changes_reach_the_host(env: Environment) -> None:
    sandbox = await env.create(network={"allowPublicTraffic": False})
    body = {"allowOut": ["1.1.1.1"], "denyOut": ["0.0.0.0/0"], "allow_internet_access": True}
    assert (await env.call("PUT", f"/sandboxes/{sandbox}/network", body))[0] == 204
    network = env.hosts[0].sandboxes[sandbox].network
    assert (network.internet, network.allow, network.deny) == (True, ("1.1.1.1",), ("0.0.0.0/0",))
    _, shown, _ = await env.call("GET", f"/sandboxes/{sandbox}")
    assert shown["network"] == {"allowPublicTraffic": False, "allowOut": ["1.1.1.1"], "denyOut": ["0.0.0.0/0"]}
    assert (await env.call("PUT", f"/sandboxes/{sandbox}/network", {"rules": {"a": []}}))[0] == 400


async def test_metrics_are_sampled_and_asked_for(env: Environment) -> None:
    sandbox = await env.create()
    await env.clock.run_for(12)
    _, samples, _ = await env.call("GET", f"/sandboxes/{sandbox}/metrics")
    assert len(samples) >= 2
    assert samples[-1]["memTotal"] == 512 << 20
    end = samples[0]["timestampUnix"]
    _, first, _ = await env.call("GET", f"/sandboxes/{sandbox}/metrics?end={end}")
    assert len(first) < len(samples)
    _, several, _ = await env.call("GET", f"/sandboxes/metrics?sandbox_ids={sandbox},other")
    assert list(several["sandboxes"]) == [sandbox]
    assert (await env.call("GET", f"/sandboxes/metrics?sandbox_ids={sandbox},{sandbox}"))[0] == 400


async def test_logs_tell_what_happened(env: Environment) -> None:
    sandbox = await env.create()
    await env.call("POST", f"/sandboxes/{sandbox}/pause", {})
    _, old, _ = await env.call("GET", f"/sandboxes/{sandbox}/logs")
    assert [one["line"].split(" on ")[0] for one in old["logs"]] == ["sandbox created", "sandbox paused (user)"]
    _, new, _ = await env.call("GET", f"/v2/sandboxes/{sandbox}/logs?direction=backward&limit=1&search=paused")
    assert [one["message"] for one in new["logs"]] == ["sandbox paused (user)"]
    assert (await env.call("GET", f"/v2/sandboxes/{sandbox}/logs?level=error"))[1] == {"logs": []}
    assert (await env.call("GET", f"/v2/sandboxes/{sandbox}/logs?level=loud"))[0] == 400


async def test_routes_that_are_not_there_answer_in_json(env: Environment) -> None:
    status, answer, _ = await env.call("GET", "/nowhere")
    assert (status, answer["code"]) == (404, 404)
    assert (await env.call("GET", "/health"))[0] == 200
    _, text, _ = await env.call("GET", "/metrics")
    assert b"venusrl_env_request_seconds" in text
    assert b'venusrl_env_node_up{node="host-1"} 1.0' in text


async def test_faults_of_ours_tell_nothing_of_the_inside(env: Environment) -> None:
    env.hosts[0].fail("create", ZeroDivisionError("secret path"))
    status, answer, _ = await env.call("POST", "/v2/sandboxes", {"templateID": "base"})
    assert status == 500
    assert "secret path" not in answer["message"]
    assert env.book.records == {}


def test_every_failure_of_a_host_has_a_status_of_its_own() -> None:
    """500 is for faults of ours, and for what an agent or a build says of itself."""
    for code in get_args(Code):
        assert (refused(AgentError(code, "x")).status == 500) == (code == "internal"), code
    for kind in wire._PLAIN.values():
        assert refused(kind("x")).status != 500, kind
