"""The process that makes sandboxes and runs their commands, one a node.

Owns: the loop: requests from the node's socket, output and end of every command, deadlines. It is small and
single-threaded, so that forking it is cheap and safe, and it keeps floods of output away from its owner.

Must not know: admission, ownership on disk, asyncio.

Guarantees: when the socket closes, for whatever reason, every command is killed, every control group removed,
and the process ends; its mounts end with it. No request blocks the loop for long: commands are watched, not
waited for. Requests are served in the order they came, but a Kill or a Cancel at once: what it ends while that still
waits for its turn is never begun, so that giving up a hundred sandboxes does not first make them.
Started as ``python -m venusrl.sandboxes.runtimes.namespace.launcher FD``.
"""

from __future__ import annotations

import gc
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from venusrl.sandboxes.protocol import RuntimeUnavailable, SandboxError, SandboxGone
from venusrl.sandboxes.runtimes.namespace import wire
from venusrl.sandboxes.runtimes.namespace.command import Command
from venusrl.sandboxes.runtimes.namespace.machine import Machine
from venusrl.sandboxes.runtimes.namespace.owner import Owner

_SKIM_PAUSE_S = 0.004
"""After its limit a stream is read one pipe's worth each pause: a flood then costs about 16 MB/s to drain."""


class Launcher:
    """Serves one node over ``connection`` until it closes."""

    def __init__(self, connection: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._owner = Owner(connection, self._selector, lambda body: self._take(wire.decode_request(body)))
        self._inbox: deque[wire.Request] = deque()
        self._machine: Machine | None = None
        self._running: dict[int, Running] = {}
        self._condemned: dict[str, list[int]] = {}

    def serve(self) -> None:
        """Until the node is gone."""
        try:
            while self._owner.here:
                for key, _ in self._selector.select(self._wait_s()):
                    key.data()
                if self._inbox:
                    self._handle(self._inbox.popleft())
                self._on_time()
        finally:
            for running in self._running.values():
                running.stop()
            if self._machine is not None:
                self._machine.close()

    # -- requests

    def _take(self, request: wire.Request) -> None:
        match request:
            case wire.Cancel(target=target):
                self._drop(lambda waiting: waiting.id == target)
            case wire.Kill(sandbox=sandbox):
                self._drop(lambda waiting: getattr(waiting, "sandbox", None) == sandbox)
            case _:
                self._inbox.append(request)
                return
        self._handle(request)

    def _drop(self, given_up: Callable[[wire.Request], bool]) -> None:
        """Answer those that wait and will not be served."""
        dropped = [waiting for waiting in self._inbox if given_up(waiting)]
        for request in dropped:
            self._inbox.remove(request)
            self._owner.reply(wire.failure(request.id, SandboxGone("it was given up before its turn came")))

    def _handle(self, request: wire.Request) -> None:
        try:
            reply = self._answer(request)
        except (SandboxError, FileNotFoundError) as error:
            reply = wire.failure(request.id, error)
        if reply is not None:
            self._owner.reply(reply)

    def _answer(self, request: wire.Request) -> wire.Reply | None:
        """The reply, or None when it comes later."""
        if isinstance(request, wire.Setup):
            self._machine = Machine(request)
            gc.collect()
            gc.freeze()  # forked children then copy less
            return self._machine.report(request.id)
        machine = self._machine
        if machine is None:
            raise RuntimeUnavailable("the launcher was not set up")
        match request:
            case wire.Create():
                machine.create(request)
            case wire.Run():
                self._watch(Running(request, machine.start(request)))
                return None
            case wire.Cancel():
                return self._cancel(request)
            case wire.Write():
                machine.write(request)
            case wire.Read():
                return wire.Content(request.id, machine.read(request))
            case wire.Kill():
                return self._kill(machine, request)
        return wire.Done(request.id)

    def _cancel(self, request: wire.Cancel) -> wire.Reply | None:
        running = self._running.get(request.target)
        if running is None:
            return wire.Done(request.id)
        running.stop()
        running.waiting.append(request.id)
        return None

    def _kill(self, machine: Machine, request: wire.Kill) -> wire.Reply | None:
        """Answered at once when nothing runs there, else by the last command's end."""
        victims = [running for running in self._running.values() if running.request.sandbox == request.sandbox]
        if not victims:
            machine.remove(request.sandbox)
            return wire.Done(request.id)
        machine.condemn(request.sandbox)
        self._condemned.setdefault(request.sandbox, []).append(request.id)
        for victim in victims:
            victim.stop()
        return None

    # -- commands

    def _watch(self, running: Running) -> None:
        self._running[running.request.id] = running
        self._settle(running)

    def _step(self, running: Running, fd: int) -> None:
        if fd not in running.watched:
            return  # settled by an earlier event of the same round; the number may be another's by now
        command = running.command
        if fd == command.output:
            command.read_output()
        else:
            command.read_status()
            command.reap()
        self._settle(running)

    def _settle(self, running: Running) -> None:
        """Watch exactly the descriptors that are open and due; finish what has ended."""
        command = running.command
        if command.finished:
            command.drain()
        due = set(command.descriptors())
        if command.capture.over and command.output is not None:
            due.discard(command.output)
            if running.skim_at is None:
                running.skim_at = time.monotonic() + _SKIM_PAUSE_S
        for fd in running.watched - due:
            self._selector.unregister(fd)
        for fd in due - running.watched:
            self._selector.register(fd, selectors.EVENT_READ, partial(self._step, running, fd))
        running.watched = due
        if command.finished:
            self._finish(running)

    def _finish(self, running: Running) -> None:
        assert self._machine is not None
        request = running.request
        del self._running[request.id]
        if running.command.init_pid is None:
            self._end_strays()
        self._owner.reply(self._machine.ended(request, running.command))
        for waiting in running.waiting:
            self._owner.reply(wire.Done(waiting))
        if request.sandbox in self._condemned and not any(
            other.request.sandbox == request.sandbox for other in self._running.values()
        ):
            self._machine.remove(request.sandbox)
            for killer in self._condemned.pop(request.sandbox):
                self._owner.reply(wire.Done(killer))

    def _end_strays(self) -> None:
        """A monitor killed before it could name its PID 1 leaves that one to us."""
        known = {running.command.pid for running in self._running.values()}
        known |= {running.command.init_pid or 0 for running in self._running.values()}
        for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
            if pid not in known:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    # -- time

    def _wait_s(self) -> float | None:
        if self._inbox:
            return 0.0
        due = min((running.due_at for running in self._running.values()), default=math.inf)
        return None if due == math.inf else max(0.0, due - time.monotonic())

    def _on_time(self) -> None:
        now = time.monotonic()
        for running in list(self._running.values()):
            if now >= running.deadline and not running.command.timed_out and not running.command.stopped:
                running.command.timed_out = True
                running.command.kill()
            if running.skim_at is not None and now >= running.skim_at:
                running.skim_at = None
                running.command.read_output()
                self._settle(running)


class Running:
    """A command in progress and who waits for it."""

    def __init__(self, request: wire.Run, command: Command) -> None:
        self.request = request
        self.command = command
        self.deadline = time.monotonic() + request.timeout_s
        self.skim_at: float | None = None
        self.watched: set[int] = set()
        self.waiting: list[int] = []

    @property
    def due_at(self) -> float:
        """When time itself has something to do."""
        deadline = math.inf if self.command.timed_out or self.command.stopped else self.deadline
        return deadline if self.skim_at is None else min(deadline, self.skim_at)

    def stop(self) -> None:
        """Kill it on somebody's behalf."""
        self.command.stopped = True
        self.command.kill()


def main() -> None:
    """Serve the node whose socket is the inherited descriptor named by the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who then ends us in order
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # no command may ever hold it
    Launcher(connection).serve()


if __name__ == "__main__":
    main()
