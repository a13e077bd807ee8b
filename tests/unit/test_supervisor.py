"""Background tasks that fail, end, hang or are cancelled, and what the run says of it."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.waiting import until

from venusrl.coordinator.errors import ProcessError, RunFailed, ShutdownTimeout
from venusrl.coordinator.supervisor import Supervisor


async def forever() -> None:
    await asyncio.Event().wait()


async def fail_with(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def test_main_returns_and_everything_else_is_cancelled() -> None:
    supervisor = Supervisor()
    ended: list[str] = []

    async def background() -> None:
        try:
            await forever()
        finally:
            ended.append("background")

    async def main() -> str:
        supervisor.spawn("background", background(), endless=True)
        assert await supervisor.spawn("short", asyncio.sleep(0, "answer")) == "answer"
        assert supervisor.names == ["background"]
        return "done"

    assert await supervisor.run(main()) == "done"
    assert ended == ["background"]
    assert supervisor.names == []


async def test_T27_a_dead_task_ends_the_run_with_the_original_cause() -> None:
    supervisor = Supervisor()

    async def main() -> None:
        supervisor.spawn("group producer", fail_with(KeyError("task-7")))
        await forever()

    with pytest.raises(RunFailed, match="group producer failed: KeyError: 'task-7'") as caught:
        await supervisor.run(main())
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.reason == "task_failed"


async def test_T27_an_error_of_ours_arrives_as_it_is() -> None:
    supervisor = Supervisor()
    dead = ProcessError("trainer was killed by SIGKILL")

    async def main() -> None:
        supervisor.spawn("trainer", fail_with(dead))
        await forever()

    with pytest.raises(ProcessError) as caught:
        await supervisor.run(main())
    assert caught.value is dead


async def test_T27_a_task_that_must_not_end_may_not_end() -> None:
    supervisor = Supervisor()

    async def main() -> None:
        supervisor.spawn("weight publisher", asyncio.sleep(0), endless=True)
        await forever()

    with pytest.raises(RunFailed, match="weight publisher ended"):
        await supervisor.run(main())


async def test_cancelling_a_task_is_no_failure_but_a_stray_cancellation_is() -> None:
    supervisor = Supervisor()

    async def awaits_a_cancelled_future() -> None:
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lost.cancel()
        await lost

    async def main() -> None:
        episode = supervisor.spawn("episode", forever())
        await asyncio.sleep(0)
        episode.cancel()
        await asyncio.wait({episode})
        await asyncio.sleep(0)
        supervisor.spawn("stray", awaits_a_cancelled_future())
        await forever()

    with pytest.raises(RunFailed, match="stray was cancelled"):
        await supervisor.run(main())


async def test_an_error_of_main_passes_unchanged_and_the_first_failure_wins(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor()

    async def fails_while_it_stops() -> None:
        try:
            await forever()
        finally:
            raise ValueError("second")

    async def main() -> None:
        supervisor.spawn("sour", fails_while_it_stops())
        await asyncio.sleep(0)
        raise KeyError("first")

    with caplog.at_level(logging.ERROR), pytest.raises(KeyError, match="first"):
        await supervisor.run(main())
    assert "sour failed after the run had" in caplog.text


async def test_cancellation_from_outside_passes_through_and_cleans_up() -> None:
    supervisor = Supervisor()
    begun: list[str] = []
    stopped: list[str] = []

    async def background(name: str) -> None:
        begun.append(name)
        try:
            await forever()
        finally:
            stopped.append(name)

    async def main() -> None:
        for name in ("first", "second"):
            supervisor.spawn(name, background(name))
        await background("main")

    run = asyncio.create_task(supervisor.run(main()))
    await until(lambda: len(begun) == 3, "the start of all three")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert stopped == ["main", "second", "first"]


@pytest.mark.parametrize("fails", [False, True])
async def test_T45_shutdown_is_bounded_and_names_what_is_left(fails: bool) -> None:
    supervisor = Supervisor(shutdown_s=0.05)
    release, ended = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    async def main() -> None:
        supervisor.spawn("stubborn flush", stubborn())
        await asyncio.sleep(0)
        if fails:
            raise KeyError("cause")

    # Unbounded it would wait for the stubborn one, which nothing but the end of this test lets go.
    with pytest.raises(KeyError if fails else ShutdownTimeout) as caught:
        await supervisor.run(main())
    assert not ended.is_set()
    assert "stubborn flush" in (caught.value.__notes__[0] if fails else str(caught.value))
    release.set()
    await ended.wait()


async def test_nothing_starts_once_it_closes() -> None:
    supervisor = Supervisor()
    await supervisor.close()
    await supervisor.close()
    with pytest.raises(RuntimeError, match="late was spawned"):
        supervisor.spawn("late", forever())
