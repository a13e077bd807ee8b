"""Attempts to leave a persistent sandbox through the kernel's doors, as its user and as its root."""

# ruff: noqa: ASYNC220, ASYNC240 - a test may look at a local file, and start a process

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.integration.persistent import output, running, shell, spec

from venusrl.sandboxes.runtimes.base import Instance
from venusrl.sandboxes.runtimes.namespace import kernel
from venusrl.sandboxes.runtimes.namespace.instance import Record

USERS = ("user", "root")
REFUSED = {errno.EPERM, errno.EACCES, errno.ENOSYS}
ATTEMPTS = """
import ctypes, errno, fcntl, json, os, socket, sys, termios
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    return 0 if result >= 0 else ctypes.get_errno()
def attempt(work):
    try:
        work()
    except OSError as error:
        return error.errno
    return 0
buffer = ctypes.create_string_buffer(256)
found = {
    "mount": call(165, b"none", b"/tmp", b"tmpfs", 0, None),
    "bind": call(165, b"/proc", b"/tmp", None, 4096, None),
    "umount": call(166, b"/proc/keys", 2),
    "pivot_root": call(155, b"/tmp", b"/tmp"),
    "chroot": call(161, b"/tmp"),
    "unshare user": call(272, 0x10000000),
    "unshare mounts": call(272, 0x20000),
    "clone user": call(56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": call(435, buffer, 88),
    "setns": call(308, 0, 0),
    "ptrace init": call(101, 16, 1, 0, 0),
    "ptrace seize": call(101, 0x4206, 1, 0, 0),
    "process_vm_readv": call(310, 1, buffer, 1, buffer, 1, 0),
    "process_vm_writev": call(311, 1, buffer, 1, buffer, 1, 0),
    "pidfd_getfd": call(438, 0, 0, 0),
    "add_key": call(248, b"user", b"a", b"b", 1, -3),
    "request_key": call(249, b"user", b"a", None, -3),
    "keyctl": call(250, 0, -3, 1),
    "bpf": call(321, 0, buffer, 64),
    "perf": call(298, buffer, 0, -1, -1, 0),
    "io_uring": call(425, 8, buffer),
    "userfaultfd": call(323, 1),
    "kexec": call(246, 0, 0, None, 0),
    "module": call(313, 0, b"", 0),
    "reboot": call(169, 0xfee1dead, 672274793, 0, None),
    "swapon": call(167, b"/tmp/x", 0),
    "syslog": call(103, 3, buffer, 200),
    "sethostname": call(170, b"evil", 4),
    "settimeofday": call(164, buffer, None),
    "clock_settime": call(227, 0, buffer),
    "open_by_handle": call(304, -100, buffer, 0),
    "name_to_handle": call(303, -100, b"/", buffer, buffer, 0),
    "fsopen": call(430, b"tmpfs", 0),
    "open_tree": call(428, -100, b"/", 1),
    "mount_setattr": call(442, -100, b"/", 0, buffer, 32),
    "fanotify": call(300, 0, 0),
    "quotactl": call(179, 0, None, 0, None),
    "acct": call(163, b"/tmp/x"),
    "iopl": call(172, 3),
    "personality": call(135, 0x8000000),
    "mknod disk": attempt(lambda: os.mknod("/tmp/disk", 0o600 | 0o060000, os.makedev(254, 0))),
    "mknod kmem": attempt(lambda: os.mknod("/tmp/mem", 0o600 | 0o020000, os.makedev(1, 1))),
    "raw": attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
    "init's memory": attempt(lambda: open("/proc/1/mem", "r+b").close()),
    "init's maps": attempt(lambda: open("/proc/1/maps").read()),
    "init's root": attempt(lambda: os.listdir("/proc/1/root/")),
    "init's files": attempt(lambda: os.readlink("/proc/1/fd/3")),
    "init's environment": attempt(lambda: open("/proc/1/environ").read()),
    "score": attempt(lambda: os.write(os.open("/proc/1/oom_score_adj", os.O_WRONLY), b"-1")),
    "files' place": attempt(lambda: os.listdir("/dev/.files")),
    "files' mode": attempt(lambda: os.chmod("/dev/.files", 0o777)),
}
families = {}
for name, family in (("vsock", 40), ("packet", 17), ("alg", 38), ("bluetooth", 31), ("can", 29), ("xdp", 44)):
    families[name] = attempt(lambda: socket.socket(family, socket.SOCK_DGRAM, 0))
master, slave = os.openpty()
found["typing"] = attempt(lambda: fcntl.ioctl(slave, 0x5412, b"x"))
print(json.dumps({"calls": found, "families": families}))
"""


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Instance, Instance]]:
    """A sandbox to misbehave in, and a neighbour that must not notice."""
    async with running(tmp_path / "ns") as runtime:
        made = await runtime.create(spec("bad")), await runtime.create(spec("neighbour"))
        await output(made[1], "echo untouched > mine; sleep 1000 & true")
        yield made
        assert await output(made[1], "cat mine; pgrep -c sleep") == "untouched\n1"
        assert await output(made[0], "echo well") == "well"


def init_of(sandbox: Instance) -> int:
    init = msgspec.json.decode(sandbox.record(), type=Record).init
    assert init is not None
    return init.pid


@pytest.mark.parametrize("user", USERS)
async def test_system_calls_that_reach_out_are_refused(pair: tuple[Instance, Instance], user: str) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the attempts are written with the call numbers of x86_64")
    await output(pair[0], f"cat > /tmp/attempts.py <<'END'\n{ATTEMPTS}\nEND")
    told = json.loads(await output(pair[0], "python3 /tmp/attempts.py", user))
    assert {name: code for name, code in told["calls"].items() if code not in REFUSED} == {}
    assert set(told["families"].values()) == {errno.EAFNOSUPPORT}


