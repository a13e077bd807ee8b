"""Attempts to see what is not a sandbox's own: the machine's files, its secrets, its network, other sandboxes."""

# ruff: noqa: ASYNC240 - a test may look at a local file

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.persistent import output, running, shell, spec

from venusrl.sandboxes.agent.api import AgentError
from venusrl.sandboxes.runtimes.base import Instance

REPOSITORY = Path(__file__).resolve().parents[2]
USERS = ("user", "root")


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Instance, Instance]]:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "hunter2")
    async with running(tmp_path / "ns") as runtime:
        made = await runtime.create(spec("bad")), await runtime.create(spec("neighbour"))
        await output(made[1], "echo untouched > mine")
        yield made
        assert await output(made[1], "cat mine") == "untouched"
        assert await output(made[0], "echo well") == "well"


@pytest.mark.parametrize("user", USERS)
async def test_files_of_the_machine_are_not_there(pair: tuple[Instance, Instance], tmp_path: Path, user: str) -> None:
    (tmp_path / "secret").write_text("hunter2")
    (tmp_path / "secret").chmod(0o644)
    for path in ("/etc/shadow", "/etc/hostname", "/etc/resolv.conf", "/boot", "/var/lib/dpkg", str(REPOSITORY)):
        assert (await shell(pair[0], f"ls -d {path}", user))[0] != 0, path
    tricks = (
        str(tmp_path / "secret"),
        f"/proc/1/root{tmp_path}/secret",
        f"/proc/self/cwd/../../../../..{tmp_path}/secret",
    )
    for path in tricks:
        assert (await shell(pair[0], f"cat {path}", user))[0] != 0, path
        assert (await shell(pair[0], f"ln -sf {path} link; cat link", user))[0] != 0, path
    assert (await shell(pair[0], "grep -r hunter2 /root /home /tmp /var /run /sys /opt /etc", user))[0] != 0


@pytest.mark.parametrize("user", USERS)
async def test_only_its_own_directories_are_writable(pair: tuple[Instance, Instance], user: str) -> None:
    for path in ("/x", "/usr/x", "/usr/bin/sh", "/usr/bin/env", "/dev/x", "/dev/null/x", "/proc/x", "/sys/x", "/opt/x"):
        assert (await shell(pair[0], f"echo x > {path}", user))[0] != 0, path
    for path in ("/work/x", "/tmp/x", "/logs/x", "/dev/shm/x", "/home/user/x", "/var/tmp/x"):
        assert (await shell(pair[0], f"echo x > {path}", user))[0] == 0, path
    assert (await shell(pair[0], "mv /usr/bin/env /tmp/ || rm -f /usr/bin/env || chmod 777 /usr", user))[0] != 0
    assert os.access("/usr/bin/env", os.X_OK)


@pytest.mark.parametrize("user", USERS)
async def test_nothing_of_the_service_shows(pair: tuple[Instance, Instance], tmp_path: Path, user: str) -> None:
    look = "env; for f in environ cmdline maps mountinfo mounts cgroup stat status comm; do"
    look += (
        " cat /proc/1/$f /proc/self/$f 2>/dev/null | tr '\\0' ' '; done; readlink /proc/1/* /proc/self/* 2>/dev/null;"
    )
    look += (
        " cat /proc/net/unix /proc/locks /proc/net/* /proc/sysvipc/* 2>/dev/null; ls -la /proc/1/fd /proc/self/fd; true"
    )
    seen = await output(pair[0], look, user)
    for word in ("hunter2", str(REPOSITORY), "site-packages", sys.prefix, str(tmp_path), "pytest", ".cache"):
        assert word not in seen, word


