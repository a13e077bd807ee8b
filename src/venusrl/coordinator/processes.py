"""Child processes that are started, watched, restarted and stopped, and never left behind.

Owns: ``SupervisedProcess`` (one child at a time under one name), its log file, limits and end. The guardian
(``guardian.py``) is the small program between us and each child; ``supervisor.py`` keeps background *tasks*.

Must not know: what a child does, the store, the scheduler.

Guarantees:
- A child, with every process it started, is gone when ``wait_exit`` or ``stop`` returns, and when this process
  dies in any way, kill -9 included: the guardian holds the read end of a pipe whose write end is ours alone,
  so the kernel tells it. (A bare PDEATHSIG fires when the *thread* that forked ends, misses a parent that died
  first, and does not reach grandchildren; the guardian uses it against its own death only.)
- Ctrl-C at the terminal reaches only this process: a child has its own session.
- ``stop`` is bounded: TERM, then KILL after the grace period, then an error.
- An exit carries the last lines of the child's log, so that an error can name its cause.
- Signals never hit a stranger: a child's pid stays taken until its group was swept and it was collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from venusrl.coordinator.errors import ProcessError, ShutdownTimeout

GRACE_S = 10.0
_KILL_S = 5.0
"""How long a killed process may take to vanish: only one stuck in the kernel takes any time."""
_LAST_LINES = 15
_LAST_BYTES = 8192
_BACKOFF_S = 0.5
_BACKOFF_MAX_S = 15.0
_SETTLED_S = 60.0
"""A child that lived this long was healthy: its next restart waits no longer than the first one."""
_GUARDIAN = Path(__file__).with_name("guardian.py")


class Command(msgspec.Struct, frozen=True):
    """What to run. ``env`` is added to this process's environment. ``cpus``: pin to these, empty = any."""

    argv: Sequence[str]
    env: Mapping[str, str] = {}
    cwd: Path | None = None
    cpus: tuple[int, ...] = ()
    nice: int = 0


class ProcessExit(msgspec.Struct, frozen=True):
    """How a child ended. ``code`` is negative for a signal; ``asked``: it was told to stop."""

    name: str
    pid: int
    code: int
    wall_s: float
    asked: bool
    log_path: Path
    last_lines: tuple[str, ...]

    def __str__(self) -> str:
        how = f"ended with exit code {self.code}" if self.code >= 0 else f"was killed by {_signal_name(-self.code)}"
        text = f"{self.name} {how} after {self.wall_s:.1f} s"
        if self.code == -signal.SIGKILL and not self.asked:
            text += " (by hand, or by the kernel when memory ran out)"
        if not self.last_lines:
            return f"{text}; it wrote nothing to {self.log_path}"
        return f"{text}; the last lines of {self.log_path}:\n" + "\n".join(f"  {line}" for line in self.last_lines)


class SupervisedProcess:
    """A named child: ``start`` it, await ``wait_exit``, ``stop`` it; or let ``keep_running`` do all three.

    ``command`` may be a function, called at each start, when a restart needs another port or model.
    ``on_exit`` is called once an exit, before any waiter resumes.
    """

    def __init__(
        self,
        name: str,
        command: Command | Callable[[], Command],
        *,
        log_path: Path,
        on_exit: Callable[[ProcessExit], None] | None = None,
    ) -> None:
        self.name = name
        self.starts = 0
        self._command = command
        self._log_path = log_path
        self._on_exit = on_exit
        self._child: _Child | None = None
        self._stop_asked = asyncio.Event()

    @property
    def running(self) -> bool:
        return self._child is not None and not self._child.exited.done()

    @property
    def pid(self) -> int | None:
        """Of the child's guardian, which leads its session; None unless running."""
        return self._child.popen.pid if self._child is not None and self.running else None

    async def start(self) -> None:
        """Start the child. Raises ProcessError when this machine cannot."""
        if self.running:
            raise ProcessError(f"{self.name} is running already")
        command = self._command() if callable(self._command) else self._command
        _check(self.name, command)
        self._stop_asked.clear()
        self.starts += 1
        try:
            self._child = _Child(self.name, command, self._log_path, self.starts, self._on_exit)
        except OSError as error:
            raise ProcessError(f"{self.name} cannot be started: {error}") from error

    async def wait_exit(self) -> ProcessExit:
        """Wait for the child that was started last to end; returns at once if it has."""
        if self._child is None:
            raise ProcessError(f"{self.name} was never started")
        return await asyncio.shield(self._child.exited)

    async def stop(self, grace_s: float = GRACE_S) -> ProcessExit | None:
        """End the child: TERM, after ``grace_s`` KILL. None if it never ran. Cancelled, it kills at once.

        Raises ShutdownTimeout if it outlives that, which only a process stuck in the kernel does.
        """
        self._stop_asked.set()
        if self._child is None:
            return None
        return await self._child.stop(grace_s)

    async def keep_running(self, restarts: int, *, final: tuple[int, ...] = ()) -> ProcessExit:
        """Run the child until it ends with exit code 0 or is stopped, starting it again when it dies.

        Raises ProcessError with the last exit as its text when ``restarts`` are used up, or at once for an exit code
        in ``final``: by it the child says that another start would end the same. Cancelled, it stops the child.
        """
        delay = _BACKOFF_S
        while True:
            await self.start()
            try:
                end = await self.wait_exit()
            except asyncio.CancelledError:
                await self.stop()
                raise
            if end.asked or end.code == 0:
                return end
            if end.code in final:
                raise ProcessError(str(end))
            if restarts <= 0:
                raise ProcessError(f"{end}\nand it may not be started again ({self.starts} starts)")
            restarts -= 1
            delay = _BACKOFF_S if end.wall_s >= _SETTLED_S else delay
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_asked.wait(), delay)
                return end
            delay = min(2 * delay, _BACKOFF_MAX_S)


