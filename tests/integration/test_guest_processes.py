"""The agent's processes, for real: how they begin, what they say, how they end, who follows them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.guests import ME, Guest, all_of, gone, guest, shell
from tests.waiting import PATIENCE_S, until

from venusrl.sandboxes.agent.api import AgentError, Exit, Output, ProcessSpec, Size


@pytest.fixture
async def inside(tmp_path: Path) -> AsyncIterator[Guest]:
    async with guest(tmp_path) as made:
        yield made


async def run(inside: Guest, command: str, **more: object) -> bytes:
    return (await all_of(await inside.client.start(shell(command, **more)))).stdout  # type: ignore[arg-type]


async def nothing_runs(inside: Guest, but: int) -> bool:
    return len(await inside.client.processes()) == but


async def test_output_error_and_code_of_a_command(inside: Guest) -> None:
    ended = await all_of(await inside.client.start(shell("echo out; echo err >&2; exit 7")))
    assert (ended.stdout, ended.stderr, ended.exit) == (b"out\n", b"err\n", Exit(7))


async def test_environment_comes_in_layers(inside: Guest) -> None:
    spec = ProcessSpec(("env",), ME, env={"MINE": "1", "HOME": "/elsewhere"}, cwd="/")
    lines = set((await all_of(await inside.client.start(spec))).stdout.decode().split())
    assert {"FROM_SETTINGS=yes", "MINE=1", "HOME=/elsewhere", f"USER={ME}", f"LOGNAME={ME}"} <= lines
    assert any(line.startswith("PATH=/") for line in lines)
    assert len(lines) == 6


async def test_the_program_is_looked_up_on_the_path_it_is_given(inside: Guest, tmp_path: Path) -> None:
    tool = tmp_path / "a-tool"
    tool.write_text("echo ran $1\n")  # no interpreter line: a shell's
    tool.chmod(0o755)
    spec = ProcessSpec(("a-tool", "well"), ME, env={"PATH": f"/nowhere:{tmp_path}:/bin"}, cwd="/")
    assert (await all_of(await inside.client.start(spec))).stdout == b"ran well\n"


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (ProcessSpec(("no-such-program-here",), ME, cwd="/"), "not_found"),
        (ProcessSpec(("/etc/passwd",), ME, cwd="/"), "permission_denied"),
        (ProcessSpec(("true",), "nobody-of-that-name", cwd="/"), "unauthenticated"),
        (ProcessSpec(("true",), ME, cwd="/no/such/directory"), "invalid_argument"),
        (ProcessSpec(("true",), ME, env={"A=B": "c"}), "invalid_argument"),
        (ProcessSpec(("tr\0ue",), ME), "invalid_argument"),
        (ProcessSpec((), ME), "invalid_argument"),
        (ProcessSpec(("true", "x" * (200 << 10)), ME, cwd="/"), "invalid_argument"),
        (ProcessSpec(("true", "x" * (2 << 20)), ME, cwd="/"), "resource_exhausted"),
    ],
)
async def test_what_cannot_start_says_why(inside: Guest, spec: ProcessSpec, code: str) -> None:
    with pytest.raises(AgentError) as raised:
        await inside.client.start(spec)
    assert raised.value.code == code
    assert await run(inside, "echo still well") == b"still well\n"
    assert await inside.client.processes() == []


async def test_a_long_command_line_arrives_whole(inside: Guest) -> None:
    spec = ProcessSpec(("sh", "-c", 'echo "$#" "${#1}"', "sh", "y" * 100_000, *["z"] * 500), ME, cwd="/")
    assert (await all_of(await inside.client.start(spec))).stdout == b"501 100000\n"


async def test_input_reaches_it_and_ends(inside: Guest) -> None:
    process = await inside.client.start(shell("cat; echo over", stdin=True))
    body = os.urandom(300_000)
    following = asyncio.create_task(all_of(process))
    await process.send(body)
    await process.close_stdin()
    ended = await following
    assert ended.stdout == body + b"over\n"
    with pytest.raises(AgentError, match="no input any more"):
        await process.send(b"late")


async def test_input_that_nobody_reads_any_more_is_refused(inside: Guest) -> None:
    process = await inside.client.start(shell("exec 0<&-; echo closed; sleep 30", stdin=True))
    events = process.events()
    assert await anext(events) == Output("stdout", b"closed\n")
    with pytest.raises(AgentError) as raised:
        await process.send(b"x" * 10)
    assert raised.value.code == "failed_precondition"
    await process.signal(9)
    assert [event async for event in events] == [Exit(-1, 9)]


async def test_without_an_input_there_is_an_empty_one(inside: Guest) -> None:
    process = await inside.client.start(shell("cat; echo over"))
    with pytest.raises(AgentError) as raised:
        await process.send(b"x")
    assert raised.value.code == "failed_precondition"
    assert (await all_of(process)).stdout == b"over\n"


async def test_a_terminal_has_a_size_echoes_and_can_be_resized(inside: Guest) -> None:
    process = await inside.client.start(shell("stty size; read x; stty size; echo got $x", pty=Size(100, 40)))
    events = process.events()
    first = await anext(events)
    assert first == Output("pty", b"40 100\r\n")
    await process.resize(Size(132, 50))
    await process.send(b"word\n")
    said = b"".join([event.data async for event in events if isinstance(event, Output)])
    assert b"50 132\r\n" in said
    assert said.endswith(b"got word\r\n")


async def test_a_terminal_is_the_controlling_one(inside: Guest) -> None:
    process = await inside.client.start(shell("echo ready; exec cat", pty=Size(80, 24)))
    events = process.events()
    await anext(events)
    await process.send(b"\x03")
    assert [event async for event in events if isinstance(event, Exit)] == [Exit(-1, signal.SIGINT)]


async def test_signals_reach_the_whole_group(inside: Guest) -> None:
    process = await inside.client.start(shell("trap 'exit 5' TERM; sleep 100 & echo up; wait"))
    events = process.events()
    assert await anext(events) == Output("stdout", b"up\n")
    await process.signal(signal.SIGTERM)
    assert [event async for event in events] == [Exit(5)]
    with pytest.raises(AgentError) as raised:
        await process.signal(signal.SIGTERM)
    assert raised.value.code == "not_found"


async def test_kill_takes_those_that_left_the_group_too(inside: Guest) -> None:
    command = "setsid sh -c 'echo $$; exec sleep 1000' & (setsid sh -c 'echo $$; setsid sleep 1001; :') & wait"
    process = await inside.client.start(shell(command))
    events = process.events()
    said = b""
    while said.count(b"\n") < 2:
        event = await anext(events)
        assert isinstance(event, Output)
        said += event.data
    await process.signal(9)
    assert [event async for event in events] == [Exit(-1, 9)]
    for pid in said.split():
        await until(lambda pid=int(pid): gone(pid))  # type: ignore[misc]


async def test_what_is_left_behind_holds_nobody_up_and_lives_on(inside: Guest) -> None:
    process = await inside.client.start(shell("sleep 60 & echo $!"))
    ended = await all_of(process)
    assert ended.exit == Exit(0)
    os.kill(int(ended.stdout), 0)
    os.kill(int(ended.stdout), 9)


async def test_everything_written_before_the_end_comes_before_it(inside: Guest) -> None:
    for _ in range(20):
        ended = await all_of(await inside.client.start(shell("head -c 200000 /dev/zero; printf tail")))
        assert len(ended.stdout) == 200_004
        assert ended.stdout.endswith(b"tail")


async def test_a_slow_reader_slows_its_own_process_only(inside: Guest) -> None:
    flood = await inside.client.start(shell("head -c 50000000 /dev/zero; echo done >&2"))
    slow = flood.events()
    await anext(slow)
    assert await run(inside, "seq 10000") == "".join(f"{n}\n" for n in range(1, 10001)).encode()
    assert [info.pid for info in await inside.client.processes()] == [flood.pid]
    got = 0
    async for event in slow:
        got += len(event.data) if isinstance(event, Output) else 0
    assert got > 40_000_000


async def test_two_handles_both_get_everything_from_when_they_were_made(inside: Guest) -> None:
    first = await inside.client.start(shell("echo one; read x; echo two; read x; exit 2", stdin=True))
    events = first.events()
    assert await anext(events) == Output("stdout", b"one\n")
    second = await inside.client.attach(first.pid)
    await second.send(b"\n")
    assert await anext(events) == Output("stdout", b"two\n")
    third = await inside.client.attach(first.pid)
    await third.send(b"\n")
    assert [event async for event in events] == [Exit(2)]
    assert (await all_of(second)).stdout == b"two\n"
    assert await all_of(third) == await all_of(await inside.client.attach(first.pid))


async def test_a_handle_for_input_alone_holds_nothing_up(inside: Guest) -> None:
    reader = await inside.client.start(shell("cat", stdin=True))
    following = asyncio.create_task(all_of(reader))
    writer = await inside.client.attach(reader.pid, output=False)
    await writer.send(b"x" * 500_000)
    await writer.close_stdin()
    assert len((await following).stdout) == 500_000
    assert [event async for event in writer.events()] == [Exit(0)]


async def test_a_detached_process_goes_on_and_its_output_is_dropped(inside: Guest, tmp_path: Path) -> None:
    command = f"head -c 5000000 /dev/zero; touch {tmp_path}/through; read x; echo now; exit 9"
    process = await inside.client.start(shell(command, stdin=True))
    pid = process.pid
    await process.detach()
    await until(lambda: asyncio.to_thread((tmp_path / "through").exists))
    assert [info.pid for info in await inside.client.processes()] == [pid]
    again = await inside.client.attach(pid)
    await again.send(b"\n")
    ended = await all_of(again)
    assert ended.stdout.endswith(b"now\n")
    assert len(ended.stdout) < 200_000
    assert (await all_of(await inside.client.attach(pid))).exit == Exit(9)


async def test_whoever_closes_stdin_and_leaves_has_closed_it(inside: Guest) -> None:
    for _ in range(20):
        process = await inside.client.start(shell("cat; exit 3", stdin=True))
        await process.detach()
        alone = await inside.client.attach(process.pid, output=False)
        await alone.close_stdin()
        await alone.detach()
        ended = await asyncio.wait_for(all_of(await inside.client.attach(process.pid)), PATIENCE_S)
        assert ended.exit == Exit(3)


async def test_an_input_that_was_closed_is_closed_for_whoever_attaches_later(inside: Guest) -> None:
    process = await inside.client.start(shell("sleep 1000", stdin=True))
    await process.close_stdin()
    await process.detach()
    again = await inside.client.attach(process.pid)
    with pytest.raises(AgentError, match="no input any more"):
        await asyncio.wait_for(again.send(b"late"), PATIENCE_S)
    await again.signal(9)


async def test_a_dropped_handle_is_a_detached_one(inside: Guest) -> None:
    pid = (await inside.client.start(shell("head -c 5000000 /dev/zero; exit 4"))).pid
    gc.collect()
    await until(lambda: nothing_runs(inside, 0))
    assert (await all_of(await inside.client.attach(pid))).exit == Exit(4)


async def test_processes_are_listed_as_they_were_started(inside: Guest) -> None:
    spec = ProcessSpec(("sleep", "50"), ME, env={"A": "1"}, cwd="/", tag="mine", stdin=True)
    process = await inside.client.start(spec)
    other = inside.another()
    (info,) = await other.processes()
    assert (info.pid, info.spec) == (process.pid, spec)
    await other.close()


async def test_a_start_that_is_given_up_leaves_no_process(inside: Guest) -> None:
    tasks = [asyncio.create_task(inside.client.start(shell("sleep 60"))) for _ in range(20)]
    await asyncio.sleep(0.003)
    for task in tasks:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    kept = [each for each in done if not isinstance(each, BaseException)]
    await until(lambda: nothing_runs(inside, len(kept)))


async def test_many_at_once(inside: Guest) -> None:
    async def one(number: int) -> bytes:
        return (await all_of(await inside.client.start(shell(f"echo {number}")))).stdout

    said = await asyncio.gather(*(one(number) for number in range(100)))
    assert said == [f"{number}\n".encode() for number in range(100)]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
async def test_another_user(inside: Guest) -> None:
    said = await run(inside, "id -un; id -gn; cat /etc/shadow; echo $HOME", user="nobody")
    assert said.split()[:2] == [b"nobody", b"nogroup"]
    assert b"root:" not in said
    assert await run(inside, "id -u", user="12345") == b"12345\n"


async def test_an_orphan_is_reaped(inside: Guest) -> None:
    pid = int(await run(inside, "(sh -c 'echo $$; sleep 0.05' &) ; sleep 0.01"))
    await until(lambda: asyncio.to_thread(lambda: not Path(f"/proc/{pid}").exists()))
