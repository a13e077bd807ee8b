"""Turns from one engine pinned to one version, without a scheduler: what evaluation uses.

Owns: the trivial decision "now, there". Must not know: why it is asked. Guarantees: the gateway's own, and every
token comes from exactly the pinned version (an engine that answers with another one has failed).
"""

from __future__ import annotations

import msgspec

from venusrl.clock import Clock
from venusrl.rollout.chat import ChatTokenizer
from venusrl.rollout.engines.protocol import EngineClient
from venusrl.rollout.gateway import Gateway
from venusrl.rollout.settings import GatewaySettings
from venusrl.scheduling.actions import Dispatch
from venusrl.scheduling.events import Event, TurnRequested

_WORKER = "direct"


class DirectTurns(Gateway):
    """Implements ``Turns``; the engine's own queue orders the requests."""

    def __init__(
        self,
        engine: EngineClient,
        version: int,
        tokenizer: ChatTokenizer,
        clock: Clock | None = None,
        *,
        settings: GatewaySettings,
    ) -> None:
        """``settings`` as the gateway's; greedy is ``sampling.temperature`` 0."""
        super().__init__(
            {}, tokenizer, self._decide, clock, settings=msgspec.structs.replace(settings, pinned_version=version)
        )
        self._pinned = version
        self.use(engine)

    def use(self, engine: EngineClient) -> None:
        """Go on with this engine (a restarted one, at the pinned version)."""
        self.add_worker(_WORKER, engine, self._pinned)

    def _decide(self, event: Event) -> None:
        if isinstance(event, TurnRequested):
            self.apply(
                Dispatch(reason="direct", trajectory=event.trajectory, turn=event.turn, worker=_WORKER, urgency=0)
            )
