"""A gateway on virtual time whose scheduler is the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from venusrl.rollout.gateway import Gateway
from venusrl.rollout.settings import GatewaySettings
from venusrl.rollout.turns import TurnResult
from venusrl.scheduling.actions import Dispatch
from venusrl.scheduling.events import Event, TurnRequested
from venusrl.testing.chat import answer, toy_chat, turn_start
from venusrl.testing.clock import VirtualClock
from venusrl.testing.engine import FakeEngine, ScriptedModel
from venusrl.types import Message, SamplingParams

CHAT = toy_chat()
TASK = [Message("user", "fix the file")]
TEXT = "look\n```sh\nls -la\n```"
LENGTH = len(answer(CHAT, TEXT))
SETTINGS = GatewaySettings(
    sampling=SamplingParams(stop_token_ids=CHAT.stop_token_ids),
    context_tokens=512,
    max_turn_tokens=64,
    turn_timeout_s=100.0,
    turn_reissues=2,
    abort_grace_s=5.0,
)


def scripted(*texts: str) -> ScriptedModel:
    return ScriptedModel([answer(CHAT, text) for text in texts or (TEXT,)], turn_start(CHAT))


class Bench:
    """A gateway whose scheduler is the test: it dispatches at once to ``to``, or when told."""

    def __init__(self, settings: GatewaySettings = SETTINGS) -> None:
        self.clock = VirtualClock()
        self.events: list[Event] = []
        self.to: str | None = "w0"
        self.on_event: Callable[[Event], None] = lambda event: None
        self.gateway = Gateway({}, CHAT, self.notify, self.clock, settings=settings)

    def engine(self, name: str = "w0", version: int = 0, respond: ScriptedModel | None = None) -> FakeEngine:
        """A worker that gives a token a second."""
        made = FakeEngine(respond or scripted(), version=version, pace=lambda: self.clock.sleep(1.0))
        self.gateway.add_worker(name, made, version)
        return made

    def notify(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)
        if isinstance(event, TurnRequested) and self.to is not None:
            self.dispatch(event.trajectory, event.turn, self.to)

    def dispatch(self, trajectory: str, turn: int, worker: str) -> None:
        self.gateway.apply(Dispatch(reason="test", trajectory=trajectory, turn=turn, worker=worker, urgency=3))

    def begin(self, trajectory: str = "t0", *, max_tokens: int = 64) -> asyncio.Task[TurnResult]:
        self.gateway.register(trajectory, "g")
        return asyncio.create_task(self.gateway.turn(trajectory, TASK, max_tokens))

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def last(self, kind: type[Event]) -> Event:
        return [event for event in self.events if isinstance(event, kind)][-1]


@asynccontextmanager
async def bench(settings: GatewaySettings = SETTINGS) -> AsyncIterator[Bench]:
    made = Bench(settings)
    try:
        yield made
    finally:
        closing = asyncio.create_task(made.gateway.close())
        await made.clock.run_for(60.0)
        await closing
