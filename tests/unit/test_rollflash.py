"""ROLL Flash: affinity, limits and queues of both variants."""

from __future__ import annotations

from decimal import Decimal

import pytest

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import Dispatch, Hold
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.policies import Policy
from venusrl.scheduling.policies.rollflash import RollFlash, RollFlashAgentic
from venusrl.scheduling.scheduler import Scheduler
from venusrl.types import StopReason

SIZE = 2


class Bench:
    """Groups g0, g1... of two trajectories g0/0, g0/1; alpha 2, batches of 4 groups."""

    def __init__(self, policy: Policy, workers: int = 1, groups: int = 4) -> None:
        self.scheduler = Scheduler(SchedulerConfig(4, SIZE, Decimal(2), 2), policy)
        self.where: dict[str, str] = {}
        self.turns: dict[str, int] = {}
        self.tell(ev.VersionPublished(0), *(ev.WorkerUp(f"w{i}", 10_000, 8, 0) for i in range(workers)))
        for group in range(groups):
            self.tell(ev.GroupOpened(f"g{group}", group, "t", SIZE))
            self.tell(*(ev.TrajectoryOpened(f"g{group}/{i}", f"g{group}", i, 0) for i in range(SIZE)))

    def tell(self, *events: ev.Event) -> list[tuple[str, str]]:
        said = []
        for event in events:
            for action in self.scheduler.handle(event, 0.0):
                if isinstance(action, Dispatch):
                    self.where[action.trajectory] = action.worker
                    said.append((action.trajectory, action.worker))
                    self.tell(ev.TurnDispatched(action.trajectory, action.turn, action.worker, 0))
                elif isinstance(action, Hold):
                    said.append((action.trajectory, action.reason))
        return said

    def ask(self, *names: str) -> list[tuple[str, str]]:
        return self.tell(*(ev.TurnRequested(n, self.turns.setdefault(n, 0), 100, 50, 100) for n in names))

    def answer(self, name: str) -> list[tuple[str, str]]:
        self.turns[name] += 1
        return self.tell(ev.TurnFinished(name, self.turns[name] - 1, 10, 0, StopReason.STOP))

    def end(self, name: str) -> list[tuple[str, str]]:
        return self.answer(name) + self.tell(ev.TrajectoryFinished(name))


def all_of(*groups: int) -> list[str]:
    return [f"g{group}/{i}" for group in groups for i in range(SIZE)]


def test_members_of_a_group_share_a_worker_and_groups_spread() -> None:
    bench = Bench(RollFlash(affinity="prompt"), workers=2)
    bench.ask(*all_of(0, 1, 2, 3))
    workers = [{bench.where[name] for name in all_of(group)} for group in range(4)]
    assert workers == [{"w0"}, {"w1"}, {"w0"}, {"w1"}]


def test_episodes_spread_over_the_workers_with_most_room() -> None:
    bench = Bench(RollFlash(), workers=2)
    bench.ask(*all_of(0, 1, 2, 3))
    assert [bench.where[name] for name in all_of(0, 1)] == ["w0", "w1", "w0", "w1"]
    assert sorted(bench.where.values()) == ["w0"] * 4 + ["w1"] * 4


def test_what_exceeds_the_running_limit_waits_in_the_order_it_came() -> None:
    bench = Bench(RollFlash(max_running=2))
    said = bench.ask("g0/0", "g1/0", "g0/1", "g1/1")
    assert said == [("g0/0", "w0"), ("g1/0", "w0"), ("g0/1", "running_limit"), ("g1/1", "running_limit")]
    assert bench.answer("g1/0") == [("g0/1", "w0")]
    assert bench.ask("g1/0") == [("g1/0", "running_limit")]
    assert bench.answer("g0/0") == [("g1/1", "w0")]
    assert bench.answer("g0/1") == [("g1/0", "w0")]


