"""A virtual machine with a network reaches what it may, and never the machine, the metadata address or a neighbour.

The rules are those of namespaces (``test_escape_network``); here that nothing leads around them.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOL_SOCKET, socket

import msgspec
import pytest
from tests.integration import microvms
from tests.integration.microvms import sh
from tests.integration.test_escape_network import OTHER, PORT, PRIVATE, ROUTER, SERVER, outside, tables

from venusrl.sandboxes.agent.api import Output, Process, ProcessSpec
from venusrl.sandboxes.protocol import RuntimeUnavailable, SandboxError
from venusrl.sandboxes.runtimes.base import Instance, Network, Spec
from venusrl.sandboxes.runtimes.microvm.instance import MicroVm
from venusrl.sandboxes.runtimes.microvm.runtime import MicroVmRuntime
from venusrl.sandboxes.templates.api import Image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="virtual machines are confined as root does: run as root")
__all__ = ["outside"]
EVERYTHING = Network(internet=True, allow=("0.0.0.0/0", ROUTER, "198.18.0.0/15", "169.254.0.0/16", "127.0.0.0/8"))
ANSWERS_S = 120.0


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Image]]:
    """A state directory with a finished template."""
    base = tmp_path_factory.mktemp("network")
    state = microvms.new_state(base / "one", microvms.guest_kernel())
    yield state, microvms.image(microvms.tiny_root(base / "root"))
    shutil.rmtree(base)


@pytest.fixture
async def runtime(prepared: tuple[Path, Image], outside: None) -> AsyncIterator[MicroVmRuntime]:
    made = await microvms.runtime(prepared[0])
    if why := made._no_egress():
        pytest.skip(why)
    try:
        yield made
    finally:
        await over(made)


async def over(runtime: MicroVmRuntime) -> None:
    """With whatever a test that failed has left in it."""
    for sandbox in list(runtime._instances.values()):
        await sandbox.kill()
    await runtime.close()


def with_network(name: str, image: Image, network: Network) -> Spec:
    return msgspec.structs.replace(microvms.spec(name, image), network=network)


async def machine(runtime: MicroVmRuntime, image: Image, name: str, network: Network) -> Instance:
    return await runtime.create(with_network(name, image, network))


async def reaches(sandbox: Instance, address: str, port: int = PORT) -> bool:
    """What listens there says hello; what may not be reached is not, or not within a few seconds."""
    said = await sh(sandbox, f"busybox timeout 20 busybox nc -w 4 {address} {port} < /dev/null 2>&1 || true")
    return said == "hello"


async def test_it_reaches_what_it_may(runtime: MicroVmRuntime, prepared: tuple[Path, Image]) -> None:
    opened = await machine(runtime, prepared[1], "opened", Network(internet=True, deny=(OTHER,)))
    chosen = await machine(runtime, prepared[1], "chosen", Network(allow=(f"{OTHER}/32", PRIVATE)))
    for address, expected in ((SERVER, [True, False]), (OTHER, [False, True]), (PRIVATE, [False, True])):
        assert [await reaches(each, address) for each in (opened, chosen)] == expected, address
    await opened.set_network(Network())
    assert not await reaches(opened, SERVER)
    await opened.set_network(Network(internet=True))
    assert await reaches(opened, SERVER)
    for each in (opened, chosen):
        await each.kill()


async def test_one_without_a_card_gets_none(runtime: MicroVmRuntime, prepared: tuple[Path, Image]) -> None:
    closed = await machine(runtime, prepared[1], "closed", Network())
    assert "eth0" not in await sh(closed, "ls /sys/class/net")
    assert not await reaches(closed, SERVER)
    with pytest.raises(RuntimeUnavailable, match="make one that reaches something from its beginning"):
        await closed.set_network(Network(internet=True))
    await closed.kill()


async def test_it_never_reaches_the_machine_or_a_neighbour(
    runtime: MicroVmRuntime, prepared: tuple[Path, Image]
) -> None:
    with closing(socket(AF_INET)) as listener:
        listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = listener.getsockname()[1]
        bad = await machine(runtime, prepared[1], "bad", EVERYTHING)
        neighbour = await machine(runtime, prepared[1], "neighbour", EVERYTHING)
        assert await reaches(bad, SERVER)
        serving = await neighbour.agent.start(
            ProcessSpec(("/bin/sh", "-c", f"while :; do echo -n hello | busybox nc -l -p {PORT}; done"), "root")
        )
        async with asyncio.timeout(ANSWERS_S):
            while not await reaches(neighbour, "127.0.0.1"):  # noqa: ASYNC110 - nobody tells when it listens
                await asyncio.sleep(0.1)
        links = [runtime._egress._links[name] for name in ("bad", "neighbour")]
        inside = ("10.0.2.2", "10.0.2.3", "10.0.2.15", *(link.address for link in links), links[1].gateway)
        for address in inside:
            assert not await reaches(bad, address), address
        for address in (ROUTER, "10.0.2.2", links[0].gateway, links[0].address, "127.0.0.1", "169.254.169.254"):
            assert not await reaches(bad, address, port), address
        # Root inside may give itself any address and route: what leaves is QEMU's all the same.
        await sh(bad, f"busybox ip address add {links[1].address}/31 dev eth0; busybox ip route add {ROUTER} dev eth0")
        assert not await reaches(bad, ROUTER, port)
        listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listener.accept()
        await serving.signal(9)
        for each in (bad, neighbour):
            await each.kill()


HOLDING = PORT + 1
_HOLD = f"""
import socket
made = socket.create_server(("0.0.0.0", {HOLDING}))
print("up", flush=True)
held = []
while True:
    held.append(made.accept()[0])
    held[-1].sendall(b"hello")