@pytest.mark.parametrize("user", USERS)
async def test_nothing_runs_as_the_machines_root_or_holds_rights_over_it(
    pair: tuple[Instance, Instance], user: str
) -> None:
    status = await output(pair[0], "cat /proc/self/status", user)
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    held = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff")), 16)
    forbidden = (2, 12, 13, 16, 17, 18, 19, 21, 22, 23, 24, 25, 27, 38, 39, 40)  # SYS_ADMIN, NET_ADMIN, SYS_PTRACE...
    assert [bit for bit in forbidden if held >> bit & 1] == []
    assert held == 0 or user == "root"
    for line in Path(f"/proc/{init_of(pair[0])}/status").read_text().splitlines():
        if line.startswith(("Uid:", "Gid:")):
            assert "0" not in line.split()[1:]


async def test_kernel_settings_are_not_writable(pair: tuple[Instance, Instance]) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    names = "kernel/core_pattern kernel/modprobe kernel/hostname vm/overcommit_memory fs/file-max kernel/sysrq "
    names += "kernel/core_uses_pid net/ipv4/ip_forward net/ipv4/conf/all/route_localnet fs/binfmt_misc/register"
    for user in USERS:
        for name in names.split():
            assert (await shell(pair[0], f"echo '|/tmp/evil' > /proc/sys/{name}", user))[0] != 0, name
        for name in ("sysrq-trigger", "self/uid_map", "irq/default_smp_affinity", "acpi/wakeup"):
            assert (await shell(pair[0], f"echo 1 > /proc/{name} && test ! -c /proc/{name}", user))[0] != 0, name
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


async def test_a_crash_runs_nothing_of_the_machines(pair: tuple[Instance, Instance]) -> None:
    code, told = await shell(pair[0], "ulimit -c; sh -c 'kill -SEGV $$'; ls core* 2>/dev/null")
    assert code != 0
    assert "core" not in told.splitlines()


async def test_a_set_user_id_program_gains_nothing(pair: tuple[Instance, Instance]) -> None:
    make = "cp /usr/bin/id /tmp/id && chown 0:0 /tmp/id && chmod 6755 /tmp/id && setcap cap_setuid+ep /tmp/id || true"
    await output(pair[0], make, "root")
    assert await output(pair[0], "stat -c %A /tmp/id; /tmp/id -u") == "-rwsr-sr-x\n1000"
    assert (await shell(pair[0], "su root -c id || sudo -n id || newgrp root"))[0] != 0
    assert (await shell(pair[0], "python3 -c 'import os; os.setuid(0)'"))[0] != 0


async def test_signals_reach_only_its_own_processes(pair: tuple[Instance, Instance]) -> None:
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        victims = [bystander.pid, init_of(pair[1]), os.getpid(), os.getppid()]
        for user in USERS:
            for victim in victims:
                await shell(pair[0], f"kill -9 {victim}", user)
            await shell(pair[0], "kill -9 -1", user)
            await shell(pair[0], "kill -9 1; kill -STOP 1; kill -TERM 1; kill -SEGV 1", user)
        assert bystander.poll() is None
        bystander.send_signal(signal.SIGKILL)
    seen = await output(pair[0], "cat /proc/[0-9]*/cmdline | tr '\\0' ' '", "root")
    assert "sleep 1000" not in seen
    assert "pytest" not in seen


async def test_limits_cannot_be_lifted_from_inside(pair: tuple[Instance, Instance]) -> None:
    for user in USERS:
        assert (await shell(pair[0], "ls /sys/fs/cgroup/*", user))[0] != 0
        groups = await output(pair[0], "cat /proc/self/cgroup", user)
        assert [line for line in groups.splitlines() if "bad" in line] == []
        assert (await shell(pair[0], "mkdir /sys/fs", user))[0] != 0
        assert (await shell(pair[0], "python3 -c 'import os; os.nice(-5)'", user))[0] != 0
        assert (await shell(pair[0], "python3 -c 'import os; os.sched_setscheduler(0, 1, os.sched_param(50))'", user))[
            0
        ] != 0


async def test_nothing_of_pid_1_tells_where_it_comes_from(pair: tuple[Instance, Instance]) -> None:
    told = "tr '\\0' ' ' < /proc/1/cmdline; cat /proc/1/comm; readlink /proc/1/exe /proc/1/cwd /proc/1/root"
    assert (await output(pair[0], f"{told}; true", "root")).split() == ["agent", "agent"]


async def test_nobody_inside_becomes_a_less_likely_victim_than_the_service(pair: tuple[Instance, Instance]) -> None:
    """With CAP_SYS_RESOURCE the kernel holds every sandbox to the score it was given, else to ours."""
    least = 300 if kernel.has_capability(kernel.CAP_SYS_RESOURCE) else int(Path("/proc/self/oom_score_adj").read_text())
    for user in USERS:
        tries = "for n in -1000 -1 0 100; do for p in 1 self $$; do echo $n > /proc/$p/oom_score_adj; done; done"
        await shell(pair[0], f"({tries}) 2> /dev/null; sleep 1000 > /dev/null 2>&1 &", user)
    group = pair[0]._maker.group(pair[0].spec.id)  # type: ignore[attr-defined]
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in group.pids()]
    assert len(scores) >= 3
    assert min(scores) >= least
