"""E2B's template routes over a real template store without a runtime."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from tests.unit.environments import ADMIN, JOIN, Environment, environment

from venusrl.sandboxes.manager import app
from venusrl.sandboxes.templates.service import Templates

HASH = "a" * 64


@pytest.fixture
async def env(tmp_path: Path) -> AsyncIterator[Environment]:
    async with environment(tmp_path) as made:
        templates = Templates(tmp_path / "templates")
        await templates.start()
        server = app.build(made.service, admin_key=ADMIN, join_key=JOIN, templates=templates)
        async with TestClient(TestServer(server)) as client:
            made.client = client
            yield made
        await templates.close()


async def create(env: Environment, name: str = "mine", **more: Any) -> dict[str, Any]:
    status, answer, _ = await env.call("POST", "/v3/templates", {"name": name, "cpuCount": 2, "memoryMB": 1024, **more})
    assert status == 202, answer
    made: dict[str, Any] = answer
    return made


async def test_a_template_is_made_looked_at_and_removed(env: Environment) -> None:
    made = await create(env, "mine:v1", tags=["v2"])
    assert (made["names"], made["tags"], made["public"]) == (["mine"], ["v1", "v2"], False)
    path = f"/templates/{made['templateID']}"
    _, shown, _ = await env.call("GET", path)
    assert [one["buildID"] for one in shown["builds"]] == [made["buildID"]]
    assert (shown["cpuCount"], shown["memoryMB"], shown["buildStatus"]) == (2, 1024, "waiting")
    assert (await env.call("GET", "/templates/aliases/mine"))[1] == {"templateID": made["templateID"], "public": False}
    assert (await env.call("GET", "/templates/aliases/base"))[1]["public"] is True
    assert (await env.call("GET", "/templates/aliases/other"))[0] == 404
    assert [one["templateID"] for one in (await env.call("GET", "/templates"))[1]] == [made["templateID"]]
    assert (await env.call("PATCH", f"/v2{path}", {"public": True}))[1] == {"names": ["mine"]}
    assert (await env.call("GET", path))[1]["public"] is True
    assert (await env.call("DELETE", path))[0] == 204
    assert (await env.call("DELETE", path))[0] == 404


async def test_a_build_that_cannot_run_says_why(env: Environment) -> None:
    made = await create(env)
    path = f"/templates/{made['templateID']}/builds/{made['buildID']}"
    assert (await env.call("POST", f"/v2{path}", {"steps": []}))[0] == 400  # from nothing
    assert (await env.call("POST", f"/v2{path}", {"fromTemplate": "base", "steps": [{}]}))[0] == 400
    assert (await env.call("POST", f"/v2{path}", {"fromTemplate": "base", "steps": []}))[0] == 202
    assert (await env.call("POST", f"/v2{path}", {"fromTemplate": "base", "steps": []}))[0] == 409
    for _ in range(1000):
        _, status, _ = await env.call("GET", f"{path}/status?logsOffset=0")
        if status["status"] == "error":
            break
    assert "runtime" in status["reason"]["message"]
    assert status["logEntries"][-1]["level"] == "error"
    assert (await env.call("GET", f"{path}/logs?direction=backward&limit=1"))[1]["logs"] == status["logEntries"][-1:]
    assert (await env.call("GET", f"/templates/{made['templateID']}/builds/nothing/status"))[0] == 404


async def test_templates_of_other_tenants_are_not_there(env: Environment) -> None:
    made = await create(env)
    _, other = env.new_key("other")
    path = f"/templates/{made['templateID']}"
    for method, where in (
        ("GET", path),
        ("DELETE", path),
        ("PATCH", path),
        ("GET", f"{path}/tags"),
        ("GET", f"{path}/builds/{made['buildID']}/status"),
        ("GET", "/templates/aliases/mine"),
    ):
        assert (await env.call(method, where, {} if method == "PATCH" else None, key=other))[0] == 404, where
    assert (await env.call("GET", "/v2/templates", key=other))[1] == []


async def test_upload_links_are_good_for_one_hash_one_tenant_one_hour(env: Environment) -> None:
    made = await create(env)
    path = f"/templates/{made['templateID']}/files/{HASH}"
    status, answer, _ = await env.call("GET", path)
    assert (status, answer["present"]) == (201, False)
    link = answer["url"].partition(env.client.server.make_url("").authority)[2]

    async def put(where: str) -> int:
        async with env.client.put(where, data=b"archive") as response:  # no key, as E2B's clients
            return response.status

    assert await put(link.replace(HASH, "b" * 64)) == 403
    assert await put(link.replace(env.key.tenant, "else")) == 403
    assert await put(path) == 403
    env.clock.advance(3601)
    assert await put(link) == 403
    _, answer, _ = await env.call("GET", path)
    assert await put(answer["url"].partition(env.client.server.make_url("").authority)[2]) == 200
    assert (await env.call("GET", path))[1] == {"present": True}


async def test_tags_of_a_template_without_a_ready_build(env: Environment) -> None:
    made = await create(env)
    assert (await env.call("GET", f"/templates/{made['templateID']}/tags"))[1] == []
    assert (await env.call("POST", "/templates/tags", {"target": "mine:v9", "tags": ["x"]}))[0] == 404
    assert (await env.call("POST", "/templates/tags", {"tags": ["x"]}))[0] == 400
    assert (await env.call("DELETE", "/templates/tags", {"name": "mine", "tags": ["x"]}))[0] == 204


async def test_pages_of_templates(env: Environment) -> None:
    ids = sorted([(await create(env, f"t{n}"))["templateID"] for n in range(3)])
    _, first, headers = await env.call("GET", "/v2/templates?limit=2")
    _, second, last = await env.call("GET", f"/v2/templates?limit=2&nextToken={headers['X-Next-Token']}")
    assert [one["templateID"] for one in first + second] == ids
    assert "X-Next-Token" not in last
    assert (await env.call("GET", "/v2/templates?nextToken=abc"))[0] == 400
