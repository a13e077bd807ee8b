"""What the live view is told in words."""

from __future__ import annotations

from venusrl.coordinator.view import Notes


def test_failures_of_one_reason_are_told_together() -> None:
    at = 0.0
    notes = Notes(now=lambda: at)
    failure: dict[str, object] = {
        "trajectory": "t",
        "reason": "sandbox_gone",
        "message": "it died",
        "replaced": True,
    }
    notes.add("trajectory_failed", failure)
    for _ in range(7):
        notes.add("trajectory_failed", failure)
    assert list(notes.lines) == ["failed: 1 x sandbox_gone: it died"]
    at = 11.0
    notes.add("trajectory_failed", failure)
    assert notes.lines[-1] == "failed: 8 x sandbox_gone: it died"
    notes.add("trajectory_failed", failure | {"reason": "engine_lost", "message": ""})
    assert notes.lines[-1] == "failed: 1 x engine_lost"


def test_other_events_are_one_line_each_and_most_are_not_told() -> None:
    notes = Notes()
    notes.add("batch_formed", {"version": 3})
    notes.add("evaluation", {"version": 3, "mode": "sampled", "reward": 0.51239, "failed": 0, "note": ""})
    assert list(notes.lines) == ["evaluation: version 3 · mode sampled · reward 0.512 · failed 0"]


def test_a_long_cause_is_told_by_its_first_and_last_line() -> None:
    notes = Notes()
    cause = "trainer ended with exit code 3 after 9.0 s; the last lines of trainer.log:\n  INFO x\n  trainer: no room\n"
    notes.add("trainer_down", {"cause": cause})
    assert list(notes.lines) == ["trainer down: cause trainer ended with exit code 3 after 9.0 s: trainer: no room"]
