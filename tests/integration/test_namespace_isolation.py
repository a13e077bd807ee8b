"""What a sandboxed command can see and do: nothing beyond its own files.

Each test is an attempt to reach out, and then a look at whether a neighbour still works.
"""

# ruff: noqa: ASYNC240 - a test may look at a local file

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.namespaces import LIMITS, output, serving
from tests.integration.test_namespace_limits import processes_with
from tests.waiting import until

from venusrl.sandboxes.node import EmbeddedNode
from venusrl.sandboxes.templates import roots as templates

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EmbeddedNode]:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "hunter2")
    async with serving(tmp_path / "node") as made:
        yield made


@pytest.fixture
async def sandbox(node: EmbeddedNode) -> AsyncIterator[str]:
    made = await node.create("host", LIMITS, {})
    neighbour = await node.create("host", LIMITS, {})
    await node.write(neighbour, {"mine": b"untouched"})
    yield made
    assert await output(node, neighbour, "cat mine") == "untouched"


async def python(node: EmbeddedNode, sandbox: str, code: str) -> str:
    await node.write(sandbox, {"/tmp/attempt.py": code.encode()})
    return await output(node, sandbox, "python3 /tmp/attempt.py")


async def test_a_command_is_never_the_machines_root(node: EmbeddedNode, sandbox: str) -> None:
    task = asyncio.create_task(node.run(sandbox, "exec sleep 321.5", timeout_s=300))
    uids: set[str] = set()

    def seen() -> bool:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "cmdline").read_bytes() == b"sleep\x00321.5\x00":
                    status = (entry / "status").read_text()
                    uids.add(next(line for line in status.splitlines() if line.startswith("Uid:")))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return bool(uids)

    await until(seen)
    task.cancel()
    assert all("\t0" not in line for line in uids)


async def test_no_privilege_is_left(node: EmbeddedNode, sandbox: str) -> None:
    status = await output(node, sandbox, "cat /proc/self/status /proc/1/status")
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert status.count(f"{name}:\t0000000000000000") == 2
    assert status.count("NoNewPrivs:\t1") == 2
    assert "Seccomp:\t2" in status


async def test_only_three_descriptors_are_inherited(node: EmbeddedNode, sandbox: str) -> None:
    found = await python(node, sandbox, "import os\nfor n in os.listdir('/proc/self/fd'): print(n)")
    # The fourth is the listing's own.
    assert sorted(found.split()) == ["0", "1", "2", "3"]
    targets = await output(node, sandbox, "readlink /proc/self/fd/0; readlink /proc/self/fd/1")
    assert targets.startswith("/dev/null\npipe:")


async def test_files_of_the_machine_are_not_there(node: EmbeddedNode, sandbox: str) -> None:
    for path in ("/etc/shadow", "/etc/hostname", "/root", "/home", "/var", "/sys", "/run", str(REPOSITORY), sys.prefix):
        assert (await node.run(sandbox, f"ls -d {path}")).exit_code != 0, path
    listing = await output(node, sandbox, "ls /")
    known = {*templates.HOST_DIRECTORIES, *templates.WRITABLE, "dev", "etc", "opt", "proc"}
    assert set(listing.split()) <= known


async def test_only_its_own_directories_are_writable(node: EmbeddedNode, sandbox: str) -> None:
    for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/usr/bin/sh", "/etc/passwd", "/bin/x"):
        assert (await node.run(sandbox, f"echo x > {path}")).exit_code != 0, path
    for path in ("/work/x", "/tmp/x", "/logs/x", "/dev/shm/x"):
        assert (await node.run(sandbox, f"echo x > {path}")).exit_code == 0, path


async def test_kernel_settings_are_not_writable(node: EmbeddedNode, sandbox: str) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    settings = (
        "kernel/core_pattern kernel/hostname vm/overcommit_memory fs/file-max kernel/modprobe net/ipv4/ip_forward"
    )
    for name in settings.split():
        result = await node.run(sandbox, f"echo '|/work/evil' > /proc/sys/{name}")
        assert result.exit_code != 0, name
    assert (await node.run(sandbox, "echo c > /proc/sysrq-trigger")).exit_code != 0
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


async def test_nothing_of_the_manager_shows_through_pid_1(node: EmbeddedNode, sandbox: str) -> None:
    seen = await output(
        node,
        sandbox,
        "env; tr '\\0' ' ' < /proc/1/environ; tr '\\0' ' ' < /proc/1/cmdline; readlink /proc/1/exe /proc/1/cwd;"
        " cat /proc/1/maps /proc/self/mountinfo /proc/self/cgroup",
    )
    assert "hunter2" not in seen
    for word in (str(REPOSITORY), "site-packages", os.path.expanduser("~") + "/", "pytest"):
        assert word not in seen
    assert await output(node, sandbox, "tr -d '\\0' < /proc/1/environ") == ""


async def test_processes_of_the_machine_are_invisible_and_unkillable(node: EmbeddedNode, sandbox: str) -> None:
    pids = await output(node, sandbox, "ls -d /proc/[0-9]* | wc -l")
    assert int(pids) <= 5
    result = await node.run(sandbox, f"kill -9 {os.getpid()}")
    assert result.exit_code != 0
    await node.run(sandbox, "kill -9 -1")  # everything it may kill: only its own
    assert await output(node, sandbox, "echo alive") == "alive"


