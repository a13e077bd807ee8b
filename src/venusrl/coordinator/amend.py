"""What a kill kept from a run's record, written down when the run is resumed.

Owns: the comparison of the store, where a step or an evaluation is a fact, with ``events.jsonl``, from which every
summary and picture is made. A coordinator killed between the two leaves a fact without its line.

Must not know: how a step is trained or an evaluation is played.

Guarantees: afterwards each trained step and each finished evaluation of the store has its line; what had one gets no
second. Figures of the session that died (tokens a second, waits) are left out, not made up.
"""

from __future__ import annotations

from venusrl.coordinator.evaluation import rewards_by_task
from venusrl.coordinator.steps import step_figures, stored_members
from venusrl.coordinator.store import RunStore
from venusrl.observe.history import read_history
from venusrl.observe.recorder import RunRecorder, read_events


def amend_record(store: RunStore, recorder: RunRecorder) -> int:
    """Write the missing lines; returns how many there were. Reads the whole record: once a session."""
    history = read_history(read_events(store.run_dir))
    noted = {point.step for point in history.steps}
    missing = [record for record in store.versions() if record.version > 0 and record.version not in noted]
    for version in missing:
        members = stored_members(store, version.version - 1)
        recorder.scalars(version.version, step_figures(version.version - 1, members, version.metrics))
    told = {(evaluation.version, evaluation.mode) for evaluation in history.evaluations}
    untold = [e for e in store.evaluations() if e.finished and (e.version, e.mode) not in told]
    for evaluation in untold:
        samples = store.evaluation_samples(evaluation.version, evaluation.mode)
        recorder.evaluation(evaluation.version, evaluation.mode, rewards_by_task(samples))
    return len(missing) + len(untold)
