"""Single decisions of the ``venus`` policy, each with its reason. Cases T32, T34."""

from __future__ import annotations

import math
from collections import Counter
from decimal import Decimal
from typing import Any

from venusrl.scheduling import actions as act
from venusrl.scheduling import events as ev
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.policies import Policy
from venusrl.scheduling.policies.fcfs import Fcfs
from venusrl.scheduling.policies.venus import Venus, VenusConfig
from venusrl.scheduling.scheduler import Scheduler
from venusrl.testing.virtual_run import VirtualRun, Workload
from venusrl.types import StopReason

COSTS = EngineCosts(0.01, 1e-4, 1e-7, 1e-4, 0.0)
DEAR = EngineCosts(0.01, 1e-4, 1e-7, 1e-2, 0.0)
"""Prefill takes so long that KV is held through gaps of minutes."""


class Desk:
    """A scheduler and what it said; events are told by hand."""

    def __init__(
        self, groups: int = 4, size: int = 2, batch: int = 2, start: float = 0.0, version: int = 0, **settings: Any
    ) -> None:
        self.policy = Venus(VenusConfig(**settings))
        self.scheduler = Scheduler(SchedulerConfig(batch, size, Decimal(1), 1), self.policy)
        self.now = start
        self.said: list[act.Action] = []
        self.tell(ev.VersionPublished(version))
        for ordinal in range(groups):
            self.tell(ev.GroupOpened(f"g{ordinal}", ordinal, "t", size))
            for index in range(size):
                self.tell(ev.TrajectoryOpened(f"g{ordinal}/{index}", f"g{ordinal}", index, 0))
        self.tell(ev.Tick(), after=1.0)

    def tell(self, *events: ev.Event, after: float = 0.0) -> list[act.Action]:
        """What it answers to all of them."""
        self.now += after
        answer = [action for event in events for action in self.scheduler.handle(event, self.now)]
        self.said += answer
        for action in answer:
            if isinstance(action, act.Dispatch):
                answer += self.tell(ev.TurnDispatched(action.trajectory, action.turn, action.worker, 0))
        return answer

    def up(self, worker: str, capacity: int = 10_000, costs: EngineCosts | None = COSTS) -> list[act.Action]:
        return self.tell(ev.WorkerUp(worker, capacity, 64, 0, costs))

    def ask(self, trajectory: str, tokens: int = 1000, turn: int = 0, **extra: int) -> list[act.Action]:
        return self.tell(ev.TurnRequested(trajectory, turn, tokens, 0, 500, **extra))

    def end(
        self, trajectory: str, generated: int = 10, turn: int = 0, after: float = 1.0, cached: int = 100_000
    ) -> list[act.Action]:
        finished = ev.TurnFinished(trajectory, turn, generated, cached, StopReason.STOP)
        return self.tell(finished, ev.ToolStarted(trajectory, turn), after=after)

    def complete(self, trajectory: str) -> list[act.Action]:
        return self.tell(
            ev.VerificationStarted(trajectory),
            ev.VerificationFinished(trajectory, 1.0),
            ev.TrajectoryFinished(trajectory),
        )


def sent(answer: list[act.Action]) -> list[tuple[str, str, str]]:
    return [(a.trajectory, a.worker, a.reason) for a in answer if isinstance(a, act.Dispatch)]


def of(answer: list[act.Action], kind: type[act.Action]) -> list[tuple[str, str]]:
    return [(a.trajectory, a.reason) for a in answer if isinstance(a, kind)]  # type: ignore[union-attr]


def test_a_resident_goes_on_at_home_and_newcomers_go_where_there_is_room() -> None:
    desk = Desk()
    desk.up("w")
    desk.up("v")
    assert [(t, r) for t, _, r in sent(desk.ask("g0/0"))] == [("g0/0", "frontier")]
    home = desk.policy.room.ledger.held("g0/0")
    assert home is not None
    ((_, other, _),) = sent(desk.ask("g0/1"))
    assert other != home.worker
    desk.end("g0/0")
    assert sent(desk.ask("g0/0", 1100, turn=1)) == [("g0/0", home.worker, "resident")]


