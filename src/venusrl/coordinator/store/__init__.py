"""The run store: what a run has done, on disk.

store = RunStore.open(run_dir, recipe, resume=False)   # locks the directory
store.set_task_order(task_ids, seed=0, epochs=0)
group = store.open_group(size=8)                       # None: the order is exhausted
store.record_progress(trajectory_id, start_version, tokens)
store.finish_trajectory(trajectory)                    # on disk when it returns
store.fail_trajectory(trajectory_id, failure, vacant=True)
store.replace_trajectory(group_id, index)
store.complete_group(group_id); store.close_group(group_id, reason)
store.form_batch(version, group_ids); store.batch_for(version)
store.mark_trained(report)                             # idempotent
state = store.recover(); faults = store.check_invariants()
"""

from venusrl.coordinator.store.records import (
    BatchRecord,
    BatchState,
    ClosedGroup,
    EvaluationKey,
    EvaluationRecord,
    EvaluationSample,
    FinishedTrajectory,
    GroupState,
    OpenedGroup,
    OpenedTrajectory,
    RecoveredGroup,
    RecoveredState,
    RunIdentity,
    RunTotals,
    TrainedReport,
    TrajectoryState,
    Vacancy,
    VersionRecord,
)
from venusrl.coordinator.store.store import RunStore, sampled_tokens

__all__ = [
    "BatchRecord",
    "BatchState",
    "ClosedGroup",
    "EvaluationKey",
    "EvaluationRecord",
    "EvaluationSample",
    "FinishedTrajectory",
    "GroupState",
    "OpenedGroup",
    "OpenedTrajectory",
    "RecoveredGroup",
    "RecoveredState",
    "RunIdentity",
    "RunStore",
    "RunTotals",
    "TrainedReport",
    "TrajectoryState",
    "Vacancy",
    "VersionRecord",
    "sampled_tokens",
]
