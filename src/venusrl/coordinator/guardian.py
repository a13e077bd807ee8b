"""The small program between the coordinator and each of its children.

``python -I -S guardian.py JSON`` starts ``argv`` of the JSON and watches over it. It is a file of its own,
imports nothing of VenusRL and stays single-threaded, because it must start fast and behave at the worst moment.

Owns: one program and every process that descends from it.

Must not know: what the program is.

Guarantees:
- When standard input ends (the coordinator, the only one to hold the other end, has closed it or died in any
  way), the program and all of its descendants are killed, those too that made sessions of their own: orphans
  come to the guardian, which is their subreaper.
- When the program ends, its remaining descendants are killed, and the guardian ends the same way: same exit
  code, same signal. TERM and INT are handed on to the program.
- When the guardian itself is killed, the kernel kills the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_HANDED_ON = (signal.SIGTERM, signal.SIGINT)
_CANNOT_START = 127


def main() -> NoReturn:
    spec = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (*_HANDED_ON, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    program = _start(spec, libc)
    _end_like(_watch(program, woken))


def _start(spec: dict[str, Any], libc: ctypes.CDLL) -> int:
    guardian = os.getpid()
    # Blocked until the program's own handlers are back, so that a TERM in between is kept, not lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)
    program = os.fork()
    if program:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return program
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guardian:
            os._exit(_CANNOT_START)  # the guardian died before the kernel was told to tell us
        signal.set_wakeup_fd(-1)
        for number in (*_HANDED_ON, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if spec["cpus"]:
            os.sched_setaffinity(0, spec["cpus"])
        os.nice(spec["nice"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(spec["argv"][0], spec["argv"])
    except OSError as error:
        os.write(2, f"cannot start {spec['argv'][0]}: {error.strerror}\n".encode())
    finally:
        os._exit(_CANNOT_START)


def _watch(program: int, woken: int) -> int:
    """Wait until the program ends, or end it; returns its wait status. Nothing of it is left."""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            for number in os.read(woken, 512):
                if number in _HANDED_ON:
                    _signal(program, number)
            status = _reap(program)
            if status is not None:
                _end_descendants()
                return status
        if 0 in ready and not os.read(0, 512):
            _end_descendants()
            return int(signal.SIGKILL)


def _reap(program: int) -> int | None:
    """Collect the dead; the program's status when it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == program:
            found = status


def _end_descendants() -> None:
    # Killing a child makes its own children ours, so this ends when, and only when, none is left.
    while True:
        for child in _children():
            _signal(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    me, found = os.getpid(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    parent = int(stat.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # ended while we looked
            if parent == me:
                found.append(int(name))
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _end_like(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core dump is enough
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
