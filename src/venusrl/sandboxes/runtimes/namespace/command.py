"""One running command, from its start until its whole process tree is gone.

Owns: ``Command``: bubblewrap's monitor, the PID 1 it made, the output, the verdict.

Must not know: the event loop that watches its descriptors, deadlines, the socket that asked for it.

Guarantees: ``finished`` is true only when the monitor and PID 1 have been waited for, and with PID 1 the
kernel has ended everything in its PID namespace. Never blocks.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress

from venusrl.sandboxes.protocol import CommandResult, SandboxError
from venusrl.sandboxes.runtimes.namespace.output import Capture

_CHUNK = 65536
_KILLED = 128 + signal.SIGKILL
_CHILD_PID = re.compile(rb'"child-pid": (\d+)')
_EXIT_CODE = re.compile(rb'"exit-code": (\d+)')


class Command:
    """Descriptors to watch: ``output``, ``status``, ``monitor`` and, once it is known, ``init``."""

    def __init__(self, pid: int, output: int, status: int, output_bytes: int) -> None:
        self.pid = pid
        self.output: int | None = output
        self.status: int | None = status
        self.monitor: int | None = os.pidfd_open(pid)
        self.init: int | None = None
        self.init_pid: int | None = None
        self.capture = Capture(output_bytes)
        self.started = time.monotonic()
        self.timed_out = False
        self.stopped = False
        self.ended: float | None = None
        self._status_text = b""
        self._monitor_status: int | None = None

    @property
    def finished(self) -> bool:
        """Nothing of it runs any more."""
        return self.monitor is None and self.init is None

    def descriptors(self) -> list[int]:
        """What is open now."""
        return [fd for fd in (self.output, self.status, self.monitor, self.init) if fd is not None]

    def read_output(self) -> None:
        """Take what is there, at most one pipe's worth."""
        if self.output is None:
            return
        try:
            data = os.read(self.output, _CHUNK)
        except BlockingIOError:
            return
        if data:
            self.capture.feed(data)
        else:
            os.close(self.output)
            self.output = None

    def read_status(self) -> None:
        """Learn PID 1 and the exit code from bubblewrap."""
        if self.status is None:
            return
        try:
            data = os.read(self.status, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            os.close(self.status)
            self.status = None
            return
        self._status_text += data
        if self.init_pid is None and (found := _CHILD_PID.search(self._status_text)):
            self.init_pid = int(found[1])
            with suppress(ProcessLookupError):  # ended and reaped by the monitor already
                self.init = os.pidfd_open(self.init_pid)

    def kill(self) -> None:
        """End the tree: PID 1 takes everything in its namespace along."""
        for fd in (self.init, self.monitor):
            if fd is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)

    def reap(self) -> None:
        """Wait, without blocking, for the monitor and then for PID 1."""
        if self.monitor is not None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if not pid:
                return
            os.close(self.monitor)
            self.monitor = None
            self._monitor_status = status
            self.ended = time.monotonic()
            self.read_status()
            self.kill()  # what the command left behind
        if self.monitor is None and self.init is not None and _gone(self.init):
            os.close(self.init)
            self.init = None

    def drain(self) -> None:
        """After the end: take what is still in the pipes and close them."""
        for _ in range(1024):
            if self.output is None:
                break
            before = self.capture.seen
            self.read_output()
            if self.capture.seen == before:
                break
        for fd in (self.output, self.status):
            if fd is not None:
                os.close(fd)
        self.output = self.status = None

    def result(self, out_of_memory: bool, disk_full: bool) -> CommandResult:
        """The verdict. Raises SandboxError when bubblewrap failed before the command ran."""
        found = _EXIT_CODE.search(self._status_text)
        if found:
            code = int(found[1])
        elif self.timed_out or self.stopped or out_of_memory:
            code = _KILLED
        else:
            raise SandboxError(self._why_not_run())
        out_of_memory = out_of_memory and not self.timed_out and code != 0
        return CommandResult(
            exit_code=_KILLED if self.timed_out else code,
            output=self.capture.text(),
            truncated_bytes=self.capture.dropped,
            wall_s=(self.ended or time.monotonic()) - self.started,
            timed_out=self.timed_out,
            out_of_memory=out_of_memory,
            out_of_disk=disk_full and code != 0 and not self.timed_out and not out_of_memory,
        )

    def _why_not_run(self) -> str:
        code = os.waitstatus_to_exitcode(self._monitor_status) if self._monitor_status is not None else None
        return f"the command was not run (bubblewrap ended with {code}): {self.capture.text().strip()[:2000]}"


def _gone(pidfd: int) -> bool:
    """Whether a process is dead and, where it became our child, waited for."""
    try:
        return os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:
        return True  # the monitor has waited for it
