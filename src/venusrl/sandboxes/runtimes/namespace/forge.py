"""The process that makes persistent sandboxes: small and single-threaded, so that it can enter namespaces.

Owns: the loop: requests from the runtime's socket, one maker for each sandbox being made, user namespaces kept for
reuse, the reaping of sandboxes that end while it lives.

Must not know: asyncio, what a sandbox is for, who adopts it.

Guarantees: it needs no answer from its owner and blocks on no child. Sandboxes do not need it: when the socket closes
it ends, and they go on. Started as ``python -m venusrl.sandboxes.runtimes.namespace.forge FD``, with an empty
environment but for what Python needs.
"""

from __future__ import annotations

import fcntl
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
from venusrl.sandboxes.runtimes.namespace import (
    groups,
    kernel,
    making,
    orders,
    seccomp,
    skeleton,
    stage,
    steps,
    userns,
    wire,
)
from venusrl.sandboxes.runtimes.namespace.orders import Made, Make, Prepare, Ready
from venusrl.sandboxes.runtimes.namespace.owner import Owner
from venusrl.sandboxes.runtimes.namespace.userns import IdSlot

_READ = 1 << 16
_KEPT_NAMESPACES, _KEPT_FURNITURE = 256, 256
SOCKETS, STAGE = "sockets", "stage"
_LOCK = "forge.lock"
_PREDECESSOR_S = 30.0