async def test_other_sandboxes_are_invisible(node: EmbeddedNode, sandbox: str) -> None:
    other = await node.create("host", LIMITS, {})
    await node.write(other, {"/tmp/secret": b"s3cret", "/work/secret": b"s3cret"})
    assert "s3cret" not in await output(node, sandbox, "cat /tmp/* /work/* /dev/shm/*; find / -name secret 2>/dev/null")
    busy = asyncio.create_task(node.run(other, "exec sleep 532.1"))
    await until(lambda: processes_with("sleep 532.1") != [])
    assert "sleep 532.1" not in await output(node, sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    busy.cancel()


async def test_there_is_no_network(node: EmbeddedNode, sandbox: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
for address in (("127.0.0.1", {port}), ("10.0.0.1", 80), ("8.8.8.8", 53)):
    try:
        socket.create_connection(address, timeout=1)
        print("connected", address)
    except OSError as error:
        print("no", error.errno)
"""
        assert "connected" not in await python(node, sandbox, code)
    interfaces = await output(node, sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")
    assert interfaces == "lo"


async def test_abstract_sockets_of_the_machine_are_out_of_reach(node: EmbeddedNode, sandbox: str) -> None:
    name = f"\0venusrl-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        code = f"import socket\ns = socket.socket(socket.AF_UNIX)\ntry: s.connect({name!r}); print('connected')\n"
        code += "except OSError as error: print(type(error).__name__)\n"
        assert await python(node, sandbox, code) == "ConnectionRefusedError"


async def test_socket_families_that_namespaces_do_not_contain_are_denied(node: EmbeddedNode, sandbox: str) -> None:
    code = """
import socket
for family in (40, 38, 17, 16, 1, 2, 10, 31, 44):
    try:
        socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_STREAM).close()
        print(family, "ok")
    except OSError as error:
        print(family, error.errno)
"""
    seen = dict(line.split() for line in (await python(node, sandbox, code)).splitlines())
    assert {family for family, word in seen.items() if word == "ok"} == {"16", "1", "2", "10"}
    assert seen["40"] == seen["38"] == seen["17"] == "97"


SYSTEM_CALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(*arguments)
    print(name, "allowed" if result >= 0 else errno.errorcode[ctypes.get_errno()])
zero = ctypes.c_ulong(0)
path = b"/work"
call("mount", 165, b"none", path, b"tmpfs", zero, None)
call("umount2", 166, b"/work", 0)
call("unshare-user", 272, ctypes.c_ulong(0x10000000))
call("unshare-mount", 272, ctypes.c_ulong(0x20000))
call("setns", 308, 0, 0)
call("ptrace", 101, 0, 0, 0, 0)
call("keyctl", 250, 0, -3, 0)
call("add_key", 248, b"user", b"k", b"v", 1, -3)
call("io_uring_setup", 425, 8, None)
call("bpf", 321, 0, None, 0)
call("userfaultfd", 323, 0)
call("perf_event_open", 298, None, 0, -1, -1, 0)
call("open_tree", 428, -100, b"/", 1)
call("fsopen", 430, b"tmpfs", 0)
call("chroot", 161, path)
call("pivot_root", 155, path, path)
call("process_vm_readv", 310, 1, None, 0, None, 0, 0)
call("clone-newuser", 56, ctypes.c_ulong(0x10000011), zero, zero, zero, zero)
call("clone3", 435, None, 0)
call("mknod", 133, b"/work/disk", 0o60600, (8 << 8))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
async def test_system_calls_that_reach_past_namespaces_are_denied(node: EmbeddedNode, sandbox: str) -> None:
    lines = (await python(node, sandbox, SYSTEM_CALLS)).splitlines()
    answers = dict(line.split() for line in lines)
    assert len(answers) == 20
    assert answers.pop("clone3") == "ENOSYS"
    assert set(answers.values()) == {"EPERM"}, answers


async def test_set_user_id_programs_give_nothing(node: EmbeddedNode, sandbox: str) -> None:
    code = "import os\nos.chmod('/tmp/x', 0o4755)\ntry: os.setuid(0); print('root')\nexcept OSError: print('denied')"
    await node.write(sandbox, {"/tmp/x": b"#!/bin/sh\nid -u\n"})
    assert await python(node, sandbox, code) == "denied"
    whoami = await output(
        node, sandbox, "/tmp/x; for p in su passwd mount; do command -v $p >/dev/null && $p 2>&1; done; id -u"
    )
    assert whoami.splitlines()[0] == whoami.splitlines()[-1] == "1000"


async def test_threads_processes_and_pipes_work(node: EmbeddedNode, sandbox: str) -> None:
    code = """
import multiprocessing, subprocess, tempfile, threading, socket
def square(x): return x * x
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool: print(pool.map(square, [1, 2, 3]))
    thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
    print(subprocess.run(["sh", "-c", "echo sub | cat"], capture_output=True, text=True).stdout, end="")
    with tempfile.TemporaryFile() as f: f.write(b"x")
    a, b = socket.socketpair(); a.send(b"1"); print(b.recv(1))
    server = socket.create_server(("127.0.0.1", 0)); socket.create_connection(server.getsockname()); print("loopback")
"""
    assert (await python(node, sandbox, code)).splitlines() == ["[1, 4, 9]", "thread", "sub", "b'1'", "loopback"]
