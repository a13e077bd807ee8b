"""The trainer API over real sockets: key, long polls, repeats, and what happens when our side fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.waiting import PATIENCE_S, until

from venusrl.coordinator.errors import RunFailed, StoreFull
from venusrl.coordinator.store import RunStore, TrainedReport
from venusrl.coordinator.supervisor import Supervisor
from venusrl.coordinator.trainer_api import TrainerApi
from venusrl.testing.runs import complete_group, new_store
from venusrl.training.client import RunOver, RunState, Trained, TrainerClient, Waiting
from venusrl.training.errors import ApiError
from venusrl.types import Batch

KEY = "a-key-made-for-the-run"


class Side:
    """The coordinator's side: a store with two complete groups, and what the API told it."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.told: list[tuple[TrainedReport, bool]] = []
        self.fault: Exception | None = None
        self.groups = [complete_group(store) for _ in range(2)]
        self.api = TrainerApi(
            store, key=KEY, max_steps=7, on_trained=self.on_trained, waiting_for=lambda: "2 groups:\nöne straggler"
        )

    def on_trained(self, report: TrainedReport, news: bool) -> None:
        if self.fault is not None:
            raise self.fault
        self.told.append((report, news))

    def form(self) -> str:
        batch = self.store.form_batch(0, self.groups)
        self.api.notify_batch_ready()
        return batch


@pytest.fixture
async def side(tmp_path: Path) -> AsyncIterator[Side]:
    with new_store(tmp_path / "run") as store:
        side = Side(store)
        await side.api.start()
        yield side
        await side.api.close()


@pytest.fixture
async def http(side: Side) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(side.api.url, headers={"Authorization": f"Bearer {KEY}"}) as session:
        yield session


def body(version: int = 1, batch: str = "b000000", *, checkpointed: bool = True) -> bytes:
    return msgspec.msgpack.encode(TrainedReport(batch, version, "/m/1", checkpointed, {"train/loss": 0.5}))


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", f"Basic {KEY}", KEY, "Bearer ", "Bearer é"])
async def test_no_key_no_answer(side: Side, authorization: str) -> None:
    async with aiohttp.ClientSession(side.api.url, headers={"Authorization": authorization}) as stranger:
        for method, path in (("GET", "state"), ("GET", "batch?version=0"), ("POST", "trained")):
            async with stranger.request(method, f"/v1/trainer/{path}", data=body()) as answer:
                assert answer.status == 401
    assert side.store.current_version() == 0


async def test_nothing_yet_names_what_is_waited_for(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/trainer/batch?version=0&wait_s=0.1") as answer:
        assert answer.status == 204
        assert answer.headers["X-Waiting-For"] == r"2 groups: \u00f6ne straggler"


async def test_a_poll_gets_the_batch_as_soon_as_it_forms(side: Side, http: aiohttp.ClientSession) -> None:
    poll = asyncio.create_task(http.get("/v1/trainer/batch?version=0&wait_s=60"))
    await until(lambda: side.api.greeted, "the poll's arrival")
    assert not poll.done()
    side.api.notify_batch_ready()  # a wake without a batch ends no poll
    batch_id = side.form()
    async with asyncio.timeout(PATIENCE_S), await poll as answer:
        assert answer.status == 200
        batch = msgspec.msgpack.decode(await answer.read(), type=Batch)
    assert batch == side.store.batch_for(0)
    assert (batch.id, batch.version, [group.id for group in batch.groups]) == (batch_id, 0, side.groups)
    async with http.get("/v1/trainer/batch?version=0") as again:  # also without any patience
        assert msgspec.msgpack.decode(await again.read(), type=Batch) == batch


async def test_trained_is_recorded_once_and_answered_alike(side: Side, http: aiohttp.ClientSession) -> None:
    side.form()
    for _ in range(2):
        async with http.post("/v1/trainer/trained", data=body()) as answer:
            assert answer.status == 204
    assert [news for _, news in side.told] == [True, False]
    assert side.told[0][0].metrics == {"train/loss": 0.5}
    assert side.store.current_version() == 1
    assert side.store.check_invariants() == []
    async with http.get("/v1/trainer/state") as answer:
        assert msgspec.msgpack.decode(await answer.read()) == {"version": 1, "max_steps": 7}
    async with http.get("/v1/trainer/state", headers={"Accept": "application/json"}) as answer:
        assert await answer.json() == {"version": 1, "max_steps": 7}


async def test_our_own_trainer_understands_every_answer(side: Side) -> None:
    client = TrainerClient(side.api.url, KEY, patience_s=1.0)
    assert await asyncio.to_thread(client.batch, 0, 0.0) == Waiting(r"2 groups: \u00f6ne straggler")
    side.form()
    batch = await asyncio.to_thread(client.batch, 0, 5.0)
    assert batch == side.store.batch_for(0)
    trained = Trained("b000000", 1, "/m/1", checkpointed=True, metrics={"train/loss": 0.5})
    for _ in range(2):
        await asyncio.to_thread(client.report, trained)
    assert await asyncio.to_thread(client.state) == RunState(version=1, max_steps=7)
    with pytest.raises(ApiError, match="409"):
        await asyncio.to_thread(client.report, Trained("b000000", 2, "/m/2", checkpointed=True, metrics={}))
    with pytest.raises(ApiError, match="401"):
        await asyncio.to_thread(TrainerClient(side.api.url, "wrong").state)
    side.api.finish("all steps are trained")
    assert await asyncio.to_thread(client.batch, 1, 5.0) == RunOver("all steps are trained")


async def test_another_trainer_may_speak_json(side: Side, http: aiohttp.ClientSession) -> None:
    side.form()
    report = {"batch_id": "b000000", "version": 1, "model_path": "/m", "checkpointed": False, "metrics": {}}
    async with http.post("/v1/trainer/trained", json=report) as answer:
        assert answer.status == 204
    assert side.store.current_version() == 1


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (body(version=2), 409),
        (body(batch="b000009"), 409),
        (b"\xc1", 400),
        (msgspec.msgpack.encode({"batch_id": "b000000"}), 400),
        (msgspec.msgpack.encode({"batch_id": "b000000", "version": 1, "extra": 1}), 400),
    ],
)
async def test_a_wrong_report_is_refused_and_changes_nothing(
    side: Side, http: aiohttp.ClientSession, data: bytes, status: int
) -> None:
    side.form()
    async with http.post("/v1/trainer/trained", data=data) as answer:
        assert answer.status == status
        assert await answer.text()
    assert side.told == []
    assert side.store.current_version() == 0