def test_what_does_not_fit_waits_until_somebody_ends() -> None:
    desk = Desk()
    desk.up("w", 10_000)
    desk.ask("g0/0", 6_000)
    assert of(desk.ask("g0/1", 6_000), act.Hold) == [("g0/1", "kv")]
    assert desk.scheduler.snapshot().holds == {"kv": 1}
    desk.end("g0/0")
    assert sent(desk.complete("g0/0")) == [("g0/1", "w", "frontier")]


def test_a_slot_that_is_free_is_taken_at_once_however_many_wait() -> None:
    desk = Desk()
    desk.tell(ev.WorkerUp("w", 100_000, 2, 0, COSTS))
    names = [f"g{group}/{index}" for group in range(3) for index in range(2)]
    assert [len(sent(desk.ask(name))) for name in names] == [1, 1, 0, 0, 0, 0]
    running = names[:2]
    for _ in range(4):
        ((name, _, _),) = sent(desk.end(running.pop(0), after=0.01))
        running.append(name)


def test_without_costs_capacity_gates_all_the_same() -> None:
    desk = Desk()
    desk.up("w", 10_000, costs=None)
    desk.ask("g0/0", 6_000)
    assert of(desk.ask("g0/1", 6_000), act.Hold) == [("g0/1", "kv")]


def test_a_trajectory_larger_than_a_worker_runs_alone() -> None:
    desk = Desk()
    desk.up("w", 1_000)
    assert sent(desk.ask("g0/0", 5_000)) == [("g0/0", "w", "frontier")]
    assert of(desk.ask("g0/1", 100), act.Hold) == [("g0/1", "kv")]
    desk.end("g0/0")
    assert sent(desk.complete("g0/0")) == [("g0/1", "w", "frontier")]


def test_a_gap_keeps_its_kv_while_that_pays_and_yields_it_afterwards() -> None:
    """Prefill of all KV takes 1 s here, so that a gap of a minute is worth much less than what it holds."""
    desk = Desk(pacing=False)
    desk.up("w", 10_000)
    for index in range(60):
        # Tool calls that last for a second: a gap that lasts longer is one of the rare long ones.
        name = "g0/0"
        desk.ask(name, 2_000 + index, turn=index)
        desk.end(name, turn=index)
        desk.now += 0.05
    assert of(desk.ask("g0/1", 8_000), act.Hold) == [("g0/1", "kv")]
    wake = desk.scheduler.wake_at
    assert wake is not None
    desk.now = wake
    late = desk.tell(ev.Tick(), after=5.0)
    assert of(late, act.ReleaseKV) == [("g0/0", "gap")]
    assert sent(late) == [("g0/1", "w", "frontier")]
    assert of(desk.ask("g0/0", 2_100, turn=60), act.Hold) == [("g0/0", "kv")]
    desk.end("g0/1")
    assert sent(desk.complete("g0/1")) == [("g0/0", "w", "frontier")]


def test_kv_that_the_engine_no_longer_has_is_struck_from_the_books() -> None:
    """Who idled longer than one that is gone is gone as well, and finds no place kept for it."""
    desk = Desk(pacing=False)
    desk.up("w", 10_000, DEAR)
    held = desk.policy.room.ledger.held
    for name in ("g0/0", "g0/1", "g1/0"):
        desk.ask(name, 2_000)
        desk.end(name)
    desk.ask("g0/1", 2_100, turn=1)
    desk.end("g0/1", turn=1, cached=2_000)
    assert [name for name in ("g0/0", "g0/1", "g1/0") if held(name)] == ["g0/0", "g0/1", "g1/0"]
    desk.ask("g1/0", 2_100, turn=1)
    desk.end("g1/0", turn=1, cached=32)
    assert [name for name in ("g0/0", "g0/1", "g1/0") if held(name)] == ["g0/1", "g1/0"]
    assert sent(desk.ask("g0/0", 2_100, turn=1)) == [("g0/0", "w", "frontier")], "it enters anew"


