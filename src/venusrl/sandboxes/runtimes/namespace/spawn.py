"""Starting one bubblewrap.

Owns: the fork, and everything between fork and exec: control group, limits, namespaces, user, descriptors.

Must not know: what becomes of the process afterwards.

Guarantees: between fork and exec nothing is allocated that the parent relies on, and a failure ends the child
with a message on its output. The program starts with an empty environment, in its own session, with no
descriptor but its own.
"""

from __future__ import annotations

import os
import resource
import signal
from typing import NoReturn

import msgspec

from venusrl.sandboxes.protocol import Limits
from venusrl.sandboxes.runtimes.namespace import kernel
from venusrl.sandboxes.runtimes.namespace.cgroup import SandboxGroup

EXEC_FAILED = 125
_OPEN_FILES = 4096
_OOM_SCORE = "700"
"""When the whole machine runs out of memory, a sandbox goes before the run does."""


def title(node_id: str) -> str:
    """What bubblewrap is called when it works for this node."""
    return f"sandbox-{node_id}"


class Job(msgspec.Struct, frozen=True):
    """What to start. ``host_uid`` None = stay who we are (unprivileged)."""

    program: str
    title: str
    """Its argv[0], by which strays are found when their launcher was killed."""
    arguments: int
    """Descriptor with bubblewrap's own arguments."""
    command: bytes
    output: int
    inherited: tuple[int, ...]
    mounts: int
    network: int
    """Namespaces to be in when bubblewrap starts."""
    host_uid: int | None
    group: SandboxGroup | None
    limits: Limits


def start(job: Job) -> int:
    """Fork and exec; return the pid. Raises OSError when the machine cannot fork."""
    pid = os.fork()
    if pid == 0:
        _exec(job)
    return pid


def _exec(job: Job) -> NoReturn:
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _set_oom_score()
        if job.group is not None:
            job.group.enter()
        _limit(job.limits, grouped=job.group is not None, own_uid=job.host_uid is not None)
        kernel.setns(job.mounts, kernel.CLONE_NEWNS)
        kernel.setns(job.network, kernel.CLONE_NEWNET)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(job.output, 1)
        os.dup2(job.output, 2)
        kernel.close_on_exec_from(3)
        for fd in (job.arguments, *job.inherited):
            os.set_inheritable(fd, True)
        if job.host_uid is not None:
            os.setgroups([])
            os.setresgid(job.host_uid, job.host_uid, job.host_uid)
            os.setresuid(job.host_uid, job.host_uid, job.host_uid)
        kernel.set_parent_death_signal(signal.SIGKILL)
        os.chdir("/")
        argv = [job.title.encode(), b"--args", str(job.arguments).encode(), b"--", b"/bin/sh", b"-c", job.command]
        os.execve(job.program, argv, {})
    except BaseException as error:  # noqa: BLE001 - a forked child must never return into the launcher's loop
        os.write(job.output, f"the command could not be started: {error}\n".encode())
    os._exit(EXEC_FAILED)


def _set_oom_score() -> None:
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(fd, _OOM_SCORE.encode())
    os.close(fd)


def _limit(limits: Limits, grouped: bool, own_uid: bool) -> None:
    # 1, not 0: a core_pattern that pipes ignores 0, and would run the machine's handler for a sandbox's crash.
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if not grouped:
        memory = limits.memory_mib << 20
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        # Unprivileged sandboxes share one count, so that a tight limit would make them starve each other.
        processes = limits.pids if own_uid else 4 * limits.pids
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
