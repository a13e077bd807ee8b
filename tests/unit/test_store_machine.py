"""Random lives of a run store, cut by crashes at any byte, against the promises it makes.

A crash is a copy of the files as they lie on the disk at that moment, without closing anything; a power cut
is that copy with the end of SQLite's log missing from a random byte on.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from venusrl.coordinator.store import BatchState, OpenedTrajectory, RunStore, TrainedReport
from venusrl.testing.runs import made_up_trajectory, new_store
from venusrl.types import Failure, FailureKind

BATCH = 2
FAST_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where the thousands of syncs of these examples cost nothing; which file system it is changes no result."""


class StoreLife(RuleBasedStateMachine):
    """The machine remembers only what the store acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="venusrl-store-", dir=FAST_FOLDER))
        self.crashes = 0
        self.store: RunStore = new_store(self.folder / "0")
        self.running: dict[str, tuple[OpenedTrajectory, str]] = {}
        self.vacant: list[tuple[str, int]] = []
        self.settling: list[str] = []
        self.complete: dict[str, int] = {}
        self.finished: set[str] = set()
        self.tasks: dict[str, str] = {}
        self.trained = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    # --- the life of groups -------------------------------------------------------------------------
    @rule(size=st.integers(1, 3))
    def open_group(self, size: int) -> None:
        group = self.store.open_group(size)
        assert group is not None
        self.tasks[group.id] = group.task_id
        self.settling.append(group.id)
        self.running |= {member.id: (member, group.task_id) for member in group.trajectories}

    @precondition(lambda self: self.running)
    @rule(data=st.data(), lag=st.integers(0, 1))
    def finish(self, data: st.DataObject, lag: int) -> None:
        member, task = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        version = max(0, self.trained - lag)
        self.store.record_progress(member.id, version, 1)
        self.store.finish_trajectory(made_up_trajectory(member, task, version=version))
        self.finished.add(member.id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), vacant=st.booleans(), kept=st.booleans())
    def fail(self, data: st.DataObject, vacant: bool, kept: bool) -> None:
        member, task = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        failure = Failure(FailureKind.INFRASTRUCTURE, "engine_lost")
        transcript = made_up_trajectory(member, task, failure=failure, reward=None) if kept else None
        self.store.fail_trajectory(member.id, failure, vacant=vacant, transcript=transcript)
        if vacant:
            self.vacant.append((member.group_id, member.index))

    @precondition(lambda self: self.vacant)
    @rule(again=st.booleans())
    def fill_or_leave_a_vacancy(self, again: bool) -> None:
        group, index = self.vacant.pop()
        if again:
            member = self.store.replace_trajectory(group, index)
            self.running[member.id] = (member, self.tasks[group])
        else:
            self.store.give_up_place(group, index)

    @rule(count=st.integers(1, 3))
    def run_groups_to_their_end(self, count: int) -> None:
        for _ in range(count):
            self.open_group(size=2)
        for member, task in self.running.values():
            self.store.finish_trajectory(made_up_trajectory(member, task, version=self.trained))
        self.finished |= self.running.keys()
        self.running.clear()
        self.settle()

    @rule()
    def settle(self) -> None:
        busy = {member.group_id for member, _ in self.running.values()} | {group for group, _ in self.vacant}
        for group in [group for group in self.settling if group not in busy]:
            self.settling.remove(group)
            if any(member.startswith(f"{group}.") for member in self.finished):
                self.complete[group] = self.store.complete_group(group)
            else:
                self.store.close_group(group, "all_failed")

    @precondition(lambda self: self.settling)
    @rule(data=st.data(), reissue=st.booleans())
    def drop(self, data: st.DataObject, reissue: bool) -> None:
        group = data.draw(st.sampled_from(self.settling))
        self._forget(group)
        self.store.close_group(group, "dropped")
        if reissue:
            again = self.store.open_group(1, reissue_of=group)
            assert again is not None
            self.tasks[again.id] = again.task_id
            self.settling.append(again.id)
            self.running[again.trajectories[0].id] = (again.trajectories[0], again.task_id)

    # --- the life of batches --------------------------------------------------------------------------
    @rule()
    def form(self) -> None:
        version = self.trained + (self.store.batch_record(self.trained) is not None)
        fresh = [group for group, start in self.complete.items() if 0 <= version - start <= 1][:BATCH]
        if len(fresh) == BATCH and self.store.batch_record(version) is None:
            self.store.form_batch(version, fresh)
            for group in fresh:
                del self.complete[group]

    @rule(checkpointed=st.booleans(), twice=st.booleans())
    def train(self, checkpointed: bool, twice: bool) -> None:
        record = self.store.batch_record(self.trained)
        if record is None:
            return
        report = TrainedReport(record.id, self.trained + 1, "/m", checkpointed)
        assert self.store.mark_trained(report)
        assert not (twice and self.store.mark_trained(report))
        self.trained += 1

    # --- crashes ----------------------------------------------------------------------------------------
    @rule()
    def crash(self) -> None:
        self._reopen(self._copy())
        assert self.store.current_version() == self.trained
        kept = self.store.totals().trajectories
        assert kept.get("finished", 0) == len(self.finished)

    @rule(cut=st.floats(0, 1))
    def power_cut(self, cut: float) -> None:
        copy = self._copy()
        log = copy / "store.sqlite-wal"
        if log.exists():
            with log.open("r+b") as file:
                file.truncate(int(cut * log.stat().st_size))
        with new_store(copy, resume=True) as store:
            store.recover()
            assert store.check_invariants() == []
            assert store.current_version() <= self.trained
        shutil.rmtree(copy)

    def _copy(self) -> Path:
        self.crashes += 1
        source, copy = self.store.run_dir, self.folder / str(self.crashes)
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*-shm"))
        return copy

    def _reopen(self, copy: Path) -> None:
        before = self.store.run_dir
        self.store.close()
        shutil.rmtree(before)
        self.store = new_store(copy, resume=True)
        state = self.store.recover()
        assert state.lost_trajectories == len(self.running)
        assert {g.id for g in state.groups} == {*self.settling, *self.complete}
        self.running.clear()
        self.vacant = [(group.id, vacancy.index) for group in state.groups for vacancy in group.vacancies]
        assert all(batch.state is BatchState.FORMED for batch in state.pending_batches)

    def _forget(self, group: str) -> None:
        self.settling.remove(group)
        self.running = {key: value for key, value in self.running.items() if value[0].group_id != group}
        self.vacant = [place for place in self.vacant if place[0] != group]

    @invariant()
    def promises_hold(self) -> None:
        assert self.store.check_invariants() == []


StoreLife.TestCase.settings = settings(
    max_examples=10, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestT31LivesOfAStore = StoreLife.TestCase