@pytest.mark.parametrize("user", USERS)
async def test_secrets_of_the_kernel_are_masked(pair: tuple[Instance, Instance], user: str) -> None:
    names = (
        "kcore keys key-users kallsyms modules timer_list sched_debug interrupts config.gz cmdline partitions swaps "
    )
    names += "diskstats kmsg vmallocinfo slabinfo iomem ioports"
    for name in names.split():
        told = await shell(pair[0], f"head -c 100 /proc/{name} 2>/dev/null | tr -d '\\0' | grep -v '^0*-0*'", user)
        assert told[1] == "", name
    for name in ("acpi", "bus", "driver", "irq", "scsi"):
        assert (await shell(pair[0], f"ls -A /proc/{name} 2>/dev/null", user))[1] == "", name


@pytest.mark.parametrize("user", USERS)
async def test_the_machines_network_is_out_of_reach(pair: tuple[Instance, Instance], user: str) -> None:
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as local:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        abstract = f"\0venusrl-escape-{os.getpid()}-{user}"
        local.bind(abstract)
        local.listen()
        port = listener.getsockname()[1]
        addresses = ["127.0.0.1", "0.0.0.0", "169.254.169.254", "10.0.0.1", "192.168.0.1", *own_addresses()]
        code = f"""
import socket
for address in {addresses!r}:
    with socket.socket() as made:
        made.settimeout(0.3)
        assert made.connect_ex((address, {port})), address
for place in ({abstract!r}, "/run/dbus/system_bus_socket", "/var/run/docker.sock"):
    with socket.socket(socket.AF_UNIX) as made:
        try:
            made.connect(place)
        except OSError:
            continue
        raise SystemExit(f"reached {{place!r}}")
"""
        await output(pair[0], f"cat > /tmp/reach.py <<'END'\n{code}\nEND\npython3 /tmp/reach.py", user)
        listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert await output(pair[0], "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '", user) == "lo"


def own_addresses() -> list[str]:
    """This machine's addresses."""
    found = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent; the kernel only chooses a source
        found.add(probe.getsockname()[0])
    return sorted(map(str, found))


async def test_a_neighbour_cannot_be_reached(pair: tuple[Instance, Instance]) -> None:
    server = "import socket,time\ns=socket.socket()\ns.bind(('0.0.0.0',4321))\ns.listen()\n"
    server += "u=socket.socket(socket.AF_UNIX)\nu.bind('\\0here')\nu.listen()\nopen('/tmp/up','w')\ntime.sleep(1000)"
    start = f"(python3 - <<'END' &\n{server}\nEND\n) >/dev/null 2>&1; while ! test -e /tmp/up; do sleep 0.05; done"
    await output(pair[1], start)
    client = "import socket\nassert socket.socket().connect_ex(('127.0.0.1',4321))\n"
    client += "u=socket.socket(socket.AF_UNIX)\ntry:\n u.connect('\\0here')\nexcept OSError:\n raise SystemExit(0)\n"
    client += "raise SystemExit(1)"
    for user in USERS:
        await output(pair[0], f"python3 - <<'END'\n{client}\nEND", user)
        assert await output(pair[0], "ls /proc | grep -c '^[0-9]' ", user) in {str(n) for n in range(2, 7)}
    for line in ("ipcs -m", "ipcs -q"):
        assert "neighbour" not in (await shell(pair[0], line))[1]


async def test_the_file_interface_follows_no_link_out(pair: tuple[Instance, Instance], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    agent = pair[0].agent
    links = "ln -s /proc/1/root out1; ln -s /etc/shadow out2; ln -s ../../../../../../etc/hostname out3; "
    await output(pair[0], links + f"ln -s {tmp_path} out4; ln -s /dev/.files out5")
    for path in (f"out1{tmp_path}/secret", "out2", "out3", "out4/secret", "../../../../../etc/shadow", "out5/upper"):
        for user in USERS:
            with pytest.raises(AgentError):
                async for _ in agent.read(path, user):
                    pass

    async def evil() -> AsyncIterator[bytes]:
        yield b"evil"

    with pytest.raises(AgentError):
        await agent.write("/usr/bin/evil", "root", evil())
    assert not Path("/usr/bin/evil").exists()