class Forge:
    """Serves one runtime over ``connection`` until it closes."""

    def __init__(self, connection: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._owner = Owner(connection, self._selector, lambda body: self._handle(orders.decode_order(body)))
        self._tools: making.Tools | None = None
        self._maker = ""
        self._furniture: OrderedDict[tuple[tuple[str, ...], str], making.Furniture] = OrderedDict()
        self._waiting: set[Birth] = set()
        self._namespaces: OrderedDict[int, int] = OrderedDict()
        self._lock = -1
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_child)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the runtime is gone."""
        while self._owner.here:
            for key, _ in self._selector.select():
                key.data()

    # -- requests

    def _handle(self, order: orders.Order) -> None:
        try:
            if isinstance(order, Prepare):
                self._owner.reply(self._prepare(order))
            else:
                self._make(order)
        except SandboxError as error:
            self._owner.reply(wire.failure(order.id, error))
        except OSError as error:
            self._owner.reply(wire.failure(order.id, HostDiskFull(f"a sandbox could not be made: {error}")))

    def _prepare(self, order: Prepare) -> Ready:
        self._wait_for_predecessors(f"{order.state}/{_LOCK}")
        machine = os.uname().machine
        if machine not in seccomp.ARCHES:
            raise RuntimeUnavailable(f"sandboxes need a system call filter, and there is none yet for {machine}")
        privileged = order.base is not None
        found = groups.open_node(order.group)
        # Not close-on-exec: makers, the only programs started here, use these.
        agent = os.open(order.agent, os.O_RDONLY)
        sockets = os.open(f"{order.state}/{SOCKETS}", os.O_RDONLY | os.O_DIRECTORY)
        for fd in (agent, sockets, self._lock):
            os.set_inheritable(fd, True)
        stage.enter_private_namespace(privileged)
        skeleton.enter(f"{order.state}/{STAGE}", orders.SANDBOX_USER if privileged else 0)
        self._maker = order.maker
        rules = seccomp.program(machine)
        self._tools = making.Tools(
            groups=found,
            sockets=sockets,
            idmapped=order.base is not None
            and skeleton.can_map_owners(self._namespace(IdSlot(order.base, order.count))),
            root=making.entering_root(),
            last=making.becoming_agent(agent, order.arguments, rules, privileged=privileged),
        )
        return Ready(order.id, os.getpid(), self._tools.idmapped)

    def _wait_for_predecessors(self, path: str) -> None:
        """Until no earlier forge of this directory, nor any of its children, still makes a sandbox.

        One that came to be after its service was replaced would be nobody's. Our makers share the lock until their
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
        lacks = self._lacks(order) if order.layers else making.Furniture()
        waits, go = os.pipe2(os.O_CLOEXEC) if order.archive is not None else (-1, -1)
        answered, answer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(answered, False)
        plan = making.plan(order, self._tools, namespace, lacks, None if order.archive is None else waits)
        kept = {answer, *(fd for fd in (namespace, waits) if fd is not None and fd >= 0)}
        try:
            child = self._spawn(plan.encoded(), answer, kept, privileged=order.base is not None)
        except OSError:
            for fd in (answer, answered, waits, go):
                _close(fd)
            raise
        _close(waits)
        birth = Birth(order, plan, child, answered, answer, go)
        if order.archive is None:
            birth.let_go()
        else:
            self._waiting.add(birth)
        self._selector.register(answered, selectors.EVENT_READ, partial(self._on_answer, birth))

    def _lacks(self, order: Make) -> making.Furniture:
        """What this image lacks. Its layers never change: looked at once."""
        key = (order.layers, order.user)
        if key not in self._furniture:
            if len(self._furniture) >= _KEPT_FURNITURE:
                self._furniture.popitem(last=False)
            self._furniture[key] = skeleton.look(order.layers, partial(making.furniture, name=order.user))
        self._furniture.move_to_end(key)
        return self._furniture[key]

    def _spawn(self, plan: bytes, report: int, kept: set[int], *, privileged: bool) -> int:
        """A maker that is PID 1 of a new namespace; its number here. It inherits ``kept``."""
        told = os.memfd_create("plan", 0)
        try:
            os.write(told, plan)
            for fd in kept:
                os.set_inheritable(fd, True)
            argv = ("maker", str(told), str(report))
            if not privileged:
                return _spawn_twice(self._maker, argv)
            kernel.unshare(kernel.CLONE_NEWPID)
            try:
                return os.posix_spawn(self._maker, argv, {})
            finally:  # our next child is not to land in this one's namespace
                kernel.setns(self._own_pids, kernel.CLONE_NEWPID)
        finally:
            for fd in kept:
                os.set_inheritable(fd, False)
            os.close(told)

    def _on_answer(self, birth: Birth) -> None:
        data = os.read(birth.answered, _READ)
        birth.said += data
        if birth.said[: len(steps.WAITS)] == steps.WAITS:
            del birth.said[: len(steps.WAITS)]
            self._fill(birth)
        if data:
            if birth.said:
                self._no_more(birth)
            return
        self._selector.unregister(birth.answered)
        os.close(birth.answered)
        self._no_more(birth)
        if not birth.said:  # the agent runs; or its maker was killed, which its pidfd will tell
            self._owner.reply(Made(birth.order.id, birth.child))
            return
        self._undo(birth.order)
        self._owner.reply(wire.failure(birth.order.id, making.error(birth.plan, bytes(birth.said))))

    def _fill(self, birth: Birth) -> None:
        """The disk is there: a child fills it."""
        assert self._tools is not None
        if os.fork() == 0:
            for other in self._waiting - {birth}:
                other.let_go()
            making.fill(birth.order, self._tools, birth.child, birth.answer, birth.go)
        self._no_more(birth)

    def _no_more(self, birth: Birth) -> None:
        self._waiting.discard(birth)
        birth.let_go()

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
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                for birth in [each for each in self._waiting if each.child == ended]:
                    self._no_more(birth)  # it will not come to where its disk is filled


class Birth:
    """A sandbox that is being made. ``answer`` and ``go`` are kept only until its disk is being filled."""

    def __init__(self, order: Make, plan: making.Plan, child: int, answered: int, answer: int, go: int) -> None:
        self.order = order
        self.plan = plan
        self.child = child
        self.answered = answered
        self.answer = answer
        self.go = go
        self.said = bytearray()

    def let_go(self) -> None:
        _close(self.answer)
        _close(self.go)
        self.answer = self.go = -1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _spawn_twice(program: str, argv: tuple[str, ...]) -> int:
    """The same by way of a child: without rights over our own PID namespace we could not come back to it."""
    number, told = os.pipe2(os.O_CLOEXEC)
    between = os.fork()
    if between == 0:
        try:
            kernel.unshare(kernel.CLONE_NEWPID)
            os.write(told, str(os.posix_spawn(program, argv, {})).encode())
        finally:
            os._exit(0)
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
