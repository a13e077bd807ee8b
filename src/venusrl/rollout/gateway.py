"""The only door to the engines: every turn of every trajectory goes through here.

Owns: asking the scheduler for each turn (``TurnRequested``) and carrying out what it decides (``Dispatch``,
``Hold``, ``Preempt``, ``CancelTrajectory``); the request at the engine with its pins, cache namespace and time
limit; asking again after an engine was lost; feeding the recorder.

Must not know: who drives the agent, which policy schedules, tasks, sandboxes, processes.

Guarantees: a turn is at one engine at most, and a cancelled one has let go of its engine before its ``turn``
call returns (or the engine did not answer within the grace time); the version that a turn started with is read
at dispatch; sampling is what the recipe pinned, whatever an agent asks; every ``TurnDispatched`` is followed by
one ``TurnFinished``; losses are bounded, then the engine's error goes to the caller; every sampled token is
recorded or counted as discarded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from venusrl.clock import Clock, SystemClock
from venusrl.rollout.chat import ChatTokenizer
from venusrl.rollout.engines.protocol import EngineClient, EngineError, EngineLost, Generation
from venusrl.rollout.kv_orders import KvOrders, Wish
from venusrl.rollout.recorder import Answer, Ask, Recorder
from venusrl.rollout.requests import Requests, Running, Worker
from venusrl.rollout.settings import GatewaySettings
from venusrl.rollout.turns import Asked, Rollout, TurnCancelled, TurnResult
from venusrl.rollout.waiting import to_the_end
from venusrl.scheduling.actions import Action, CancelTrajectory, Dispatch, Hold, Preempt, ReleaseKV, RetainKV
from venusrl.scheduling.events import Event, TurnDispatched, TurnFinished, TurnRequested
from venusrl.types import Message, StopReason

_BACKOFF_S = 0.25
_BACKOFF_LIMIT_S = 8.0


class VersionMismatch(EngineError):
    """The engine sampled with weights that it must not have; the tokens are not recorded."""

    reason = "version_mismatch"


class _Flight:
    """One live trajectory."""

    def __init__(self, trajectory: str, group: str, recorder: Recorder) -> None:
        self.trajectory = trajectory
        self.group = group
        self.recorder = recorder
        self.lock = asyncio.Lock()
        self.turn = 0
        self.start_version: int | None = None
        self.cancelled: str | None = None
        self.hold: str | None = None
        self.dispatch: asyncio.Future[Dispatch] | None = None
        self.running: Running | None = None
        self.home = ""
        """The worker of its last turn."""


class _Progress(msgspec.Struct):
    """What happened to one turn so far (clock seconds)."""

    requested_at: float
    ready_at: float
    dispatched_at: float | None = None
    waited_s: float = 0.0
    worker: str = ""
    version: int | None = None
    preemptions: int = 0
    losses: int = 0


class Gateway:
    """Implements ``Turns`` over any number of engine workers (see the module's guarantees)."""

    def __init__(
        self,
        engines: Mapping[str, EngineClient],
        tokenizer: ChatTokenizer,
        notify: Callable[[Event], None],
        clock: Clock | None = None,
        *,
        settings: GatewaySettings,
    ) -> None:
        """``notify`` may call ``apply`` before it returns. A worker serves once its version is acknowledged."""
        self._tokenizer = tokenizer
        self._notify = notify
        self._clock = clock or SystemClock()
        self._settings = settings
        self._workers = {name: Worker(name, engine, None) for name, engine in engines.items()}
        self._flights: dict[str, _Flight] = {}
        self._first_prompts: dict[str, list[int]] = {}
        self._requests = Requests(settings, self._clock)
        self.kv_orders = KvOrders(self._requests.keep)
        self.late_actions = 0
        """Actions for turns that were over when they came (a race of the scheduler with a cancellation)."""

    # --- workers ----------------------------------------------------------------------------------------------
    def add_worker(self, worker: str, engine: EngineClient, version: int) -> None:
        """Begin to use a worker that serves ``version``; replaces one of the same name."""
        self.remove_worker(worker)
        self._workers[worker] = Worker(worker, engine, version)

    def remove_worker(self, worker: str) -> None:
        """The worker is gone: its turns are asked for again."""
        if self._workers.pop(worker, None) is None:
            return
        for flight in self._flights.values():
            if flight.running is not None and flight.running.worker.name == worker:
                flight.running.task.cancel()

    def acknowledge(self, worker: str, version: int) -> None:
        """The worker now generates with ``version`` (report it together with ``WorkerAcknowledged``)."""
        if worker in self._workers:  # else it is gone already, and what it serves is of no interest
            self._workers[worker].version = version

    # --- the scheduler's decisions ----------------------------------------------------------------------------
    def apply(self, action: Action) -> None:
        """Carry out a decision about a turn or its KV. Never blocks."""
        match action:
            case Dispatch():
                flight = self._flights.get(action.trajectory)
                if flight is None or flight.dispatch is None or flight.dispatch.done() or flight.turn != action.turn:
                    self.late_actions += 1
                    return
                flight.hold = None
                flight.dispatch.set_result(action)
            case Hold():
                flight = self._flights.get(action.trajectory)
                if flight is not None and flight.turn == action.turn:
                    flight.hold = action.reason
            case Preempt():
                flight = self._flights.get(action.trajectory)
                if flight is None or flight.running is None or flight.turn != action.turn:
                    self.late_actions += 1
                    return
                self._requests.preempt(flight.running)
            case CancelTrajectory():
                self.cancel(action.trajectory, action.reason)
            case RetainKV() | ReleaseKV():
                worker = self._workers.get(action.worker)
                if worker is not None:
                    wish: Wish = "retain" if isinstance(action, RetainKV) else "release"
                    self.kv_orders.wish(worker, action.trajectory, wish)
            case _:
                raise TypeError(f"{type(action).__name__} is not the gateway's to carry out")

    def cancel(self, trajectory: str, reason: str) -> None:
        """End a trajectory's running and future turns with ``TurnCancelled``. Unknown ones are over already."""
        flight = self._flights.get(trajectory)
        if flight is None or flight.cancelled is not None:
            return
        flight.cancelled = reason
        if flight.dispatch is not None and not flight.dispatch.done():
            flight.dispatch.set_exception(TurnCancelled(reason))
        if flight.running is not None:
            self._requests.start_letting_go(flight.running)

    @property
    def holds(self) -> dict[str, str]:
        """Trajectories that wait for a dispatch, and why."""
        waiting = (f for f in self._flights.values() if f.dispatch is not None)
        return {f.trajectory: f.hold or "requested" for f in waiting}

    async def settled(self) -> None:
        """Wait until cancelled trajectories have let go of their engines (at most the grace time)."""
        leaving = [f.running.task for f in self._flights.values() if f.cancelled is not None and f.running is not None]
        await self._requests.ended(leaving)

    # --- turns --------------------------------------------------------------------------------------------------
    def register(self, trajectory: str, group: str) -> None:
        if trajectory in self._flights:
            raise ValueError(f"trajectory {trajectory} is registered already")
        recorder = Recorder(
            self._tokenizer, context_tokens=self._settings.context_tokens, keep_partials=self._settings.keep_partials
        )
        self._flights[trajectory] = _Flight(trajectory, group, recorder)

    async def turn(
        self, trajectory: str, messages: Sequence[Message], max_tokens: int, asked: Asked | None = None
    ) -> TurnResult:
        flight = self._flights[trajectory]
        async with flight.lock:
            if flight.cancelled is not None:
                raise TurnCancelled(flight.cancelled)
            budget = self._pin(flight, max_tokens, asked)
            now = self._clock.monotonic()
            progress = _Progress(requested_at=now, ready_at=now)
            flight.recorder.begin(messages, budget)
            try:
                await self._generate_all(flight, progress)
                answer = flight.recorder.commit()
            except BaseException as error:  # counted whatever it was, and raised again
                flight.recorder.drop(_reason(error, flight))
                raise
            flight.turn += 1
            return self._result(answer, progress)

    def finish(self, trajectory: str) -> Rollout:
        flight = self._flights[trajectory]
        if flight.lock.locked():
            raise RuntimeError(f"trajectory {trajectory} is finished while a turn of it runs")
        del self._flights[trajectory]
        home = self._workers.get(flight.home)
        if home is not None:
            # What is over would else be evicted after idle KV that is still wanted: it was used last.
            self.kv_orders.wish(home, trajectory, "release")
        if all(f.group != flight.group for f in self._flights.values()):
            self._first_prompts.pop(flight.group, None)
        return Rollout(
            segments=flight.recorder.segments(),
            start_version=flight.start_version,
            discarded=dict(flight.recorder.discarded),
            counters=dict(flight.recorder.counters),
        )

    def count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    async def close(self) -> None:
        """Cancel everything that still runs; bounded by the grace time."""
        for trajectory in list(self._flights):
            self.cancel(trajectory, "shutdown")
        await self._requests.ended([f.running.task for f in self._flights.values() if f.running is not None])
        await self._requests.close()

    # --- one turn -----------------------------------------------------------------------------------------------
    async def _generate_all(self, flight: _Flight, progress: _Progress) -> None:
        """Ask engines until the turn has its tokens: once, again after each abort, again after each loss."""
        while (ask := flight.recorder.ask()).max_tokens > 0:
            dispatch = await self._dispatched(flight, ask)
            try:
                generation = await self._generate(flight, dispatch, ask, progress)
                self._take(flight, generation, progress)
            except EngineError as error:
                if flight.cancelled is not None:
                    raise TurnCancelled(flight.cancelled) from error
                await self._after_loss(flight, error, progress)
                continue
            if generation.stop is not StopReason.ABORT:
                return
            flight.recorder.counters["preemptions"] += 1
            progress.preemptions += 1

    def _take(self, flight: _Flight, generation: Generation, progress: _Progress) -> None:
        """Record what was generated, unless the trajectory was cancelled or the engine is at fault."""
        if flight.cancelled is not None:
            flight.recorder.drop(flight.cancelled, len(generation.token_ids))
            raise TurnCancelled(flight.cancelled)
        try:
            self._check_versions(generation, progress)
            flight.recorder.add(generation)
        except EngineError as error:
            flight.recorder.discarded[error.reason] += len(generation.token_ids)
            raise

    async def _dispatched(self, flight: _Flight, ask: Ask) -> Dispatch:
        prompt = flight.recorder.prompt
        waiting: asyncio.Future[Dispatch] = asyncio.get_running_loop().create_future()
        flight.dispatch = waiting
        try:
            self._notify(
                TurnRequested(
                    trajectory=flight.trajectory,
                    turn=flight.turn,
                    prompt_tokens=len(prompt),
                    shared_prefix=self._shared_prefix(flight, prompt),
                    max_tokens=ask.max_tokens,
                    resumed=ask.resumed,
                )
            )
            return await waiting
        finally:
            flight.dispatch = None
            flight.hold = None

    async def _generate(self, flight: _Flight, dispatch: Dispatch, ask: Ask, progress: _Progress) -> Generation:
        worker = self._workers.get(dispatch.worker)
        if worker is None or worker.version is None:
            raise EngineLost(f"engine worker {dispatch.worker} is gone")
        now = self._clock.monotonic()
        progress.waited_s += now - progress.ready_at
        progress.dispatched_at = now if progress.dispatched_at is None else progress.dispatched_at
        progress.worker, progress.version = worker.name, worker.version
        flight.home = worker.name
        if flight.start_version is None:
            flight.start_version = worker.version
        turn = flight.turn
        running = self._requests.send(flight.trajectory, turn, worker, ask, dispatch.urgency)
        flight.running = running
        self._notify(TurnDispatched(flight.trajectory, turn, worker.name, worker.version))
        generation: Generation | None = None
        try:
            if flight.cancelled is not None:
                self._requests.start_letting_go(running)
            generation = await self._requests.outcome(running)
        except asyncio.CancelledError:
            await to_the_end(self._requests.let_go(running))
            flight.recorder.drop(flight.cancelled or "cancelled", running.partial_tokens)
            raise
        finally:
            flight.running = None
            progress.ready_at = self._clock.monotonic()
            self._notify(
                TurnFinished(
                    trajectory=flight.trajectory,
                    turn=turn,
                    generated=len(generation.token_ids) if generation is not None else 0,
                    cached_tokens=generation.cached_tokens if generation is not None else 0,
                    stop=generation.stop if generation is not None else StopReason.ABORT,
                    # The engine's cache is namespaced by version: after new weights nobody finds what older ones left.
                    leaves_kv=worker.version == progress.version,
                )
            )
        return generation

    async def _after_loss(self, flight: _Flight, error: EngineError, progress: _Progress) -> None:
        """Count a loss; raise when there were too many, else pause so that the worker's death becomes known."""
        progress.losses += 1
        if progress.losses > self._settings.turn_reissues:
            raise error
        flight.recorder.counters["reissues"] += 1
        await self._clock.sleep(min(_BACKOFF_LIMIT_S, _BACKOFF_S * 2 ** (progress.losses - 1)))
        if flight.cancelled is not None:
            raise TurnCancelled(flight.cancelled) from error

    def _check_versions(self, generation: Generation, progress: _Progress) -> None:
        acknowledged, pinned = progress.version, self._settings.pinned_version
        for span in generation.spans:
            if pinned is not None and span.version != pinned:
                raise VersionMismatch(f"{progress.worker} sampled with version {span.version}, pinned to {pinned}")
            if acknowledged is not None and span.version < acknowledged:
                raise VersionMismatch(
                    f"{progress.worker} sampled with version {span.version} after it acknowledged {acknowledged}"
                )
            if not self._settings.keep_partials and span.version != acknowledged:
                raise VersionMismatch(f"{progress.worker} went from version {acknowledged} to {span.version} in a turn")

    def _pin(self, flight: _Flight, max_tokens: int, asked: Asked | None) -> int:
        """The rollout's pins win over what an agent asks; each difference is counted."""
        overridden = self._settings.overridden(max_tokens, asked)
        if overridden:
            flight.recorder.counters.update(f"override_{name}" for name in overridden)
            flight.recorder.counters["overrides"] += len(overridden)
        return min(max_tokens, self._settings.max_turn_tokens)

    def _shared_prefix(self, flight: _Flight, prompt: list[int]) -> int:
        """Leading tokens in common with the group's first prompt: what its members can share in a cache."""
        first = self._first_prompts.setdefault(flight.group, prompt)
        if prompt[: len(first)] == first:
            return len(first)
        return next((i for i, (a, b) in enumerate(zip(first, prompt, strict=False)) if a != b), len(prompt))

    def _result(self, answer: Answer, progress: _Progress) -> TurnResult:
        now = self._clock.monotonic()
        return TurnResult(
            text=answer.text,
            stop=answer.stop,
            prompt_tokens=answer.prompt_tokens,
            generated_tokens=answer.generated_tokens,
            cached_tokens=answer.cached_tokens,
            requested_at=progress.requested_at,
            dispatched_at=now if progress.dispatched_at is None else progress.dispatched_at,
            finished_at=now,
            waited_s=progress.waited_s,
            worker=progress.worker,
            version=progress.version,
            preemptions=progress.preemptions,
        )


def _reason(error: BaseException, flight: _Flight) -> str:
    """Why the tokens of a turn that did not end are discarded."""
    if isinstance(error, TurnCancelled):
        return error.reason
    if isinstance(error, asyncio.CancelledError):
        return flight.cancelled or "cancelled"
    return str(getattr(error, "reason", type(error).__name__))