class _Child:
    """One incarnation: its process, its lifeline and its end."""

    def __init__(
        self,
        name: str,
        command: Command,
        log_path: Path,
        number: int,
        on_exit: Callable[[ProcessExit], None] | None,
    ) -> None:
        self._name = name
        self._log_path = log_path
        self._on_exit = on_exit
        self._asked = False
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[ProcessExit] = self._loop.create_future()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        end_of_life, self._lifeline = os.pipe2(os.O_CLOEXEC)
        try:
            os.write(log, f"--- {name}, start {number}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            self._log_start = os.fstat(log).st_size
            self._started = time.monotonic()
            self.popen = _spawn(command, end_of_life, log)
            self._pidfd = os.pidfd_open(self.popen.pid)
        except OSError:
            os.close(self._lifeline)  # a guardian that did start ends itself
            raise
        finally:
            os.close(end_of_life)
            os.close(log)
        self._loop.add_reader(self._pidfd, self._ended)

    async def stop(self, grace_s: float) -> ProcessExit:
        self._asked = self._asked or not self.exited.done()
        try:
            if not self.exited.done():
                self._send(signal.SIGTERM)
                await self._wait(grace_s)
        finally:
            self._cut()
        if not await self._wait(_KILL_S):
            self._sweep()
            if not await self._wait(_KILL_S):
                raise ShutdownTimeout(f"{self._name} (process {self.popen.pid}) survived KILL: stuck in the kernel")
        return self.exited.result()

    async def _wait(self, timeout_s: float) -> bool:
        await asyncio.wait({self.exited}, timeout=timeout_s)
        return self.exited.done()

    def _cut(self) -> None:
        """Let go of the lifeline: the guardian kills everything under it."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _send(self, number: int) -> None:
        # Not collected yet, so the pid is still this child's.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.popen.pid, number)

    def _sweep(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._cut()
        self._sweep()  # what a killed guardian could not end; before the pid is given back by wait()
        end = ProcessExit(
            name=self._name,
            pid=self.popen.pid,
            code=self.popen.wait(),
            wall_s=time.monotonic() - self._started,
            asked=self._asked,
            log_path=self._log_path,
            last_lines=_last_lines(self._log_path, self._log_start),
        )
        try:
            if self._on_exit is not None:
                self._on_exit(end)
        finally:
            if not self.exited.done():
                self.exited.set_result(end)


def _spawn(command: Command, end_of_life: int, log: int) -> subprocess.Popen[bytes]:
    spec = {"argv": list(command.argv), "cpus": list(command.cpus), "nice": command.nice}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_GUARDIAN), json.dumps(spec)],
        stdin=end_of_life,
        stdout=log,
        stderr=log,
        env={**os.environ, **command.env},
        cwd=command.cwd,
        start_new_session=True,
    )


def _check(name: str, command: Command) -> None:
    if not command.argv:
        raise ProcessError(f"{name} has no command")
    if absent := set(command.cpus) - os.sched_getaffinity(0):
        raise ProcessError(f"{name} cannot be pinned to CPUs {sorted(absent)}: this process may not use them")


def _last_lines(path: Path, start: int) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return (f"(the log cannot be read: {error.strerror})",)
    return tuple(line.rstrip() for line in lines if line.strip())[-_LAST_LINES:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