@pytest.mark.parametrize("query", ["", "?version=x", "?version=-1", "?version=0&wait_s=nan", "?version=0&wait_s=-1"])
async def test_a_wrong_question_is_refused(http: aiohttp.ClientSession, query: str) -> None:
    async with http.get(f"/v1/trainer/batch{query}") as answer:
        assert answer.status == 400


@pytest.mark.parametrize("end", [lambda api: api.finish("engines are gone: out of memory"), lambda api: None])
async def test_T27_the_end_of_the_run_reaches_an_open_poll(
    side: Side, http: aiohttp.ClientSession, end: Callable[[TrainerApi], None]
) -> None:
    poll = asyncio.create_task(http.get("/v1/trainer/batch?version=0&wait_s=60"))
    await until(lambda: side.api.greeted, "the poll's arrival")
    end(side.api)
    await side.api.close()
    async with asyncio.timeout(PATIENCE_S), await poll as answer:
        assert answer.status == 410
        assert await answer.text() in ("engines are gone: out of memory", "the coordinator stops")
    await side.api.wait_failed()


async def test_T27_a_fault_on_our_side_ends_the_run_with_its_cause(side: Side, http: aiohttp.ClientSession) -> None:
    side.form()
    side.fault = ZeroDivisionError("in the coordinator")

    async def run() -> None:
        supervisor.spawn("trainer API", side.api.wait_failed())
        async with http.post("/v1/trainer/trained", data=body()) as answer:
            assert answer.status == 500
            assert "in the coordinator" in await answer.text()
        await asyncio.Event().wait()

    supervisor = Supervisor()
    with pytest.raises(RunFailed, match="trainer API failed: ZeroDivisionError: in the coordinator"):
        await supervisor.run(run())


async def test_a_full_disk_is_told_and_nothing_is_acknowledged(
    side: Side, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.form()

    def full(_: TrainedReport) -> bool:
        raise StoreFull("no room")

    monkeypatch.setattr(side.store, "mark_trained", full)
    async with http.post("/v1/trainer/trained", data=body()) as answer:
        assert answer.status == 507
    with pytest.raises(StoreFull, match="no room"):
        await side.api.wait_failed()
    assert side.told == []


async def test_a_taken_port_is_one_message(side: Side) -> None:
    port = int(side.api.url.rpartition(":")[2])
    second = TrainerApi(side.store, key=KEY, max_steps=1, on_trained=side.on_trained, waiting_for=str)
    with pytest.raises(RunFailed, match=f"port {port}"):
        await second.start(port)
