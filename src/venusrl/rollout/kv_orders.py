"""What the scheduler wishes of idle KV, told to the engines that obey.

Owns: the newest wish of each trajectory until its engine was told, and one call at a time an engine. Must not know: why
something is wished, how an engine evicts.

Guarantees: nothing waits for an engine; wishes for one that has no such control are counted, not sent (the scheduler's
books are all that changes); an engine that fails the call loses its wishes, not its turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from venusrl.rollout.engines.protocol import EngineError
from venusrl.rollout.requests import Worker

Wish = Literal["release", "retain"]


class KvOrders:
    """See the module. ``keep`` holds a task's handle until it ends."""

    def __init__(self, keep: Callable[[asyncio.Task[None]], None]) -> None:
        self._keep = keep
        self._wishes: dict[str, dict[str, Wish]] = {}
        self._telling: set[str] = set()
        self.told = 0
        self.unheard = 0
        """Wishes for engines without such a control."""

    def wish(self, worker: Worker, trajectory: str, wish: Wish) -> None:
        """The trajectory's KV on ``worker`` may go first, or is to go last."""
        if not worker.engine.kv_control:
            self.unheard += 1
            return
        self._wishes.setdefault(worker.name, {})[trajectory] = wish
        if worker.name not in self._telling:
            self._telling.add(worker.name)
            self._keep(asyncio.create_task(self._tell(worker), name=f"kv-order:{worker.name}"))

    async def _tell(self, worker: Worker) -> None:
        try:
            while wishes := self._wishes.pop(worker.name, None):
                release = [name for name, wish in wishes.items() if wish == "release"]
                await worker.engine.order_kv(release, [name for name in wishes if wishes[name] == "retain"])
                self.told += len(wishes)
        except EngineError:
            # A dead or broken engine has no KV worth an order; its turns find out by themselves.
            return
        finally:
            self._telling.discard(worker.name)
