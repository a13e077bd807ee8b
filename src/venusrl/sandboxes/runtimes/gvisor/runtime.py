"""Sandboxes in gVisor.

Owns: ``GvisorRuntime``: checks, creation, adoption and the sweep of what a crash left.

Must not know: E2B, HTTP, admission, tenants.

Guarantees: those of ``runtimes.base``. A sandbox has a kernel of its own (in user space); its files pass through a file
server of runsc's that sees this sandbox's directory only.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from venusrl.sandboxes.agent import build
from venusrl.sandboxes.agent.client import unix
from venusrl.sandboxes.protocol import RuntimeUnavailable, SandboxError, SandboxGone, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Abilities, Instance, Snapshot, Spec
from venusrl.sandboxes.runtimes.gvisor import place
from venusrl.sandboxes.runtimes.gvisor.instance import NAME, GvisorInstance, Record, check_network
from venusrl.sandboxes.runtimes.namespace import groups
from venusrl.sandboxes.runtimes.namespace.cgroup import NodeGroups
from venusrl.sandboxes.runtimes.namespace.pages import Residency
from venusrl.sandboxes.templates.api import Image

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_TRIAL_S = 60.0
_LACKS = {
    "memory_snapshot": "runsc cannot save a sandbox whose socket the host talks to: use the microvm runtime",
    "live_migration": "gVisor has none: use the microvm runtime",
    "egress": "gVisor sandboxes get no network but loopback here: use the namespace runtime",
    "paging": "a paused sandbox with processes keeps its memory: end them, or use the microvm runtime",
}


class GvisorRuntime:
    """Implements ``runtimes.base.Runtime``. ``state`` is its own directory on this host."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._runsc: place.Runsc | None = None
        self._node: NodeGroups | None = None
        self._program = Path()
        self._sandboxes = -1
        self._instances: dict[str, GvisorInstance] = {}
        self._residency = Residency()

    @property
    def name(self) -> str:
        return NAME

    async def start(self) -> Abilities:
        self._state = self._state.absolute()
        for folder in (self._state, self._state / "sandboxes"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        runsc = place.find(self._state / "runsc")
        await asyncio.to_thread(runsc.call, "do", "/bin/true", timeout_s=_TRIAL_S)
        self._runsc = runsc
        if self._sandboxes < 0:
            self._sandboxes = os.open(self._state / "sandboxes", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._node = await asyncio.to_thread(groups.open_node, self._group_name())
        self._program = await asyncio.to_thread(self._place_program, await build.program())
        lacks = dict(_LACKS)
        if self._node is None:
            lacks["limits"] = "no control groups are writable: sandboxes cannot be limited as wholes"
        return Abilities(memory_snapshot=False, live_migration=False, egress=False, lacks=lacks)

    async def prepare(self, image: Image, *, network: bool = False) -> None:
        self._require_layers(image)
        await asyncio.to_thread(self._residency.know, image)

    async def forget(self, image_id: str) -> None:
        self._residency.forget(image_id)

    async def derived(self) -> set[str]:
        return self._residency.known

    async def shared(self, images: Sequence[str]) -> dict[str, int]:
        """gVisor's file server reads layers through the host's page cache; runsc keeps no page of its own shared."""
        return await self._residency.shared(images)

    async def create(self, spec: Spec) -> Instance:
        return await self._launch(spec, None)

    async def restore(self, spec: Spec, snapshot: Snapshot) -> Instance:
        if snapshot.runtime not in (NAME, "namespace") or snapshot.memory:
            raise SandboxError(f"a snapshot of the {snapshot.runtime} runtime cannot be restored by {NAME}")
        return await self._launch(spec, Path(snapshot.directory) / "files")

    async def adopt(self, record: bytes) -> Instance | None:
        known = msgspec.json.decode(record, type=Record)
        if known.spec.id in self._instances:
            raise SandboxError(f"sandbox {known.spec.id} is held already")
        instance = self._instance(known.spec)
        try:
            instance.take_up(known)
        except SandboxGone:
            await instance.kill()
            return None
        self._instances[known.spec.id] = instance
        return instance

    async def sweep(self, known: set[str]) -> list[str]:
        folder = self._state / "sandboxes"
        found = {entry.name for entry in folder.iterdir()}
        if self._node is not None:
            found |= groups.sandboxes_in(self._node)
        left = sorted(found - known - set(self._instances))
        stuck: list[str] = []
        for name in left:
            try:
                await asyncio.to_thread(self._place(name).remove)
            except SandboxError as error:  # the others go all the same
                stuck.append(f"{name}: {error}")
        if stuck:
            raise SandboxError(
                f"{len(stuck)} of {len(left)} left-over sandboxes could not be removed: {'; '.join(stuck)}"
            )
        return left

    async def close(self) -> None:
        instances, self._instances = list(self._instances.values()), {}
        for instance in instances:
            await instance.let_go()
        if self._node is not None:
            await asyncio.to_thread(groups.close_node, self._node)
        if self._sandboxes >= 0:
            os.close(self._sandboxes)
            self._sandboxes = -1

    async def _launch(self, spec: Spec, kept: Path | None) -> Instance:
        if _ID.fullmatch(spec.id) is None:
            raise SandboxError(f"{spec.id!r} is not a sandbox id: letters, digits, '-' and '_', at most 63")
        if spec.id in self._instances or self._place(spec.id).folder.exists():
            raise SandboxError(f"there is a sandbox {spec.id} already")
        self._require_layers(spec.image)
        check_network(spec.network)
        instance = self._instance(spec)
        self._instances[spec.id] = instance
        try:
            await instance.launch(kept)
        except BaseException as error:  # whatever it was, cancelled included, leaves nothing behind
            await instance.kill()
            if isinstance(error, OSError):
                raise SandboxError(f"the sandbox could not be made: {error}") from error
            raise
        return instance

    def _instance(self, spec: Spec) -> GvisorInstance:
        # By descriptor: a Unix socket's address has room for 107 bytes, a state directory's path may need more.
        connect = unix(f"/proc/self/fd/{self._sandboxes}/{self._place(spec.id).socket_below}")
        return GvisorInstance(self._place(spec.id), self._running(), spec, self._program, connect, self._forgotten)

    def _forgotten(self, sandbox: str) -> None:
        self._instances.pop(sandbox, None)

    def _place(self, sandbox: str) -> place.Place:
        return place.Place(self._state, self._running(), self._node, sandbox)

    def _group_name(self) -> str:
        """The same for every process on this state directory, and no other's."""
        return "gv-" + hashlib.sha256(str(self._state).encode()).hexdigest()[:12]

    def _running(self) -> place.Runsc:
        if self._runsc is None:
            raise RuntimeUnavailable("the gvisor runtime was not started: call start first")
        return self._runsc

    def _require_layers(self, image: Image) -> None:
        if not image.layers:
            raise TemplateNotFound(
                f'the gvisor runtime needs a root of its own: use a template ("base"), not {image.name}'
            )
        for layer in image.layers:
            if not Path(layer).is_dir():
                raise TemplateNotFound(f"the template {image.name} lacks its layer {layer}: build it again")

    def _place_program(self, program: Path) -> Path:
        """The agent alone in a directory that can be shown to sandboxes."""
        folder = self._state / "agent" / program.name
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "agent"
        if not target.exists():
            part = folder.with_suffix(".part")
            shutil.copyfile(program, part)
            part.chmod(0o755)
            part.rename(target)
        return folder
