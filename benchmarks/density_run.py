"""One cell of `density.py`, from inside its memory cgroup: real sandboxes that live a trace's lives, as many as fit."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from aiohttp import web

from venusrl.sandboxes.admission.api import Admission, Admit, Deny, HostView, Pause, Request
from venusrl.sandboxes.admission.baselines import Declared, Usage
from venusrl.sandboxes.admission.footprint import FootprintAdmission, FootprintConfig
from venusrl.sandboxes.admission.traces import MIB, TEMPLATE_FILE, Life, Step, Trace, lives, program, warm_up
from venusrl.sandboxes.agent.api import Agent, Exit, ProcessSpec
from venusrl.sandboxes.envd.about import About
from venusrl.sandboxes.host.api import Order
from venusrl.sandboxes.host.local import HostConfig, LocalHost
from venusrl.sandboxes.protocol import Limits, SandboxDenied, SandboxError, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Runtime
from venusrl.sandboxes.templates.api import Image

USER = "user"
PILOT_GROUPS = 8
"""At most so many are let in first, to learn from; fewer where memory is small."""
IDLE = 16
"""Sandboxes without work whose memory, each, is the runtime's overhead."""
TOOLS = ("sh", "dd", "sleep", "cat", "test", "echo", "[", "mkdir", "true")


class Cell(msgspec.Struct, frozen=True):
    """What to run. ``share`` False: every sandbox has its own copy of the template's files."""

    runtime: str
    trace: Trace
    policy: str
    templates: int
    share: bool
    memory_mib: int
    reserve_mib: int
    seconds: float
    kernel_package: str = ""
    """For microVMs: Debian's kernel package as a file; "" fetches it."""

    @property
    def key(self) -> str:
        shared = "shared" if self.share else "not shared"
        return f"{self.runtime} | {self.trace.name} | {self.policy} | {self.templates} templates, {shared}"


class Result(msgspec.Struct):
    """What came of it. ``running``: mean over the second half of the time; ``overhead_mib``: of an idle sandbox, kernel
    and the service's share included."""

    cell: Cell
    running: float = 0.0
    most: int = 0
    created: int = 0
    denied: int = 0
    commands: int = 0
    failed: int = 0
    failures: dict[str, int] = {}
    oom_kills: int = 0
    died: int = 0
    paused: int = 0
    used_peak_mib: float = 0.0
    overhead_mib: float = 0.0
    late_s: float = 0.0
    wall_s: float = 0.0