def test_a_flush_voids_what_idles_and_a_turn_through_new_weights_leaves_nothing() -> None:
    desk = Desk(pacing=False)
    desk.up("w", 10_000, DEAR)
    for name in ("g0/0", "g0/1"):
        desk.ask(name, 2_000)
    desk.end("g0/0")
    desk.tell(ev.WorkerAcknowledged("w", 0, flushed=True))
    held = desk.policy.room.ledger.held
    assert held("g0/0") is None
    assert held("g0/1") is not None, "it runs on with what it has"
    desk.tell(ev.TurnFinished("g0/1", 0, 10, 0, StopReason.STOP, leaves_kv=False))
    assert held("g0/1") is None
    assert desk.policy.room.ledger.books["w"].used == 0


def test_costs_learned_later_are_priced_with_from_then_on() -> None:
    desk = Desk()
    desk.up("w", costs=None)
    desk.tell(ev.WorkerCalibrated("w", COSTS))
    assert desk.scheduler.fleet.workers["w"].costs == COSTS
    assert desk.policy.lengths.token_s == COSTS.step_s(8, 5_000)
    desk.tell(ev.WorkerCalibrated("gone", COSTS))
    assert desk.scheduler.late_events == 1


def test_a_lost_worker_sends_its_residents_to_the_queue() -> None:
    desk = Desk()
    desk.up("w")
    desk.ask("g0/0")
    desk.end("g0/0")
    desk.tell(ev.WorkerDown("w"))
    assert of(desk.ask("g0/0", 1100, turn=1), act.Hold) == [("g0/0", "no_worker")]
    assert sent(desk.up("v")) == [("g0/0", "v", "frontier")]


def test_the_frontier_goes_before_what_was_asked_earlier() -> None:
    """Two of four groups make a batch: those with less to do, and of their members the longest first."""
    desk = Desk(groups=4, size=2, batch=2)
    for name in ("g0/0", "g1/0", "g2/0", "g3/0"):
        desk.ask(name, 6_000)
    front = [g for g in ("g0", "g1", "g2", "g3") if desk.policy.frontier.level(g) < 2]
    assert len(front) == 2
    desk.up("w", 10_000)
    ((first, _, reason),) = sent(desk.said)
    assert (first[:2] in front, reason) == (True, "frontier")


def test_who_needs_longer_than_a_step_more_goes_before_the_frontier() -> None:
    """Slack: what is due a step later may wait for a step, less what it takes beyond the others."""
    desk = Desk(groups=4, size=2, batch=2)
    for name in ("g0/0", "g1/0", "g2/0", "g3/0"):
        desk.ask(name, 6_000)
    behind = [g for g in ("g0", "g1", "g2", "g3") if desk.policy.frontier.level(g) == 2]
    step_s = desk.policy.frontier.due(behind[0]) / 2
    assert step_s > 0  # not started: due two steps after the frontier, at staleness 1
    totals: dict[str, float] = {}
    desk.policy.lengths.total = lambda trajectory: totals.get(trajectory, 1.0)  # type: ignore[method-assign]
    for more, goes in ((1.9, "frontier"), (2.1, "background")):
        totals[f"{behind[0]}/0"] = 1.0 + more * step_s
        desk.policy.waiting.reorder()
        assert desk.policy.frontier.level(desk.policy.waiting.at(0).group) == (2 if goes == "background" else 1)


def test_steps_are_as_far_apart_as_versions_were_of_late() -> None:
    desk = Desk(groups=4, size=2, batch=2)
    desk.up("w", 100_000)
    desk.ask("g0/0")
    for version, interval in ((1, 100.0), (2, 300.0)):
        desk.tell(ev.VersionPublished(version), after=interval - (1.0 if version == 1 else 0.0))
    desk.tell(ev.Tick(), after=5.0)
    dues = {g: desk.policy.frontier.due(g) for g in ("g0", "g1", "g2", "g3")}
    # 0.5 * 100 + 0.5 * 300, twice for those not started; the last may not open yet.
    assert sorted(dues.values()) == [0.0, 0.0, 400.0, math.inf]


