"""Owns: one host of a move, over its own world on disk, which can begin again. Must not know what is moved, or how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, Self, TypeVar

from venusrl.sandboxes.host.local import HostConfig, LocalHost
from venusrl.sandboxes.runtimes.base import Runtime
from venusrl.testing.hosts import AdmitAll, FixedImages, PlainDoor

R = TypeVar("R", bound=Runtime)


class Side(Generic[R]):
    """A host named ``name`` below ``root``; ``make`` gives its runtime, over the world it is told."""

    def __init__(self, root: Path, name: str, make: Callable[[Path], R]) -> None:
        self.root, self.config, self._make = root / name, HostConfig(name=name, guard_s=60.0), make

    async def begin(self) -> Self:
        self.runtime = self._make(self.root / "world")
        state = self.root / "host"
        self.host = LocalHost(state, {"fake": self.runtime}, FixedImages(), AdmitAll(), PlainDoor(), self.config)
        await self.host.start()
        return self

    async def again(self) -> None:
        await self.host.close()
        await self.begin()

    async def held(self) -> dict[str, tuple[str, int]]:
        return {one.id: (one.state, one.epoch) for one in (await self.host.status()).held}