class Group:
    """The control group that holds everything, this process included (v1 or v2)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._v2 = (path / "cgroup.controllers").exists()

    def used(self) -> int:
        """Bytes that cannot be dropped: processes', files in memory, the kernel's."""
        stat = {
            name: int(value) for name, value in map(str.split, (self._path / "memory.stat").read_text().splitlines())
        }
        if self._v2:
            return stat["anon"] + stat["shmem"] + stat.get("kernel", stat["slab"])
        kernel = int((self._path / "memory.kmem.usage_in_bytes").read_text())
        return stat["total_rss"] + stat.get("total_shmem", 0) + kernel

    def oom_kills(self) -> int:
        text = (self._path / ("memory.events" if self._v2 else "memory.oom_control")).read_text()
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))


class Catalogue:
    """Templates made for this run: one layer of tools, and one with the template's own file each."""

    def __init__(self, directory: Path, trace: Trace) -> None:
        self._directory, self._trace = directory, trace
        self._images: dict[str, Image] = {}
        self._tools = directory / "tools"
        busybox = shutil.which("busybox")
        if busybox is None:
            raise SystemExit("the benchmark's templates need busybox: apt install busybox-static")
        for name in ("bin", "etc", "tmp", "opt", "home/user", "proc", "sys", "dev"):
            (self._tools / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(busybox, self._tools / "bin/busybox")
        for tool in TOOLS:
            (self._tools / "bin" / tool).symlink_to("busybox")
        (self._tools / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n")
        (self._tools / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")

    def add(self, name: str) -> Image:
        if name not in self._images:
            own = self._directory / name
            target = own / TEMPLATE_FILE.lstrip("/")
            target.parent.mkdir(parents=True)
            target.write_bytes(os.urandom(self._trace.template_mib * MIB))
            layers = (str(self._tools), str(own))
            size = self._trace.declared_mib
            template = name.partition("@")[0]  # a copy is the same template, for what is learned of it
            self._images[name] = Image(template, name, layers, {"PATH": "/bin"}, USER, "", 1, size, 64)
        return self._images[name]

    def drop(self, name: str) -> None:
        del self._images[name]
        shutil.rmtree(self._directory / name)

    async def resolve(self, template: str, tenant: str) -> Image:
        if template not in self._images:
            raise TemplateNotFound(template)
        return self._images[template]

    def counters(self) -> dict[str, float]:
        return {}

    def names(self) -> tuple[str, ...]:
        return tuple(self._images)


class NoDoor:
    """Nobody calls from outside."""

    async def serve(
        self, request: web.Request, agent: Agent, sandbox: str, port: int, about: About
    ) -> web.StreamResponse:
        raise web.HTTPNotFound

    def forget(self, sandbox: str) -> None:
        """Nothing was kept."""


class Piloted:
    """Lets the first groups in whatever the policy says, so that it has something to learn from."""

    def __init__(self, policy: Admission, groups: int) -> None:
        self.policy = policy
        self._free = {f"pilot{number}" for number in range(groups)}

    def place(self, hosts: tuple[HostView, ...], request: Request) -> Admit | Deny:
        if request.group in self._free or request.group.startswith("idle"):
            return Admit(hosts[0].name)
        return self.policy.place(hosts, request)

    def observe(self, template: str, group: str, sandbox: str, age_s: float, private: int) -> None:
        if not group.startswith("idle"):
            self.policy.observe(template, group, sandbox, age_s, private)

    def ended(self, sandbox: str) -> None:
        self.policy.ended(sandbox)

    def relieve(self, host: HostView) -> tuple[Pause, ...]:
        return self.policy.relieve(host)


def policy_of(name: str) -> Admission:
    kind, _, value = name.partition(" ")
    made: dict[str, Callable[[], Admission]] = {
        "footprint": lambda: FootprintAdmission(FootprintConfig(target=float(value))),
        "declared": lambda: Declared(float(value or 1)),
        "usage": Usage,
    }
    return made[kind]()


async def runtime_of(cell: Cell, state: Path) -> Runtime:
    if cell.runtime == "namespace":
        from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime

        return NamespaceRuntime(state, require_cgroup=True)
    if cell.runtime == "microvm":
        from venusrl.sandboxes.runtimes.microvm import setup
        from venusrl.sandboxes.runtimes.microvm.runtime import MicroVmRuntime

        await setup.setup(state, Path(cell.kernel_package) if cell.kernel_package else None)
        return MicroVmRuntime(state)
    raise SystemExit(f"the benchmark knows no runtime {cell.runtime}")


class Run:
    """Keeps one host full until the time is over."""

    def __init__(self, cell: Cell, state: Path, group: Group, runtime: Runtime) -> None:
        self._cell, self._group = cell, group
        self.result = Result(cell)
        each = 1.5 * (cell.trace.peak_mib + 40.0) * cell.trace.group
        self._pilots = max(2, min(PILOT_GROUPS, int((cell.memory_mib - cell.reserve_mib) / each)))
        self._policy = Piloted(policy_of(cell.policy), self._pilots)
        self._images = Catalogue(state / "templates", cell.trace)
        config = HostConfig(memory=cell.memory_mib * MIB, reserve=cell.reserve_mib * MIB)
        self._host = LocalHost(state / "host", {cell.runtime: runtime}, self._images, self._policy, NoDoor(), config)
        self._running = 0
        self._late: list[float] = []
        self._over = False

    async def __call__(self) -> Result:
        began = time.monotonic()
        for number in range(self._cell.templates):
            self._images.add(f"template{number}")
        await self._host.start()
        watching = asyncio.create_task(self._watch(), name="watching")
        try:
            await self._measure_overhead()
            if self._cell.policy.startswith("footprint"):
                await asyncio.gather(*(self._live(f"pilot{number}", number) for number in range(self._pilots)))
            await self._fill()
        finally:
            watching.cancel()
            self._over = True
            for held in (await self._host.status()).held:
                await self._host.kill(held.id)
            self.result.paused = int((await self._host.status()).counters.get("paused_for_memory", 0))
            await self._host.close()
        self.result.oom_kills = self._group.oom_kills()
        self.result.late_s = statistics.fmean(self._late) if self._late else 0.0
        self.result.wall_s = time.monotonic() - began
        return self.result

    async def _watch(self) -> None:
        async def deaths() -> None:
            async for _ in self._host.events():
                self.result.died += 1

        async def memory() -> None:
            while True:
                self.result.used_peak_mib = max(self.result.used_peak_mib, self._group.used() / MIB)
                await asyncio.sleep(0.5)

        await asyncio.gather(deaths(), memory())

    async def _measure_overhead(self) -> None:
        """Of sandboxes that do nothing, all together, by the whole group's counters."""
        names = [f"idle{number}" for number in range(IDLE + 1)]
        await self._create(names[0], "template0", names[0])
        before = self._group.used()
        for name in names[1:]:
            await self._create(name, "template0", name)
        self.result.overhead_mib = (self._group.used() - before) / IDLE / MIB
        for name in names:
            await self._host.kill(name)

    async def _fill(self) -> None:
        """Groups come as fast as they are let in; count what runs."""
        began, number, counts = time.monotonic(), 0, list[int]()
        tasks: set[asyncio.Task[None]] = set()

        async def count() -> None:
            while True:
                counts.append(self._running)
                await asyncio.sleep(1.0)

        counting = asyncio.create_task(count(), name="counting")
        while time.monotonic() - began < self._cell.seconds:
            ready = asyncio.Event()
            task = asyncio.create_task(self._live(f"group{number}", number, ready), name=f"group {number}")
            tasks.add(task)
            number += 1
            left = max(0.1, self._cell.seconds - (time.monotonic() - began))
            with suppress(TimeoutError):  # the time is over while the group waits for room
                await asyncio.wait_for(ready.wait(), left)
            for done in [task for task in tasks if task.done()]:
                tasks.discard(done)
                done.result()
        counting.cancel()
        self._over = True
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        self.result.running = statistics.fmean(counts[len(counts) // 2 :])
        self.result.most = max(counts)

    async def _live(self, name: str, number: int, ready: asyncio.Event | None = None) -> None:
        """A whole group: all are created, then live in step."""
        template = f"template{number % self._cell.templates}"
        members = lives(self._cell.trace, name, random.Random(f"real-{name}"))
        ids = [f"{name}-{member}" for member in range(len(members))]
        own = [template if self._cell.share else f"{template}@{one}" for one in ids]
        try:
            for one, image in zip(ids, own, strict=True):
                self._images.add(image)
                await self._create(one, image, name)
                self._running += 1
            if ready is not None:
                ready.set()
            await asyncio.gather(*(self._member(one, life) for one, life in zip(ids, members, strict=True)))
        finally:
            if not self._cell.share:
                for image in own:
                    if image in self._images.names():
                        self._images.drop(image)

    async def _create(self, sandbox: str, template: str, group: str) -> None:
        limits = Limits(memory_mib=self._cell.trace.declared_mib, pids=64, cpus=2.0, disk_mib=64)
        order = Order(id=sandbox, template=template, runtime=self._cell.runtime, limits=limits, group=group)
        while True:
            try:
                await self._host.create(order)
            except SandboxDenied as denied:
                self.result.denied += 1
                await asyncio.sleep(min(1.0, denied.retry_after_s))
            else:
                self.result.created += 1
                return

    async def _member(self, sandbox: str, life: Life) -> None:
        began = time.monotonic()
        cell, instance = self._host.cells.running(sandbox)
        background: list[asyncio.Task[None]] = []
        try:
            await self._command(instance.agent, warm_up(), "warm-up")
            for number, step in enumerate(life.steps):
                wait = began + step.at_s - time.monotonic()
                await asyncio.sleep(max(0.0, wait))
                self._late.append(max(0.0, -wait))
                if step.resident:
                    background.append(asyncio.create_task(self._resident(instance.agent, step, number)))
                    continue
                cell.busy += 1
                await self._command(instance.agent, program(step, number), step.name)
                cell.busy -= 1
                cell.used = time.monotonic()
            await asyncio.sleep(max(0.0, began + life.length_s - time.monotonic()))
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            self._running -= 1
            if not self._over:
                await self._host.kill(sandbox)

    async def _resident(self, agent: Agent, step: Step, number: int) -> None:
        """Runs to the sandbox's end, longer than its life: when it ends before, something took its memory."""
        await self._command(agent, program(step, number, 1000.0), step.name)
        self._failed("resident ended")

    async def _command(self, agent: Agent, command: str, name: str) -> None:
        self.result.commands += 1
        try:
            process = await agent.start(ProcessSpec(("/bin/sh", "-c", command), USER))
            async for event in process.events():
                if isinstance(event, Exit) and (event.code or event.signal):
                    self._failed(f"{name}: exit code {event.code}, signal {event.signal}")
        except SandboxError as error:
            self._failed(f"{name}: {type(error).__name__}: {error}"[:200])

    def _failed(self, why: str) -> None:
        if not self._over:
            self.result.failed += 1
            self.result.failures[why] = self.result.failures.get(why, 0) + 1
