"""The line to an agent is cut, taken over, fed rubbish: nothing is lost, repeated or believed."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import pty
import random
import socket
import tty
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.guests import ME, Guest, all_of, guest, shell
from tests.waiting import until

from venusrl.sandboxes.agent import build, wire
from venusrl.sandboxes.agent.api import AgentError, Exit, Output, Process, Settings
from venusrl.sandboxes.agent.client import AgentClient, unix
from venusrl.sandboxes.protocol import SandboxGone

CUTS = 12


@pytest.fixture
async def inside(tmp_path: Path) -> AsyncIterator[Guest]:
    async with guest(tmp_path) as made:
        yield made


async def cutting(inside: Guest, chance: random.Random) -> None:
    while True:
        await asyncio.sleep(chance.uniform(0.002, 0.03))
        inside.cut()


async def test_a_line_cut_again_and_again_loses_and_repeats_nothing(inside: Guest) -> None:
    """Output of ten thousand lines, an echo of random bytes, commands, files, all at once, through many cuts.

    The commands go on until there were `CUTS`: how many fit into the other work depends on the machine.
    """
    body = os.urandom(2_000_000)

    async def lines() -> None:
        ended = await all_of(await inside.client.start(shell("seq 1 10000; exit 3")))
        assert ended.stdout == "".join(f"{n}\n" for n in range(1, 10001)).encode()
        assert ended.exit == Exit(3)

    async def echo() -> None:
        process = await inside.client.start(shell("cat", stdin=True))
        following = asyncio.create_task(all_of(process))
        for start in range(0, len(body), 100_000):
            await process.send(body[start : start + 100_000])
        await process.close_stdin()
        assert (await following).stdout == body

    async def files() -> None:
        async def data() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 50_000):
                yield body[start : start + 50_000]
                await asyncio.sleep(0.001)

        where = str(inside.path.parent / "f")
        assert (await inside.client.write(where, ME, data())).size == len(body)
        assert b"".join([piece async for piece in inside.client.read(where, ME)]) == body

    async def commands() -> None:
        for number in itertools.count():
            if number >= 40 and inside.connections - before > CUTS:
                return
            ended = await all_of(await inside.client.start(shell(f"echo x >> count; exit {number % 100}")))
            assert ended.exit == Exit(number % 100)

    (inside.path.parent / "count").touch()
    before = inside.connections
    cutter = asyncio.create_task(cutting(inside, random.Random(4)))
    await asyncio.gather(lines(), echo(), files(), commands())
    cutter.cancel()


async def test_commands_through_cuts_run_exactly_once(inside: Guest, tmp_path: Path) -> None:
    cutter = asyncio.create_task(cutting(inside, random.Random(5)))
    await asyncio.gather(
        *(all_of_shell(inside, f"echo {number} >> {tmp_path}/ran") for number in range(60)),
    )
    cutter.cancel()
    ran = (tmp_path / "ran").read_text().split()
    assert sorted(map(int, ran)) == list(range(60))


async def all_of_shell(inside: Guest, command: str) -> None:
    assert (await all_of(await inside.client.start(shell(command)))).exit == Exit(0)


async def test_a_service_that_comes_anew_gets_what_the_former_had_not_taken(inside: Guest) -> None:
    process = await inside.client.start(shell("seq 1 100000; echo end; exit 6"))
    taken = b""
    events = process.events()
    while len(taken) < 50_000:
        event = await anext(events)
        assert isinstance(event, Output)
        taken += event.data
    await events.aclose()  # type: ignore[attr-defined]
    await inside.client.close()
    later = inside.another()
    (info,) = await later.processes()
    ended = await all_of(await later.attach(info.pid))
    assert taken + ended.stdout == "".join(f"{n}\n" for n in range(1, 100001)).encode() + b"end\n"
    assert ended.exit == Exit(6)
    await later.close()


async def test_an_exit_is_known_to_a_service_that_comes_later(inside: Guest) -> None:
    process = await inside.client.start(shell("echo said; exit 8"))
    pid = process.pid
    await inside.client.close()
    later = inside.another()

    async def ended_now() -> bool:
        return await later.processes() == []

    await until(ended_now, "its end")
    ended = await all_of(await later.attach(pid))
    assert (ended.stdout, ended.exit) == (b"said\n", Exit(8))
    assert (await all_of(await later.attach(pid))).exit == Exit(8)
    with pytest.raises(AgentError) as raised:
        await later.attach(pid + 100_000)
    assert raised.value.code == "not_found"
    await later.close()


async def test_a_service_that_was_replaced_gives_way(inside: Guest) -> None:
    process = await inside.client.start(shell("sleep 60"))
    waiting = asyncio.create_task(all_of(process))
    newer = inside.another()
    assert [info.pid for info in await newer.processes()] == [process.pid]
    with pytest.raises(SandboxGone):
        await waiting
    with pytest.raises(SandboxGone):
        await inside.client.usage()
    assert (await newer.usage()).cpus >= 1
    await newer.close()


async def test_an_agent_that_is_gone_is_gone(inside: Guest) -> None:
    client = inside.another(patience_s=0.3)
    process = await client.start(shell("sleep 60"))
    waiting = asyncio.create_task(all_of(process))
    os.kill(process.pid, 9)
    os.kill(inside.pid, 9)
    inside.open_to_new = False
    inside.cut()
    with pytest.raises(SandboxGone):
        await waiting
    with pytest.raises(SandboxGone):
        await client.usage()
    gone = AgentClient(unix(inside.path.parent / "nothing"))
    with pytest.raises(SandboxGone):
        await gone.usage()


async def test_an_agent_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen(8)
        client = AgentClient(unix(tmp_path / "s"), patience_s=0.3, answer_s=0.2)
        with pytest.raises(AgentError) as raised:
            await client.usage()
        assert raised.value.code == "unavailable"
        await client.close()


async def test_rubbish_on_the_socket_is_not_believed(inside: Guest) -> None:
    chance = random.Random(6)
    for _ in range(100):
        reader, writer = await asyncio.open_unix_connection(inside.path)
        rubbish = (
            wire.hello(bytes(16), bytes(16), False, {})[: chance.randrange(17000)] if chance.random() < 0.5 else b""
        )
        frames = b"".join(
            wire.frame(
                chance.randrange(6), chance.randrange(1, 7), chance.randrange(200), os.urandom(chance.randrange(99))
            )
            for _ in range(20)
        )
        writer.write(rubbish + frames + os.urandom(chance.randrange(40_000)))
        writer.write_eof()
        while await reader.read(65536):
            pass
        writer.close()
    assert (await inside.another().usage()).cpus >= 1


# -- a serial port: one descriptor for ever, nobody says that the host has come anew


async def serial(master: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection over the host's end of a terminal, as QEMU's socket would be."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await loop.connect_read_pipe(lambda: protocol, os.fdopen(os.dup(master), "rb", 0))
    transport, _ = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(), os.fdopen(os.dup(master), "wb", 0)
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def test_a_serial_port_survives_hosts_that_leave_in_the_middle(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    tty.setraw(slave)
    program = await build.program()
    process = await asyncio.create_subprocess_exec(program, "--port", os.ttyname(slave), env={})
    chance = random.Random(7)
    try:
        for _ in range(15):  # each says a part of something and leaves
            whole = wire.hello(os.urandom(16), os.urandom(16), False, {}) + wire.frame(1, wire.DATA, 0, os.urandom(900))
            os.write(master, whole[: chance.randrange(17_000, len(whole))][-4000:])
        writers: list[asyncio.StreamWriter] = []

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await serial(master)
            writers.append(writer)
            return reader, writer

        client = AgentClient(connect, patience_s=20.0)
        await client.settle(Settings(sandbox="x", user=ME))
        body = os.urandom(60_000)
        echo = await client.start(shell("cat; exit 2", stdin=True))
        following = asyncio.create_task(all_of(echo))
        for start in range(0, len(body), 1000):
            await echo.send(body[start : start + 1000])
        await echo.close_stdin()
        ended = await following
        assert (hashlib.sha256(ended.stdout).hexdigest(), ended.exit) == (hashlib.sha256(body).hexdigest(), Exit(2))
        await client.close()
    finally:
        process.kill()
        await process.wait()
        os.close(slave)
        os.close(master)


async def test_nothing_is_left_of_many_requests(inside: Guest, tmp_path: Path) -> None:
    """Descriptors, memory and children are what they were."""

    async def state() -> tuple[int, int]:
        rollup = (await asyncio.to_thread(Path(f"/proc/{inside.pid}/smaps_rollup").read_text)).splitlines()
        private = next(line for line in rollup if line.startswith("Private_Dirty"))
        return len(os.listdir(f"/proc/{inside.pid}/fd")), int(private.split()[1])

    async def some() -> None:
        for number in range(25):
            await all_of_shell(inside, "head -c 100000 /dev/zero")
            await inside.client.stat("/", ME)
            with pytest.raises(AgentError):
                await inside.client.stat(f"/none{number}", ME)

    await some()
    before = await state()
    await asyncio.gather(*(some() for _ in range(8)))

    async def back() -> bool:
        return (await state())[0] == before[0]

    await until(back)
    after = await state()
    assert after[1] <= before[1] + 150
    assert after[1] < 400


async def test_input_goes_on_over_many_services(inside: Guest, tmp_path: Path) -> None:
    """Services end in order, or at once in the middle of a send; whoever comes next attaches and sends."""
    chance, sent = random.Random(7), []
    process = await inside.client.start(shell(f"exec cat > {tmp_path}/got", stdin=True))
    pid = process.pid
    for number in range(60):
        for step in range(chance.randrange(1, 5)):
            sent.append(f"{number}.{step}")
            await process.send(f"{sent[-1]}\n".encode())
        cut_short = asyncio.create_task(process.send(b"\n" * chance.choice((1, 50_000, 300_000))))
        await asyncio.sleep(0)
        if number % 2:
            inside.cut()
        await inside.client.close()
        await asyncio.gather(cut_short, return_exceptions=True)
        inside.client = inside.another()
        process = await inside.client.attach(pid, output=bool(number % 3))
    await process.close_stdin()
    assert (await all_of(await inside.client.attach(pid))).exit == Exit(0)
    assert (tmp_path / "got").read_text().split() == sent


async def test_an_attach_that_is_given_up_leaves_the_process_alone(inside: Guest) -> None:
    pid = (await inside.client.start(shell("read x; exit 5", stdin=True))).pid
    for turns in range(40):
        attaching = asyncio.create_task(inside.client.attach(pid))
        for _ in range(turns % 8):  # at every point of its way
            await asyncio.sleep(0)
        attaching.cancel()
        await asyncio.gather(attaching, return_exceptions=True)
    process = await inside.client.attach(pid)
    await process.send(b"\n")
    assert (await all_of(process)).exit == Exit(5)


async def test_a_start_that_is_given_up_while_the_line_is_cut_leaves_nothing(
    inside: Guest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as deaf:
        deaf.setattr(inside.client._line, "_on_frame", lambda _: None)  # that it began is on its way and never arrives
        starting = asyncio.create_task(inside.client.start(shell(f"touch {tmp_path}/began; sleep 1000")))
        await until(lambda: asyncio.to_thread((tmp_path / "began").exists))
        inside.cut()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    await until(lambda: nothing_runs(inside))


async def nothing_runs(inside: Guest) -> bool:
    return not await inside.client.processes()


async def next_span(process: Process, at: int) -> tuple[tuple[int, int], bytes]:
    """The first of its output that is not known to whoever has everything up to ``at``, and where it is."""
    async with asyncio.timeout(60):
        async for event in process.events():
            assert isinstance(event, Output), event
            assert process.span is not None
            if process.span[1] > at:
                return process.span, event.data
    raise AssertionError("it ended")


async def test_whoever_comes_next_knows_where_the_output_goes_on(inside: Guest) -> None:
    """Also where the former host took something and its word of that was lost."""
    process = await inside.client.start(shell("for i in 1 2 3 4 5 6; do echo $i; read x; done", stdin=True))
    at = 0
    for number in range(1, 7):
        span, data = await next_span(process, at)
        assert (span[0], data) == (at, b"%d\n" % number)
        at = span[1]
        if number % 2:
            inside.cut()
        process = await inside.another().attach(process.pid)
        await process.send(b"\n")


async def test_dropped_output_counts(inside: Guest) -> None:
    process = await inside.client.start(shell("echo one; read x; echo dropped; read x; echo three", stdin=True))
    before, said = await next_span(process, 0)
    assert said == b"one\n"
    await inside.client.close()
    alone = inside.another()
    writer = await alone.attach(process.pid, output=False)
    await writer.send(b"\n")  # nobody follows it: what it says is dropped, or comes to who follows next
    await alone.close()
    late = await inside.another().attach(process.pid)
    await late.send(b"\n")
    at = before[1]
    while said != b"three\n":
        span, said = await next_span(late, at)
        assert span[0] >= at
        at = span[1]
    assert at == before[1] + 2 * 5 + len("dropped\nthree\n")


async def test_several_who_follow_go_on_one_after_the_other(inside: Guest) -> None:
    """What the first to come has taken is there for the others, whoever sends input first."""
    process = await inside.client.start(shell("echo one; read x; echo two; read x; echo three; exit 4", stdin=True))
    before, _ = await next_span(process, 0)
    await inside.client.close()
    later = inside.another()
    writer = await later.attach(process.pid, output=False)
    await writer.send(b"\n")
    first = await later.attach(process.pid, since=before[1])
    assert (await next_span(first, before[1]))[1] == b"two\n"
    await writer.send(b"\n")
    second = await later.attach(process.pid, since=before[1])
    for follower in (second, first):
        ended = await all_of(follower)
        assert (ended.stdout[-6:], ended.exit) == (b"three\n", Exit(4))
        assert follower.span is not None
        assert follower.span[0] == before[1] + 2 * 5 + len("two\nthree\n")
    assert ended.stdout == b"three\n"
    late = await later.attach(process.pid, since=before[1])
    assert (await all_of(late)).exit == Exit(4)
    assert late.span == first.span  # its output is no more, and that shows
