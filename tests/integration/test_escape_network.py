"""A sandbox with a network reaches what it may, and never the machine, the metadata address or another sandbox."""

# ruff: noqa: ASYNC240, ASYNC221 - a test may look at a local file, and set the scene

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOL_SOCKET, socket

import pytest
from tests.integration.persistent import output, running, shell, spec
from tests.waiting import PATIENCE_S

from venusrl.sandboxes.protocol import SandboxError
from venusrl.sandboxes.runtimes.base import Instance, Network
from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime

SERVER, OTHER, ROUTER, PRIVATE = "203.0.113.2", "203.0.113.3", "203.0.113.1", "10.199.7.2"
PORT = 8123
_SERVE = f"""
import socket
made = socket.socket()
made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
made.bind(("0.0.0.0", {PORT}))
made.listen()
print("up", flush=True)
while True:
    made.accept()[0].sendall(b"hello")
"""


@pytest.fixture
def outside() -> Iterator[None]:
    """A piece of "internet" beside this machine: a namespace with a server, routed like any other network."""
    lacking = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if lacking:
        pytest.skip(f"{' and '.join(lacking)} not installed: apt-get install iproute2 nftables")
    commands = f"""
        ip netns add venusrl-test
        ip link add vt-test type veth peer name eth0 netns venusrl-test
        ip address add {ROUTER}/24 dev vt-test
        ip address add 10.199.7.1/24 dev vt-test
        ip link set vt-test up
        ip -n venusrl-test address add {SERVER}/24 dev eth0
        ip -n venusrl-test address add {OTHER}/24 dev eth0
        ip -n venusrl-test address add {PRIVATE}/24 dev eth0
        ip -n venusrl-test link set eth0 up
    """
    try:
        for line in commands.strip().splitlines():
            subprocess.run(line.split(), check=True, timeout=PATIENCE_S, capture_output=True)
        Path("/proc/sys/net/ipv4/conf/vt-test/forwarding").write_text("1")
        serve = ("ip", "netns", "exec", "venusrl-test", sys.executable, "-c", _SERVE)
        with subprocess.Popen(serve, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"up\n"
            yield
            server.kill()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces to play the internet: {error}")
    finally:
        subprocess.run(["ip", "link", "delete", "vt-test"], check=False, timeout=PATIENCE_S, capture_output=True)
        subprocess.run(["ip", "netns", "delete", "venusrl-test"], check=False, timeout=PATIENCE_S, capture_output=True)


@pytest.fixture
async def runtime(tmp_path: Path, outside: None) -> AsyncIterator[NamespaceRuntime]:
    async with running(tmp_path / "ns") as made:
        if made.egress.lacks is not None:
            pytest.skip(made.egress.lacks)
        yield made
        await made.sweep(set())


async def reaches(sandbox: Instance, address: str, port: int = PORT) -> bool:
    code = f"import socket; s = socket.create_connection(('{address}', {port}), 1.0); print(s.recv(5).decode())"
    return await shell(sandbox, f'python3 -c "{code}" 2>/dev/null', "root") == (0, "hello")


async def test_it_reaches_what_it_may(runtime: NamespaceRuntime) -> None:
    closed = await runtime.create(spec("closed"))
    opened = await runtime.create(spec("opened", network=Network(internet=True, deny=(OTHER,))))
    chosen = await runtime.create(spec("chosen", network=Network(allow=(f"{OTHER}/32", PRIVATE))))
    for address, expected in ((SERVER, "010"), (OTHER, "001"), (PRIVATE, "001")):
        found = [await reaches(each, address) for each in (closed, opened, chosen)]
        assert found == [flag == "1" for flag in expected], address
    await opened.set_network(Network())
    assert not await reaches(opened, SERVER)
    await closed.set_network(Network(internet=True))
    assert await reaches(closed, SERVER)
    with pytest.raises(SandboxError, match="neither a network"):
        await closed.set_network(Network(allow=("no such; name",)))
    await closed.pause()
    await closed.resume()
    assert await reaches(closed, SERVER)


async def test_it_never_reaches_the_machine_or_a_neighbour(runtime: NamespaceRuntime) -> None:
    with closing(socket(AF_INET)) as listener:
        listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = listener.getsockname()[1]
        everything = Network(internet=True, allow=("0.0.0.0/0", ROUTER, "198.18.0.0/15", "169.254.0.0/16"))
        pair = [await runtime.create(spec(name, network=everything)) for name in ("bad", "neighbour")]
        assert await reaches(pair[0], SERVER)
        serve = f"import socket\ns=socket.create_server(('0.0.0.0',{PORT}))\nopen('/tmp/up','w')\n"
        serve += "while True: s.accept()[0].sendall(b'hello')"
        await output(
            pair[1],
            f"(python3 - <<'END' &\n{serve}\nEND\n) >/dev/null 2>&1; while ! test -e /tmp/up; do sleep .05; done",
        )
        assert await reaches(pair[1], "127.0.0.1")
        own = await output(pair[1], "hostname -I || ip -4 -o address show dev eth0", "root")
        neighbour = next(word.split("/")[0] for word in own.split() if word.startswith("198.18."))
        gateway = neighbour.rpartition(".")[0] + "." + str(int(neighbour.rpartition(".")[2]) - 1)
        assert not await reaches(pair[0], neighbour)
        for address in (ROUTER, gateway, "127.0.0.1", "169.254.169.254"):
            assert not await reaches(pair[0], address, port), address
        listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listener.accept()


async def test_nothing_of_a_network_is_left(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    sandbox = await runtime.create(spec("one", network=Network(internet=True)))
    record = sandbox.record()
    devices = [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(runtime.egress._prefix)]
    assert len(devices) == 1
    await runtime.close()
    async with running(tmp_path / "ns") as later:
        again = await later.adopt(record)
        assert again is not None
        assert await reaches(again, SERVER)
        await again.set_network(Network())
        assert not await reaches(again, SERVER)
        await again.kill()
    assert not Path(f"/sys/class/net/{devices[0]}").exists()
    rules = subprocess.run(
        ["nft", "list", "ruleset"], check=True, timeout=PATIENCE_S, capture_output=True, text=True
    ).stdout
    assert devices[0] not in rules
    assert not list((tmp_path / "ns/network").glob("*.link"))
    await asyncio.sleep(0)


def tables() -> list[str]:
    told = subprocess.run(
        ["nft", "list", "tables"], check=True, timeout=PATIENCE_S, capture_output=True, text=True
    ).stdout
    return [line.split()[-1] for line in told.splitlines() if " venusrl_" in line]


def forwarding() -> dict[str, str]:
    places = Path("/proc/sys/net/ipv4/conf").glob("*/forwarding")
    return {place.parent.name: place.read_text() for place in places if not place.parent.name.startswith("vs")}


async def test_the_last_network_leaves_the_machine_as_it_was(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    if tables():
        pytest.skip(f"another service gives its sandboxes networks here: {tables()}")
    before = forwarding()
    first, second = [await runtime.create(spec(name, network=Network(internet=True))) for name in ("one", "two")]
    await first.kill()
    assert tables() == [runtime.egress._table]
    assert await reaches(second, SERVER)
    await second.kill()
    assert tables() == []
    assert forwarding() == before
    third = await runtime.create(spec("three", network=Network(internet=True)))
    assert await reaches(third, SERVER)
    await runtime.close()
    # A service that was killed, and its sandbox with it: whoever comes next tidies up.
    async with running(tmp_path / "ns") as later:
        await later.sweep(set())
        assert tables() == []
        assert forwarding() == before


async def test_forwarding_stays_on_while_another_service_needs_it(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    if tables():
        pytest.skip(f"another service gives its sandboxes networks here: {tables()}")
    before = forwarding()
    async with running(tmp_path / "other") as other:
        mine = await runtime.create(spec("mine", network=Network(internet=True)))
        theirs = await other.create(spec("theirs", network=Network(internet=True)))
        on = forwarding()
        await mine.kill()
        assert forwarding() == on
        assert await reaches(theirs, SERVER)
        await theirs.kill()
    assert forwarding() == before
