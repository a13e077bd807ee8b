"""The microVM runtime: ``runtimes.base.Runtime`` with QEMU.

Owns: templates on this host, a few machines that wait for their state, which sandbox has which machine.

Must not know: E2B, HTTP, admission.

Guarantees: those of ``runtimes.base``. A waiting machine belongs to no sandbox and ends with ``close`` or ``sweep``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from venusrl.sandboxes.protocol import Limits, RuntimeUnavailable, SandboxError, SandboxGone, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Abilities, Instance, Network, Snapshot, Spec
from venusrl.sandboxes.runtimes.microvm import carry, migration, programs, setup, state, template, vm
from venusrl.sandboxes.runtimes.microvm.carry import Control
from venusrl.sandboxes.runtimes.microvm.idle import IdlePolicy
from venusrl.sandboxes.runtimes.microvm.instance import NO_CARD, RUNTIME, MicroVm, Record
from venusrl.sandboxes.runtimes.microvm.machine import BOARD
from venusrl.sandboxes.runtimes.microvm.passport import Passport, objection
from venusrl.sandboxes.runtimes.microvm.vm import Parts, Site, Vm
from venusrl.sandboxes.runtimes.moving import Base, Dial, Objection, Streams
from venusrl.sandboxes.runtimes.namespace import cgroup, groups
from venusrl.sandboxes.runtimes.namespace.egress import Egress
from venusrl.sandboxes.templates.api import Image


class _Kind(NamedTuple):
    """What there is a template of."""

    image: str
    network: bool


class MicroVmRuntime:
    """``state`` is the runtime's own directory. ``waiting``: machines started ahead for each template in use."""

    def __init__(self, state: Path, *, waiting: int = 1, idle: IdlePolicy | None = None, use_kvm: bool = True) -> None:
        self._state = state
        self._waiting = waiting
        self._use_kvm = use_kvm
        self._templates: dict[_Kind, template.Made] = {}
        self._making: dict[str, asyncio.Lock] = {}
        self._pool: dict[_Kind, list[Vm]] = {}
        self._filling: set[asyncio.Task[None]] = set()
        self._instances: dict[str, MicroVm] = {}
        self._starting: set[str] = set()
        self._closed = False
        self._egress = Egress(state / "network")
        self._kvm = False
        self._site: Site | None = None
        self._guest: setup.Guest | None = None
        self._qemu: setup.Qemu | None = None
        self.policy = idle or IdlePolicy()
        self.filter_program = ""

    @property
    def name(self) -> str:
        return RUNTIME

    async def start(self) -> Abilities:
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._state = self._state.resolve()
        self._qemu = await setup.check_qemu()
        made = await programs.build()
        self._guest = await setup.guest_of(self._state, made)
        self._egress = Egress(self._state / "network")
        await asyncio.to_thread(self._egress.start)
        lacks = {"egress": why} if (why := self._no_egress()) else {}
        why = await setup.probe_kvm(self._qemu, self._guest) if self._use_kvm else "KVM was not asked for"
        self._kvm = not why
        if why:
            lacks["kvm"] = f"{why}: machines are emulated (TCG), several times slower"
        if not self._qemu.live:
            lacks["live_migration"] = f"QEMU {self._qemu.version[0]} corrupts busy guests that move live: {setup.MEND}"
        name = "mv-" + hashlib.sha256(str(self._state).encode()).hexdigest()[:12]
        node = await asyncio.to_thread(cgroup.find, name, existing=True)
        if node is None:
            raise RuntimeUnavailable("no control group can be made here for memory and processes: run as root")
        self._site = Site(self._state / "vms", self._qemu.path, str(made.jail), node)
        self._site.directory.mkdir(mode=0o700, exist_ok=True)
        self.filter_program = str(made.filter)
        return Abilities(True, self._qemu.live, "egress" not in lacks, lacks)

    def _no_egress(self) -> str:
        """Why no machine here can have a network; "" when it can."""
        if self._guest is not None and not self._guest.network:
            return "the guest kernel was set up without a network card's driver: venusrl env setup microvm"
        return self._egress.lacks or ""

    def _require_egress(self, network: bool) -> None:
        if network and (why := self._no_egress()):
            raise RuntimeUnavailable(f"virtual machines cannot reach a network here: {why}")

    def _ready(self) -> tuple[Site, setup.Guest, setup.Qemu]:
        if self._site is None or self._guest is None or self._qemu is None:
            raise RuntimeUnavailable("the microVM runtime was not started")
        return self._site, self._guest, self._qemu

    # -- templates

    async def prepare(self, image: Image, *, network: bool = False) -> None:
        self._require_egress(network)
        made = await self._made(image, network=network)
        self._refill(made)

    async def _made(self, image: Image, *, network: bool = False) -> template.Made:
        site, guest, qemu = self._ready()
        kind = _Kind(image.id, network)
        where = template.place(self.templates, image, guest, qemu.version, network)
        async with self._making.setdefault(where.name, asyncio.Lock()):
            found = self._templates.get(kind) or await asyncio.to_thread(template.load, where)
            if found is None or (found.shape.kvm and not self._kvm):
                await asyncio.to_thread(shutil.rmtree, where, True)
                found = await template.make(image, where, site, guest, self._kvm, network)
            self._templates[kind] = found
        return found

    async def forget(self, image_id: str) -> None:
        if any(instance.spec.image.id == image_id for instance in self._instances.values()):
            raise SandboxError(f"template {image_id} has sandboxes still")
        for kind in (_Kind(image_id, False), _Kind(image_id, True)):
            self._templates.pop(kind, None)
            for waiting in self._pool.pop(kind, []):
                await waiting.kill()
        for path in (self.templates).glob(f"{image_id}.*"):
            await asyncio.to_thread(shutil.rmtree, path, True)

    async def derived(self) -> set[str]:
        found = await asyncio.to_thread(lambda: [path.name for path in self.templates.glob("[!.]*.*")])
        return {name.partition(".")[0] for name in found}

    async def shared(self, images: Sequence[str]) -> dict[str, int]:
        return {image: await self._shared(image) for image in images}

    async def _shared(self, image_id: str) -> int:
        used = {one.made.memory for one in self._instances.values() if one.spec.image.id == image_id}
        used |= {made.memory for kind, made in self._templates.items() if kind.image == image_id}
        # More than one where sandboxes came from other hosts, each with the template that it was cloned from.
        return sum([await asyncio.to_thread(template.resident, memory) for memory in used])

    # -- machines

    def _refill(self, made: template.Made) -> None:
        if self._closed or len(self._pool.setdefault(_kind(made), [])) + len(self._filling) >= self._waiting:
            return
        task = asyncio.create_task(self._add_waiting(made), name="start a machine ahead")
        self._filling.add(task)
        task.add_done_callback(self._filling.discard)

    async def _add_waiting(self, made: template.Made) -> None:
        try:
            waiting = await self._spawn(made, made.overlay, _limits(made.image))
        except SandboxError:
            return  # the sandbox that needs it will start its own, and say why it cannot
        pool = self._pool.get(_kind(made))
        if self._closed or pool is None:
            await waiting.kill()
        else:
            pool.append(waiting)

    async def _spawn(self, made: template.Made, overlay: Path, limits: Limits, *, cold: bool = False) -> Vm:
        site, guest, _ = self._ready()
        boot = (guest.kernel, guest.initramfs) if cold else None
        return await Vm.spawn(site, Parts(made.shape, made.memory, made.base, overlay, boot, cold), limits)

    async def start_vm(self, spec: Spec, made: template.Made, kept: Path | None, *, memory: bool) -> Vm:
        pool = self._pool.get(_kind(made), [])
        if kept is None and pool and spec.limits == _limits(made.image):
            machine = pool.pop()
        else:
            overlay = kept / state.OVERLAY if kept else made.overlay
            machine = await self._spawn(made, overlay, spec.limits, cold=not memory)
        try:
            if memory:
                await machine.load(kept / state.MEMORY if kept else made.state)
        except BaseException:  # whatever it is, cancellation too: raised again below
            await machine.kill()
            raise
        if kept is None:
            self._refill(made)
        return machine

    # -- sandboxes

    async def connect(self, spec: Spec, machine: Vm, network: Network) -> str:
        """As ``Maker.connect``."""
        return await self._egress.connect(spec.id, machine.record.pid, network)

    def traffic(self, sandbox: str) -> int:
        return self._egress.traffic(sandbox)

    async def unplug(self, sandbox: str) -> None:
        await self._egress.unplug(sandbox)

    async def disconnect(self, sandbox: str) -> None:
        await self._egress.disconnect(sandbox)

    async def create(self, spec: Spec) -> MicroVm:
        return await self._begin(spec, None)

    async def restore(self, spec: Spec, snapshot: Snapshot) -> MicroVm:
        if snapshot.runtime != RUNTIME:
            raise SandboxError(f"a snapshot of the {snapshot.runtime} runtime cannot be restored by {RUNTIME}")
        return await self._begin(spec, snapshot)

    async def _begin(self, spec: Spec, snapshot: Snapshot | None) -> MicroVm:
        network = spec.network.reaches_out
        self._require_egress(network)
        if spec.id in self._instances or spec.id in self._starting:
            raise SandboxError(f"sandbox id {spec.id} is in use")
        self._starting.add(spec.id)
        try:
            kept = Path(snapshot.directory) if snapshot else None
            if kept is None:
                made = await self._made(spec.image, network=network)
            else:
                made = await self._of_state(spec.image, kept)
            if network and not made.shape.network:
                raise RuntimeUnavailable(NO_CARD)
            machine = await self.start_vm(spec, made, kept, memory=snapshot is None or snapshot.memory)
            instance = MicroVm(spec, made, self, self._store(spec.id), machine, "running")
            try:
                await asyncio.to_thread((machine.path / "owner").write_text, spec.id)
                await instance.run(fresh=True)
            except BaseException:  # whatever it is, cancellation too: raised again below
                await machine.kill()
                await self._egress.disconnect(spec.id)
                raise
            self._instances[spec.id] = instance
        finally:
            self._starting.discard(spec.id)
        return instance

    async def _of_state(self, image: Image, kept: Path) -> template.Made:
        """The very template that a state was taken from: it holds nothing else's pages."""
        try:
            wanted = (kept / state.TEMPLATE).read_text()
        except OSError as error:
            raise SandboxError(f"{kept} holds no state of a virtual machine: {error.strerror}") from error
        return await self.of_digest(image, wanted)

    async def of_digest(self, image: Image, wanted: str) -> template.Made:
        made = await asyncio.to_thread(template.with_digest, self.templates, image, wanted)
        if made is None:
            raise TemplateNotFound(
                f"template {image.name!r} is not here as it was when the state was taken: move the sandbox from a host "
                "that holds it, which brings the template along"
            )
        return made

    @property
    def templates(self) -> Path:
        """Where templates are kept."""
        return self._state / "templates"

    @contextlib.asynccontextmanager
    async def making(self, name: str) -> AsyncIterator[None]:
        """Alone with the template of that directory's name."""
        async with self._making.setdefault(name, asyncio.Lock()):
            yield

    async def awaiting(self, spec: Spec, made: template.Made) -> MicroVm:
        """An instance whose machine waits for its state. The caller loads, and runs or kills it."""
        site, _, _ = self._ready()
        if spec.id in self._instances or spec.id in self._starting:
            raise SandboxError(f"sandbox id {spec.id} is in use")
        self._starting.add(spec.id)
        try:
            machine = await self._spawn(made, made.overlay, spec.limits)
            await asyncio.to_thread((site.directory / machine.record.directory / "owner").write_text, spec.id)
            instance = MicroVm(spec, made, self, self._store(spec.id), machine, "running")
            try:
                await self.connect(spec, machine, spec.network)  # before anything is sent: what is lacking is told now
            except BaseException:  # whatever it is, cancellation too: raised again below
                await machine.kill()
                raise
            self._instances[spec.id] = instance
        finally:
            self._starting.discard(spec.id)
        return instance

    # -- to and from other hosts: ``runtimes.moving.Movable``

    def passport(self, instance: Instance) -> bytes:
        sandbox = _own(instance)
        return msgspec.json.encode(self._passport(sandbox.made.shape.kvm, memory=sandbox.has_memory))

    def objection(self, passport: bytes) -> Objection:
        try:
            comes = msgspec.json.decode(passport, type=Passport)
        except msgspec.MsgspecError as error:
            raise SandboxError(f"the other host's virtual machines are of another version: {error}") from None
        return objection(comes, self._passport(self._kvm, memory=True))

    def _passport(self, kvm: bool, *, memory: bool) -> Passport:
        _, _, qemu = self._ready()
        return Passport(qemu.version, BOARD, setup.processor() if kvm else "", memory)

    def has_memory(self, instance: Instance) -> bool:
        return _own(instance).has_memory

    async def lend(self, instance: Instance, streams: Streams) -> None:
        await carry.offer(Control(streams), _own(instance).made)

    async def borrow(self, spec: Spec, streams: Streams) -> None:
        await carry.accept(self, spec.image, Control(streams))

    def base(self, instance: Instance) -> Base:
        made = _own(instance).made
        return Base(made.digest, made.place, carry.FILES)

    async def has_base(self, spec: Spec, name: str) -> bool:
        return await asyncio.to_thread(template.with_digest, self.templates, spec.image, name) is not None

    async def bring(self, spec: Spec, name: str, directory: Path) -> None:
        async with self.making(f"{spec.image.id}.{name[:16]}"):
            if not await self.has_base(spec, name):
                await carry.settle(self.templates, spec.image, directory, name)

    async def part(self, instance: Instance) -> None:
        await _own(instance).hang_up()

    async def send(self, instance: Instance, dial: Dial, stopped: Callable[[], None], give: Callable[[], None]) -> None:
        await migration.send(self, _own(instance), dial, stopped, give)

    async def receive(self, spec: Spec, dial: Dial) -> MicroVm:
        return await migration.receive(self, spec, dial)

    async def stay(self, instance: Instance) -> None:
        await _own(instance).stay()

    def _store(self, sandbox: str) -> Path:
        return self._state / "paused" / hashlib.sha256(sandbox.encode()).hexdigest()[:32]

    async def adopt(self, record: bytes) -> MicroVm | None:
        site, _, _ = self._ready()
        found = msgspec.json.decode(record, type=Record)
        made = await self.of_digest(found.spec.image, found.template)
        machine = None
        if found.kept in ("running", "left"):
            machine = await Vm.find(site, found.vm) if found.vm else None
            if machine is None:
                return None
        instance = MicroVm(found.spec, made, self, Path(found.store), machine, found.kept)
        if machine is not None:
            try:
                await instance.take_up()
            except SandboxGone:
                await machine.kill()
                return None
        self._instances[found.spec.id] = instance
        return instance

    def gone(self, instance: MicroVm) -> None:
        self._instances.pop(instance.spec.id, None)

    async def sweep(self, known: set[str]) -> list[str]:
        site, _, _ = self._ready()
        keep = {instance.vm.record.directory for instance in self._instances.values() if instance.vm is not None}
        keep |= {waiting.record.directory for pool in self._pool.values() for waiting in pool}
        swept = []
        for path in sorted(site.directory.glob("v*")):
            owner = (path / "owner").read_text() if (path / "owner").exists() else ""
            if path.name not in keep and owner not in known and not self._starting and not self._filling:
                await asyncio.to_thread(vm.erase, site, path.name)
                swept.append(f"virtual machine {path.name} of {owner or 'nobody'}")
        swept += [f"network of virtual machine {name}" for name in await self._egress.sweep(known | self._starting)]
        stores = {self._store(sandbox).name for sandbox in known}
        for path in sorted((self._state / "paused").glob("*")):
            if path.name not in stores:
                await asyncio.to_thread(shutil.rmtree, path, True)
                swept.append(f"paused state {path.name}")
        for path in sorted((self.templates).glob(".making-*")):
            if not any(lock.locked() for lock in self._making.values()):
                await asyncio.to_thread(shutil.rmtree, path, True)
                swept.append(f"unfinished template {path.name}")
        return swept

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*self._filling, return_exceptions=True)
        for pool in self._pool.values():
            for waiting in pool:
                await waiting.kill()
        self._pool.clear()
        for instance in list(self._instances.values()):
            await instance.let_go()
        self._instances.clear()
        if self._site is not None and self._site.groups is not None:
            await asyncio.to_thread(groups.close_node, self._site.groups)


def _kind(made: template.Made) -> _Kind:
    return _Kind(made.image.id, made.shape.network)


def _own(instance: Instance) -> MicroVm:
    if not isinstance(instance, MicroVm):
        raise SandboxError(f"sandbox {instance.spec.id} is no virtual machine of this runtime")
    return instance


def _limits(image: Image) -> Limits:
    """What a template asks for, where the request names nothing else."""
    return Limits(memory_mib=image.memory_mib, cpus=float(image.cpus), disk_mib=image.disk_mib)