"""


@pytest.fixture
def holding(outside: None) -> Iterator[None]:
    """Something outside that keeps connections open."""
    command = ("ip", "netns", "exec", "venusrl-test", sys.executable, "-c", _HOLD)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        yield
        server.kill()


async def connected(sandbox: Instance) -> Process:
    """A program that has a connection open, and waits."""
    process = await sandbox.agent.start(ProcessSpec(("busybox", "nc", SERVER, str(HOLDING)), "root", stdin=True))
    async with asyncio.timeout(ANSWERS_S):
        assert await anext(aiter(process.events())) == Output("stdout", b"hello")
    return process


async def ends(sandbox: Instance, pid: int) -> None:
    """The program that only waited for more."""
    process = await sandbox.agent.attach(pid)
    async with asyncio.timeout(ANSWERS_S):
        async for _ in process.events():
            pass


async def test_what_was_open_is_told_so(runtime: MicroVmRuntime, prepared: tuple[Path, Image], holding: None) -> None:
    sandbox = await machine(runtime, prepared[1], "open", Network(internet=True))
    process = await connected(sandbox)
    heard = await sandbox.agent.start(ProcessSpec(("busybox", "nc", "-l", "-p", "9000"), "root", stdin=True))
    trying = "while ! busybox nc 127.0.0.1 9000; do sleep 0.1; done"
    inner = await sandbox.agent.start(ProcessSpec(("/bin/sh", "-c", trying), "root", stdin=True))
    await inner.send(b"one")
    assert await anext(aiter(heard.events())) == Output("stdout", b"one")
    await sandbox.pause()
    await sandbox.resume()
    await ends(sandbox, process.pid)
    inner = await sandbox.agent.attach(inner.pid)
    heard = await sandbox.agent.attach(heard.pid)
    await inner.send(b"two")  # within the sandbox nothing was cut
    said = b""
    async with asyncio.timeout(ANSWERS_S):
        async for event in heard.events():
            assert isinstance(event, Output)
            said += event.data
            if said.endswith(b"two"):
                break
    assert await reaches(sandbox, SERVER)
    await sandbox.kill()


_LATER = f"""
import socket, sys
made = socket.create_server(("0.0.0.0", {HOLDING}))
print("up", flush=True)
connection = made.accept()[0]
print("connected", flush=True)
sys.stdin.readline()
connection.sendall(b"hello")
sys.stdin.readline()
"""


async def asleep(sandbox: MicroVm, wanted: bool) -> None:
    """Once its processors are stopped, or run. Without a question: that would wake it."""
    door = sandbox._agent
    assert door is not None
    while door._asleep != wanted:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.05)


async def test_what_comes_wakes_a_machine_that_sleeps(prepared: tuple[Path, Image], outside: None) -> None:
    runtime = await microvms.runtime(prepared[0], idle_s=0.5)
    if why := runtime._no_egress():
        pytest.skip(why)
    command = ("ip", "netns", "exec", "venusrl-test", sys.executable, "-c", _LATER)
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        assert await server.stdout.readline() == b"up\n"
        sandbox = await runtime.create(with_network("sleeper", prepared[1], Network(internet=True)))
        await sh(sandbox, "busybox mkfifo /root/nothing; sleep 100000 > /root/nothing & true")
        await sh(sandbox, f"(busybox nc {SERVER} {HOLDING} < /root/nothing > /root/got 2>&1 &) ; true")
        async with asyncio.timeout(ANSWERS_S):
            assert await server.stdout.readline() == b"connected\n"
            await asleep(sandbox, True)
            server.stdin.write(b"\n")
            await asleep(sandbox, False)
            while await sh(sandbox, "cat /root/got") != "hello":  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
    finally:
        server.kill()
        await server.wait()
        await over(runtime)


async def test_a_live_move_takes_it_along(
    runtime: MicroVmRuntime, prepared: tuple[Path, Image], holding: None, tmp_path: Path
) -> None:
    other = await microvms.runtime(microvms.new_state(tmp_path / "two", prepared[0]))
    left = await runtime.create(spec := with_network("goer", prepared[1], Network(internet=True, deny=(OTHER,))))
    process = await connected(left)
    server, dial, accept = await microvms.joined()
    receiving = asyncio.create_task(other.receive(spec, accept))
    try:
        await runtime.send(left, dial, lambda: None, lambda: None)
        arrived = await receiving
        await left.kill()
        assert await reaches(arrived, SERVER)
        assert not await reaches(arrived, OTHER)
        await ends(arrived, process.pid)
        await arrived.kill()
    finally:
        server.close()
        receiving.cancel()
        await over(other)


async def test_a_host_that_can_give_none_does_not_take_it(
    runtime: MicroVmRuntime, prepared: tuple[Path, Image], tmp_path: Path
) -> None:
    other = await microvms.runtime(microvms.new_state(tmp_path / "two", prepared[0]))
    other._egress.lacks = "nft is not there: install nftables"
    spec = with_network("stays", prepared[1], Network(internet=True))
    with pytest.raises(RuntimeUnavailable, match="install nftables"):
        await other.create(spec)
    sandbox = await runtime.create(spec)
    server, dial, accept = await microvms.joined()
    receiving = asyncio.create_task(other.receive(spec, accept))
    try:
        with pytest.raises(SandboxError, match="install nftables"):
            await runtime.send(sandbox, dial, lambda: None, lambda: None)
        with pytest.raises(SandboxError, match="install nftables"):
            await receiving
        assert await reaches(sandbox, SERVER)
        await sandbox.kill()
    finally:
        server.close()
        await over(other)


async def test_pauses_and_twins_keep_it(runtime: MicroVmRuntime, prepared: tuple[Path, Image], tmp_path: Path) -> None:
    sandbox = await machine(runtime, prepared[1], "paused", Network(internet=True))
    assert await reaches(sandbox, SERVER)
    snapshot = await sandbox.snapshot(tmp_path / "snapshot")
    for _ in range(2):
        await sandbox.pause()
        await sandbox.resume()
        assert await reaches(sandbox, SERVER)
    twin = await runtime.restore(with_network("twin", prepared[1], Network(allow=(OTHER,))), snapshot)
    assert await reaches(twin, OTHER)
    assert not await reaches(twin, SERVER)
    silent = await runtime.restore(microvms.spec("silent", prepared[1]), snapshot)
    assert not await reaches(silent, SERVER)
    for each in (sandbox, twin, silent):
        await each.kill()


async def test_nothing_of_a_network_is_left(runtime: MicroVmRuntime, prepared: tuple[Path, Image]) -> None:
    """After a service that came anew took it up, and ended it."""
    sandbox = await machine(runtime, prepared[1], "one", Network(internet=True))
    record = sandbox.record()
    prefix = runtime._egress._prefix
    devices = [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(prefix)]  # noqa: ASYNC240
    assert len(devices) == 1
    await runtime.close()
    later = await microvms.runtime(prepared[0])
    again = await later.adopt(record)
    assert again is not None
    assert await reaches(again, SERVER)
    await again.set_network(Network())
    assert not await reaches(again, SERVER)
    await again.kill()
    assert not Path(f"/sys/class/net/{devices[0]}").exists()  # noqa: ASYNC240
    ruleset = subprocess.run(["nft", "list", "ruleset"], check=True, timeout=20, capture_output=True, text=True)  # noqa: ASYNC221
    assert not re.search(rf"\b{prefix}", ruleset.stdout)
    assert runtime._egress._table not in tables()
    await later.close()
