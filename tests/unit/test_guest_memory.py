"""The agent in memory behaves as the real one where tests rely on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from venusrl.sandboxes.agent.api import Agent, AgentError, Change, Exit, Output, ProcessSpec, Settings, Stream
from venusrl.sandboxes.protocol import SandboxGone
from venusrl.testing.agents import MemoryAgent


async def data(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_processes() -> None:
    agent: Agent = MemoryAgent()
    await agent.settle(Settings("x", env={"A": "1"}))
    process = await agent.start(ProcessSpec(("/bin/bash", "-l", "-c", "echo 'a b' c"), "user"))
    assert [event async for event in process.events()] == [Output("stdout", b"a b c\n"), Exit(0)]
    echo = await agent.start(ProcessSpec(("cat",), "", stdin=True))
    await echo.send(b"in")
    await echo.close_stdin()
    assert [event async for event in echo.events()] == [Output("stdout", b"in"), Exit(0)]
    asleep = await agent.start(ProcessSpec(("sleep", "9"), "user", tag="t"))
    assert [info.spec.tag for info in await agent.processes()] == ["t"]
    second = await agent.attach(asleep.pid, output=False)
    await second.signal(15)
    assert [event async for event in second.events()] == [Exit(-1, 15)]
    for argv, user, code in (("nothing", "user", "not_found"), ("true", "stranger", "unauthenticated")):
        with pytest.raises(AgentError) as raised:
            await agent.start(ProcessSpec((argv,), user))
        assert raised.value.code == code


async def test_files_and_watches() -> None:
    agent = MemoryAgent()
    ready, seen = asyncio.Event(), list[Change]()

    async def collect() -> None:
        async for change in agent.watch("/home/user", "user", ready=ready):
            seen.append(change)

    task = asyncio.create_task(collect())
    await ready.wait()
    entry = await agent.write("f", "user", data(b"con", b"tent"), {"k": "v"})
    assert (entry.path, entry.size, entry.attributes) == ("/home/user/f", 7, {"k": "v"})
    assert b"".join([piece async for piece in agent.read("~/f", "user")]) == b"content"
    assert [found.path for found in await agent.list("/home", "root", 2)] == ["/home/user", "/home/user/f"]
    await asyncio.sleep(0)
    assert [change.kind for change in seen] == ["create", "chmod", "write"]
    task.cancel()
    await agent.remove("/home/user/f", "user")
    with pytest.raises(AgentError):
        await agent.stat("f", "user")


async def test_ports_and_death() -> None:
    agent = MemoryAgent()

    async def serve(stream: Stream) -> None:
        await stream.write(await stream.read() + b"!")
        await stream.write_eof()

    agent.listen(80, serve)
    stream = await agent.connect(80)
    await stream.write(b"hello")
    assert (await stream.read(), await stream.read()) == (b"hello!", b"")
    with pytest.raises(AgentError):
        await agent.connect(81)
    agent.die()
    with pytest.raises(SandboxGone):
        await agent.usage()
