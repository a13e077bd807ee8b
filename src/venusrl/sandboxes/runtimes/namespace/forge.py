"""The process that makes persistent sandboxes: small and single-threaded, so that forking it is cheap and safe.

Owns: the loop: requests from the runtime's socket, one child for each sandbox being made, user namespaces kept for
reuse, the reaping of sandboxes that end while it lives.

Must not know: asyncio, what a sandbox is for, who adopts it.

Guarantees: it needs no answer from its owner and blocks on no child. Sandboxes do not need it: when the socket closes
it ends, and they go on. Started as ``python -m venusrl.sandboxes.runtimes.namespace.forge FD``, with an empty
environment but for what Python needs.
"""

from __future__ import annotations

import fcntl
import gc
import os
import selectors
import signal
import socket
import sys
import time
from collections import OrderedDict
from contextlib import suppress
from functools import partial

from venusrl.sandboxes.protocol import HostDiskFull, RuntimeUnavailable, SandboxError
from venusrl.sandboxes.runtimes.namespace import groups, kernel, making, orders, seccomp, skeleton, stage, userns, wire
from venusrl.sandboxes.runtimes.namespace.orders import Answer, Made, Make, Prepare, Ready
from venusrl.sandboxes.runtimes.namespace.userns import IdSlot

_READ = 1 << 16
_KEPT_NAMESPACES = 256
SOCKETS, STAGE = "sockets", "stage"
_LOCK = "forge.lock"
_PREDECESSOR_S = 30.0


