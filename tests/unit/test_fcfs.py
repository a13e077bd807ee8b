"""First come, first served: even ties, affinity, moves, and the optional gate. Case T32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from decimal import Decimal

from venusrl.scheduling.actions import Dispatch, Hold
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.fleet import Fleet, Worker
from venusrl.scheduling.policies import PendingTurn
from venusrl.scheduling.policies.fcfs import Fcfs
from venusrl.scheduling.window import Group, Window


class Bench:
    """A policy and the view it decides on; what it dispatches runs until ``finish``."""

    def __init__(self, workers: int = 1, slots: int = 2, *, gate: bool = False) -> None:
        self.policy = Fcfs(gate=gate)
        self.fleet = Fleet()
        self.closed: set[str] = set()
        self.config = SchedulerConfig(2, 2, Decimal(1), 1)
        self.window = Window(self.config)
        self.now = 0.0
        for index in range(workers):
            self.fleet.up(f"w{index}", 1000, slots, 0)

    @property
    def workers(self) -> Mapping[str, Worker]:
        return self.fleet.workers

    @property
    def changes(self) -> int:
        return self.fleet.changes

    @property
    def freed(self) -> int:
        return self.fleet.freed

    def home(self, trajectory: str) -> Worker | None:
        return self.fleet.home(trajectory)

    def group(self, trajectory: str) -> Group | None:
        return None

    def doing(self, trajectory: str) -> str | None:
        return None

    def held(self, turn: PendingTurn) -> str | None:
        return None

    def refusal(self, turn: PendingTurn, worker: Worker) -> str | None:
        return "draining" if worker.name in self.closed else None

    def urgency(self, turn: PendingTurn) -> int:
        return 0

    def decide(self) -> list[tuple[str, str]]:
        """(trajectory, worker) dispatched, or (trajectory, reason) held."""
        said = []
        for action in self.policy.decide(self):
            if isinstance(action, Dispatch):
                self.fleet.place(action.trajectory, action.worker)
                said.append((action.trajectory, action.worker))
            else:
                assert isinstance(action, Hold)
                said.append((action.trajectory, action.reason))
        return said

    def ask(self, *trajectories: str) -> list[tuple[str, str]]:
        for trajectory in trajectories:
            self.policy.add(PendingTurn(trajectory, "g", 0, 10, 5, 10, 0, 0.0))
        return self.decide()

    def finish(self, *trajectories: str) -> list[tuple[str, str]]:
        for trajectory in trajectories:
            self.fleet.free(trajectory)
        return self.decide()

    def end(self, trajectory: str) -> None:
        self.policy.remove(trajectory)
        self.fleet.leave(trajectory)


def test_T32_ties_spread_evenly_over_an_idle_fleet() -> None:
    bench = Bench(workers=4)
    chosen: Counter[str] = Counter()
    for session in range(200):
        ((_, worker),) = bench.ask(f"t{session}")
        chosen[worker] += 1
        bench.end(f"t{session}")
    assert all(35 <= chosen[f"w{i}"] <= 65 for i in range(4))


def test_T32_a_worker_that_joins_late_is_not_flooded() -> None:
    bench = Bench(workers=3)
    for session in range(60):
        bench.ask(f"t{session}")
        bench.end(f"t{session}")
    bench.fleet.up("w3", 1000, 2, 0)
    chosen: Counter[str] = Counter()
    for session in range(60, 100):
        ((_, worker),) = bench.ask(f"t{session}")
        chosen[worker] += 1
        bench.end(f"t{session}")
    assert set(chosen.values()) == {10}


def test_sessions_spread_by_slots() -> None:
    bench = Bench(workers=1, slots=2)
    bench.fleet.up("big", 1000, 6, 0)
    placed = Counter(worker for _, worker in bench.ask(*(f"t{i}" for i in range(8))))
    assert placed == {"big": 6, "w0": 2}


def test_a_trajectory_stays_on_its_worker() -> None:
    bench = Bench(workers=3)
    ((_, home),) = bench.ask("a")
    bench.ask("b", "c")
    bench.finish("a", "b", "c")
    assert bench.ask("a") == [("a", home)]


def test_without_a_gate_the_engine_queues() -> None:
    bench = Bench(workers=1, slots=1)
    assert bench.ask("a", "b", "c") == [("a", "w0"), ("b", "w0"), ("c", "w0")]


def test_turns_of_a_dead_worker_move() -> None:
    bench = Bench(workers=2)
    bench.ask("a", "b")
    dead = bench.home("a")
    assert dead is not None
    bench.fleet.down(dead.name)
    other = "w1" if dead.name == "w0" else "w0"
    assert bench.ask("a") == [("a", other)]


def test_a_draining_home_is_left_for_a_worker_that_serves() -> None:
    bench = Bench(workers=2)
    ((_, home),) = bench.ask("a")
    bench.finish("a")
    bench.closed.add(home)
    assert bench.ask("a") == [("a", "w1" if home == "w0" else "w0")]


def test_held_turns_go_in_the_order_they_came_once_something_changed() -> None:
    bench = Bench(workers=1)
    bench.closed.add("w0")
    assert bench.ask("b", "a") == [("b", "draining"), ("a", "draining")]
    assert bench.ask("c") == [("c", "draining")]
    assert bench.decide() == []
    bench.closed.clear()
    bench.fleet.acknowledge("w0", 1)
    assert [t for t, _ in bench.decide()] == ["b", "a", "c"]


def test_no_worker_is_a_reason_of_its_own_and_said_once() -> None:
    bench = Bench(workers=0)
    assert bench.ask("a") == [("a", "no_worker")]
    bench.fleet.touch()
    assert bench.decide() == []
    bench.closed.add("w0")
    bench.fleet.up("w0", 1000, 2, 0)
    assert bench.decide() == [("a", "draining")]


def test_a_second_request_keeps_its_place_and_a_withdrawn_one_is_gone() -> None:
    bench = Bench(workers=0)
    bench.ask("a", "b", "c")
    bench.ask("a")
    bench.policy.remove("b")
    bench.fleet.up("w0", 1000, 2, 0)
    assert [t for t, _ in bench.decide()] == ["a", "c"]


def test_the_gate_respects_slots_and_fills_them_in_order() -> None:
    bench = Bench(workers=1, slots=2, gate=True)
    assert bench.ask("a", "b", "c", "d") == [("a", "w0"), ("b", "w0"), ("c", "slots"), ("d", "slots")]
    assert bench.finish("b") == [("c", "w0")]
    assert bench.ask("b") == [("b", "slots")]
    assert bench.finish("a", "c") == [("d", "w0"), ("b", "w0")]


def test_the_gate_keeps_a_session_waiting_for_its_own_worker() -> None:
    bench = Bench(workers=2, slots=1, gate=True)
    placed = dict(bench.ask("a", "b"))
    bench.finish("a")
    bench.ask("c")
    bench.finish("b")
    assert bench.home("c") is bench.fleet.workers[placed["a"]]
    assert bench.ask("a") == [("a", "slots")]
    assert bench.finish("c") == [("a", placed["a"])]