def test_a_run_that_goes_on_does_not_take_its_age_for_a_step() -> None:
    desk = Desk(groups=4, size=2, batch=2, start=1_000_000.0, version=24)
    desk.up("w", 100_000)
    desk.ask("g0/0")
    desk.tell(ev.VersionPublished(25), after=100.0)
    desk.tell(ev.Tick(), after=5.0)
    assert desk.policy.frontier.due("g2") == 2 * 101.0  # seen a second before


def test_a_turn_that_waited_long_displaces_background_at_the_end_of_its_turn() -> None:
    desk = Desk(groups=4, size=2, batch=2, displace_after_s=10.0, pacing=False, interference=False)
    desk.tell(ev.Tick())
    back = next(g for g in ("g0", "g1", "g2", "g3") if desk.policy.frontier.level(g) == 2)
    front = next(g for g in ("g0", "g1", "g2", "g3") if desk.policy.frontier.level(g) < 2)
    desk.up("w", 10_000, DEAR)
    desk.ask(f"{back}/0", 6_000)
    assert desk.policy.frontier.level(back) == 2
    assert of(desk.ask(f"{front}/0", 6_000), act.Hold) == [(f"{front}/0", "kv")]
    desk.now += 20.0
    answer = desk.end(f"{back}/0", generated=400)
    assert of(answer, act.ReleaseKV) == [(f"{back}/0", "displaced")]
    assert sent(answer) == [(f"{front}/0", "w", "frontier")]


def test_a_long_background_turn_is_preempted_and_none_of_its_tokens_lost() -> None:
    desk = Desk(groups=4, size=2, batch=2, pacing=False, interference=False)
    desk.tell(ev.Tick())
    back = next(g for g in ("g0", "g1", "g2", "g3") if desk.policy.frontier.level(g) == 2)
    front = next(g for g in ("g0", "g1", "g2", "g3") if desk.policy.frontier.level(g) < 2)
    desk.up("w", 10_000, DEAR)
    desk.ask(f"{back}/0", 6_000)
    desk.ask(f"{front}/0", 6_000)
    answer = desk.tell(ev.Tick(), after=100.0)
    answer += desk.tell(ev.Tick(), after=10.0)
    assert of(answer, act.Preempt) == [(f"{back}/0", "preempted")]
    desk.tell(ev.TurnFinished(f"{back}/0", 0, 70, 0, StopReason.ABORT))
    answer = desk.ask(f"{back}/0", 6_000, resumed=70)
    assert sent(answer) == [(f"{front}/0", "w", "frontier")]
    desk.end(f"{front}/0")
    assert sent(desk.complete(f"{front}/0"))[0][0] == f"{back}/0"
    holding = desk.policy.room.ledger.held(f"{back}/0")
    assert holding is not None
    assert holding.tokens == 6_070


def test_a_crowded_resident_moves_by_prefill_or_by_transfer() -> None:
    for transfer, expected in ((None, act.Dispatch), (1e-6, act.Migrate)):
        costs = EngineCosts(0.01, 1e-2, 1e-6, 1e-6, 0.0, transfer_token_s=None if transfer is None else 1e-9)
        desk = Desk(groups=4, size=2, pacing=False, interference=False)
        desk.up("w", 100_000, costs=costs)
        for name in ("g0/0", "g0/1", "g1/0", "g1/1"):
            desk.ask(name)
        desk.up("v", 100_000, costs=costs)
        desk.end("g0/0")
        answer = desk.ask("g0/0", 1_100, turn=1)
        if expected is act.Dispatch:
            assert sent(answer) == [("g0/0", "v", "moved")]
        else:
            assert of(answer, act.Migrate) == [("g0/0", "migrated")]
            assert sent(desk.tell(ev.KVTransferred("g0/0", "v", 1_000))) == [("g0/0", "v", "resident")]