def test_a_trajectory_stays_where_it_is_while_its_worker_drains() -> None:
    bench = Bench(RollFlash(), workers=2)
    bench.ask("g0/0")
    bench.answer("g0/0")
    bench.tell(ev.WorkerDraining("w0"))
    assert bench.ask("g0/0") == [("g0/0", "draining")]
    bench.tell(ev.VersionPublished(1))
    assert bench.tell(ev.WorkerAcknowledged("w0", 1)) == [("g0/0", "w0")]


def test_turns_of_a_dead_worker_and_groups_that_belonged_to_it_move() -> None:
    bench = Bench(RollFlash(affinity="prompt"), workers=2)
    bench.ask("g0/0", "g0/1")
    bench.tell(ev.WorkerDown("w0"))
    assert bench.ask("g0/0", "g0/1") == [("g0/0", "w1"), ("g0/1", "w1")]


def test_without_workers_turns_wait_for_one() -> None:
    bench = Bench(RollFlash(), workers=0)
    assert bench.ask("g0/0") == [("g0/0", "no_worker")]
    assert bench.tell(ev.WorkerUp("w9", 100, 8, 0)) == [("g0/0", "w9")]


def test_an_environment_plays_one_episode_at_a_time_whatever_alpha() -> None:
    """Twelve groups are in the window, and 4 x 2 environments play the first four."""
    bench = Bench(RollFlashAgentic(), groups=12)
    said = bench.ask(*all_of(*range(12)))
    assert [name for name, what in said if what == "w0"] == all_of(0, 1, 2, 3)
    assert {what for _, what in said[8:]} == {"environments"}
    assert bench.answer("g0/0") == []
    assert bench.ask("g0/0") == [("g0/0", "w0")]


def test_a_free_environment_takes_the_oldest_task_of_its_own_queue() -> None:
    bench = Bench(RollFlashAgentic(), groups=12)
    bench.ask(*all_of(0, 1, 2, 3, 9, 5, 8))
    assert bench.end("g1/0") == [("g5/0", "w0")]  # Queue 1 has g1, g5, g9.
    assert bench.end("g0/1") == [("g8/0", "w0")]
    assert bench.end("g1/1") == [("g5/1", "w0")]
    assert bench.end("g5/0") == [("g9/0", "w0")]


def test_an_environment_always_uses_its_worker() -> None:
    bench = Bench(RollFlashAgentic(), workers=2, groups=12)
    bench.ask(*all_of(*range(12)))
    before = bench.where["g2/1"]
    assert bench.end("g2/1") == [("g6/0", before)]
    assert sorted(bench.where[name] for name in all_of(0, 1, 2, 3)) == ["w0"] * 4 + ["w1"] * 4


def test_fewer_queues_mean_fewer_episodes_at_once() -> None:
    bench = Bench(RollFlashAgentic(env_groups=2), groups=4)
    said = bench.ask(*all_of(0, 1, 2, 3))
    assert [name for name, what in said if what == "w0"] == all_of(0, 1)
    assert bench.end("g1/1") == [("g3/0", "w0")]


def test_more_queues_than_a_batch_has_groups_are_refused() -> None:
    bench = Bench(RollFlashAgentic(env_groups=5))
    with pytest.raises(ValueError, match="would expire"):
        bench.ask("g0/0")


def test_environments_of_a_dead_worker_get_another() -> None:
    bench = Bench(RollFlashAgentic(), workers=2)
    bench.ask(*all_of(0, 1))
    lost = [name for name in all_of(0, 1) if bench.where[name] == "w1"]
    bench.tell(ev.WorkerDown("w1"))
    assert bench.ask(*lost) == [(name, "w0") for name in lost]


@pytest.mark.parametrize("policy", [RollFlash, RollFlashAgentic])
def test_a_withdrawn_turn_is_gone(policy: type[RollFlash] | type[RollFlashAgentic]) -> None:
    bench = Bench(policy(), workers=0)
    bench.ask("g0/0", "g0/1")
    bench.scheduler.policy.remove("g0/0")
    assert bench.tell(ev.WorkerUp("w9", 100, 8, 0)) == [("g0/1", "w9")]


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="max_running"):
        RollFlash(max_running=0)
    with pytest.raises(ValueError, match="env_groups"):
        RollFlashAgentic(env_groups=0)