class Forge:
    """Serves one runtime over ``connection`` until it closes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, self._on_request)
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._tools: making.Tools | None = None
        self._namespaces: OrderedDict[int, int] = OrderedDict()
        self._open = True
        self._lock = -1
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_child)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the runtime is gone."""
        while self._open:
            for key, _ in self._selector.select():
                key.data()

    # -- the socket

    def _on_request(self) -> None:
        try:
            data = self._connection.recv(_READ)
        except BlockingIOError:
            self._flush()
            return
        except ConnectionError:
            data = b""
        if not data:
            self._open = False
            return
        self._incoming += data
        while len(self._incoming) >= wire.HEADER_BYTES:
            end = wire.HEADER_BYTES + wire.body_length(bytes(self._incoming[: wire.HEADER_BYTES]))
            if len(self._incoming) < end:
                break
            body = bytes(self._incoming[wire.HEADER_BYTES : end])
            del self._incoming[:end]
            self._handle(orders.decode_order(body))
        self._flush()

    def _reply(self, message: Answer) -> None:
        self._outgoing += orders.encode(message)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._open = False
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._selector.modify(self._connection, events, self._on_request)

    # -- requests

    def _handle(self, order: orders.Order) -> None:
        try:
            if isinstance(order, Prepare):
                self._reply(self._prepare(order))
            else:
                self._make(order)
        except SandboxError as error:
            self._reply(wire.failure(order.id, error))
        except OSError as error:
            self._reply(wire.failure(order.id, HostDiskFull(f"a sandbox could not be made: {error}")))

    def _prepare(self, order: Prepare) -> Ready:
        self._wait_for_predecessors(f"{order.state}/{_LOCK}")
        machine = os.uname().machine
        if machine not in seccomp.ARCHES:
            raise RuntimeUnavailable(f"sandboxes need a system call filter, and there is none yet for {machine}")
        privileged = order.base is not None
        found = groups.open_node(order.group)
        agent = os.open(order.agent, os.O_RDONLY | os.O_CLOEXEC)
        sockets = os.open(f"{order.state}/{SOCKETS}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stage.enter_private_namespace(privileged)
        skeleton.enter(f"{order.state}/{STAGE}", orders.SANDBOX_USER if privileged else 0)
        self._tools = making.Tools(
            groups=found,
            sockets=sockets,
            agent=agent,
            agent_arguments=order.arguments,
            seccomp=seccomp.program(machine),
            idmapped=order.base is not None
            and skeleton.can_map_owners(self._namespace(IdSlot(order.base, order.count))),
        )
        gc.collect()
        gc.freeze()  # forked children then copy less
        return Ready(order.id, os.getpid(), self._tools.idmapped)

    def _wait_for_predecessors(self, path: str) -> None:
        """Until no earlier forge of this directory, nor any of its children, still makes a sandbox.

        One that came to be after its service was replaced would be nobody's. Our children share the lock until their
        agent runs.
        """
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _PREDECESSOR_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise RuntimeUnavailable(
                        f"an earlier forge has made sandboxes for {_PREDECESSOR_S:.0f} s since its service ended: "
                        f"see who holds {path} (fuser {path}) and end it"
                    ) from None
                time.sleep(0.005)
                continue
            self._lock = lock
            return

    def _make(self, order: Make) -> None:
        if self._tools is None:
            raise RuntimeUnavailable("the forge was not prepared")
        namespace = None if order.base is None else self._namespace(IdSlot(order.base, order.count))
        answered, answer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(answered, False)
        child = self._fork(privileged=order.base is not None)
        if child == 0:
            making.make(order, self._tools, namespace, answer)
        os.close(answer)
        told = partial(self._on_answer, order, child, answered, bytearray())
        self._selector.register(answered, selectors.EVENT_READ, told)

    def _fork(self, *, privileged: bool) -> int:
        """A child that is PID 1 of a new namespace; its number here, 0 in it."""
        if not privileged:
            return _fork_twice()
        kernel.unshare(kernel.CLONE_NEWPID)
        child = -1
        try:
            child = os.fork()
        finally:
            if child != 0:  # our next child is not to land in this one's namespace
                kernel.setns(self._own_pids, kernel.CLONE_NEWPID)
        return child

    def _on_answer(self, order: Make, child: int, answered: int, said: bytearray) -> None:
        data = os.read(answered, _READ)
        if data:
            said += data
            return
        self._selector.unregister(answered)
        os.close(answered)
        if not said:  # the agent runs; or its maker was killed, which its pidfd will tell
            self._reply(Made(order.id, child))
            return
        self._undo(order)
        problem = wire.decode_reply(bytes(said))
        assert isinstance(problem, wire.Failed)
        self._reply(wire.Failed(order.id, problem.error, problem.message))

    def _undo(self, order: Make) -> None:
        """Remove what a failed child had made outside its namespaces."""
        assert self._tools is not None
        with suppress(FileNotFoundError):
            os.unlink(order.sandbox, dir_fd=self._tools.sockets)
        if self._tools.groups is not None:
            groups.PersistentGroup(self._tools.groups, order.sandbox).end()

    def _namespace(self, slot: IdSlot) -> int:
        """A user namespace for this slot. Those of earlier sandboxes are used again: nothing of them is in it."""
        if slot.base not in self._namespaces:
            if len(self._namespaces) >= _KEPT_NAMESPACES:
                os.close(self._namespaces.popitem(last=False)[1])
            self._namespaces[slot.base] = userns.create(slot, 0)
        self._namespaces.move_to_end(slot.base)
        return self._namespaces[slot.base]

    def _on_child(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake, _READ)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def _fork_twice() -> int:
    """The same by way of a child: without rights over our own PID namespace we could not come back to it."""
    number, told = os.pipe2(os.O_CLOEXEC)
    between = os.fork()
    if between == 0:
        code = 1
        try:
            kernel.unshare(kernel.CLONE_NEWPID)
            child = os.fork()
            if child == 0:
                return 0
            os.write(told, str(child).encode())
            code = 0
        finally:
            if os.getpid() != 1:
                os._exit(code)
    os.close(told)
    said = os.read(number, 32)
    os.close(number)
    os.waitpid(between, 0)
    if not said:
        raise SandboxError("a sandbox could not be made: no new PID namespace")
    return int(said)


def main() -> None:
    """Serve the runtime whose socket is the inherited descriptor named by the first argument."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the owner; we end when it does
    os.umask(0o022)
    kernel.become_subreaper()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    Forge(connection).serve()


if __name__ == "__main__":
    main()