def test_the_frontier_gets_its_sandbox_from_a_background_trajectory_that_waits() -> None:
    desk = Desk(groups=4, size=2, batch=2, pacing=False)
    desk.tell(ev.Tick())
    back = [g for g in ("g0", "g1", "g2", "g3") if desk.policy.frontier.level(g) == 2]
    front = next(g for g in ("g0", "g1", "g2", "g3") if desk.policy.frontier.level(g) < 2)
    for group in back:
        desk.tell(ev.SandboxReady(f"{group}/0"))
        desk.ask(f"{group}/0")
    answer = desk.tell(ev.SandboxDenied(f"{front}/0", 5.0))
    ((victim, reason),) = of(answer, act.PauseSandbox)
    assert (victim[:2] in back, reason) == (True, "yields")
    assert of(answer, act.CreateSandbox) == [(f"{front}/0", "needed")]
    answer = desk.tell(ev.SandboxPaused(victim))
    assert of(answer, act.CreateSandbox) == [(victim, "resumed")]
    desk.up("w")
    assert victim not in [t for t, *_ in sent(desk.said)]
    assert desk.scheduler.snapshot().holds == {"sandbox_paused": 1}
    assert victim in [t for t, *_ in sent(desk.tell(ev.SandboxReady(victim)))]


def test_T06_a_drain_held_up_by_a_straggler_does_not_hold_up_everybody() -> None:
    """Case T06: one turn of 1000 s keeps its worker from new weights; its neighbours go on elsewhere."""
    desk = Desk(groups=4, size=2, pacing=False)
    desk.up("w")
    desk.ask("g0/0")
    desk.ask("g0/1")
    desk.up("v")
    desk.end("g0/1")
    desk.tell(ev.WorkerDraining("w"))
    assert of(desk.ask("g0/1", 1_100, turn=1), act.Hold) == [("g0/1", "draining")]
    answer = desk.tell(ev.Tick(), after=15.0)
    assert of(answer, act.ReleaseKV) == [("g0/1", "moved")]
    assert [(t, w) for t, w, _ in sent(answer + desk.tell(ev.Tick()))] == [("g0/1", "v")]


def test_T32_sessions_spread_over_idle_replicas() -> None:
    """Case T32: 200 sessions one after the other on four replicas."""
    desk = Desk(groups=100, size=2, batch=50)
    for index in range(4):
        desk.up(f"w{index}")
    placed: Counter[str] = Counter()
    for index in range(200):
        name = f"g{index // 2}/{index % 2}"
        ((_, worker, _),) = sent(desk.ask(name))
        placed[worker] += 1
        desk.end(name)
        desk.complete(name)
    assert len(placed) == 4
    assert all(35 <= count <= 65 for count in placed.values())


def _large_group_waits(policy: Policy) -> tuple[float, list[float]]:
    """The longest wait of a large prompt, and when the groups completed: 16 groups of 4, one with 8K prompts."""
    workload = Workload(turns=(4, 6), tool_s=(1.0, 3.0), workers=1, slots=64, kv=20_000, prompt=1_500, tasks=16)
    run = VirtualRun(Scheduler(SchedulerConfig(16, 4, Decimal(0), 0, max_steps=1), policy), workload, seed=1)
    run.prompts["g7"] = 8_000
    run.run()
    asked: dict[str, float] = {}
    longest, done = 0.0, []
    for now, event, answer in run.log:
        if isinstance(event, ev.TurnRequested):
            asked[event.trajectory] = now
        if isinstance(event, ev.TrajectoryFinished):
            done.append(now)
        for action in answer:
            if isinstance(action, act.Dispatch) and action.trajectory.startswith("g7/"):
                longest = max(longest, now - asked[action.trajectory])
    return longest, done


def test_T34_large_prompts_do_not_starve_and_room_is_refilled_by_trajectory() -> None:
    """Case T34: smallest-first admission let large prompts wait 800 times as long as small ones."""
    longest, done = _large_group_waits(Venus())
    span = max(done)
    assert longest < span / 2
    # Trajectories of other groups run beside those of the large one: their ends are spread over the whole span.
    assert min(done) < span / 4
    assert max(_large_group_waits(Fcfs(gate=True))[1]) > 0
