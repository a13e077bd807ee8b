"""A jailed program reaches what the rule allows and nothing else: real network namespaces, a real skopeo."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from venusrl.sandboxes.templates import oci, outward
from venusrl.sandboxes.templates.errors import BadTemplate
from venusrl.sandboxes.templates.store import Store
from venusrl.sandboxes.templates.unpack import Bounds

PATIENCE_S = 120.0
BOUNDS = Bounds(bytes=1 << 20, entries=10)
ASK = """
import os, socket, sys
port = int(os.environ["HTTPS_PROXY"].rpartition(":")[2])
proxy = socket.create_connection(("127.0.0.1", port))
proxy.sendall(sys.argv[1].encode() + b"\\r\\n\\r\\n")
file = proxy.makefile("rb")
print(file.readline().decode().strip())
while file.readline().strip(): pass
proxy.sendall(b"hello\\n")
proxy.shutdown(socket.SHUT_WR)
print(file.read().decode())
"""


@pytest.fixture(autouse=True)
def jail(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    if (made := outward.run(["true"], PATIENCE_S)).returncode != 0:
        pytest.skip(f"no jail can be made here: {made.stderr.strip()}")


@pytest.fixture
def secret() -> Iterator[int]:
    """A port of loopback that tells a secret to whoever says something."""

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as one:
                    one.sendall(b"secret after " + one.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def asked(line: str, allowed: outward.Allowed = outward.not_here, resolve: outward.Resolve = outward.resolved) -> str:
    done = outward.run([sys.executable, "-c", ASK, line], PATIENCE_S, allowed=allowed, resolve=resolve)
    return done.stdout + done.stderr


def loopback_too(_: outward.Address) -> bool:
    return True


def test_what_the_rule_allows_is_reached_in_both_directions(secret: int) -> None:
    said = asked(f"CONNECT 127.0.0.1:{secret} HTTP/1.1", loopback_too)
    assert said.startswith("HTTP/1.1 200"), said
    assert "secret after hello" in said


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0", "127.1"])
def test_the_machine_itself_is_not_reached(secret: int, host: str) -> None:
    said = asked(f"CONNECT {host}:{secret} HTTP/1.1")
    assert said.startswith("HTTP/1.1 403"), said
    assert "own network" in said
    assert "secret" not in said


def test_only_tls_passes(secret: int) -> None:
    said = asked(f"GET http://127.0.0.1:{secret}/ HTTP/1.1", loopback_too)
    assert "403 only TLS passes" in said


def test_a_name_that_changes_its_meaning_gains_nothing(secret: int) -> None:
    """The first answer is harmless and nobody is there; every later one would be the machine itself."""
    answers: list[list[str]] = []

    async def resolve(host: str, port: int) -> list[str]:
        answers.append(["127.0.0.1"] if answers else ["127.0.0.2"])
        return answers[-1]

    def the_harmless_one(address: outward.Address) -> bool:
        return address == ipaddress.ip_address("127.0.0.2")

    said = asked(f"CONNECT changing.test:{secret} HTTP/1.1", the_harmless_one, resolve)
    assert "403" in said
    assert "cannot be reached" in said
    assert answers == [["127.0.0.2"]], "it was asked for once, and the connection went there"


def test_nothing_is_reached_past_the_proxy(secret: int) -> None:
    code = f"import socket; socket.create_connection(('127.0.0.1', {secret}))"
    done = outward.run([sys.executable, "-c", code], PATIENCE_S, allowed=loopback_too)
    assert "ConnectionRefusedError" in done.stderr


def test_a_command_that_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        outward.run(["sleep", "1000"], 0.5)


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed: apt-get install skopeo")
def test_skopeo_goes_by_the_proxy_and_tells_why_not(tmp_path: Path) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    command = ["skopeo", "--insecure-policy", "copy", "docker://registry.test/x:1", f"oci:{tmp_path}/x:image"]
    done = outward.run(command, PATIENCE_S, resolve=resolve)
    assert done.returncode != 0
    assert "registry.test is of the service's own network" in done.stderr


def own_address() -> str:
    """Of a machine that has another than loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("the machine has no address besides loopback")
        return str(probe.getsockname()[0])


def test_the_machines_other_addresses_are_its_own_too(secret: int) -> None:
    said = asked(f"CONNECT {own_address()}:{secret} HTTP/1.1")
    assert said.startswith("HTTP/1.1 403"), said
    assert "own network" in said


@pytest.mark.parametrize("registry", ["127.0.0.1:5000", "localhost", "localhost:80", "169.254.169.254", "0.0.0.0:1"])
@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed: apt-get install skopeo")
def test_an_image_of_the_machines_own_is_refused_with_the_mend(tmp_path: Path, registry: str) -> None:
    store = Store(tmp_path)
    with pytest.raises(BadTemplate, match="own network: ask the operator to import it"):
        oci.pull(store, f"{registry}/x:1", tmp_path, BOUNDS, outward_only=True)


async def test_jails_leave_nothing_open() -> None:
    """Ten of them: no descriptor of this process stays."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await asyncio.to_thread(outward.run, ["true"], PATIENCE_S)
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "but for what the event loop itself holds"
