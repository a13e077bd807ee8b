"""Events, history, summary, picture and live view."""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from venusrl.observe import tensorboard
from venusrl.observe.history import read_history
from venusrl.observe.live import LiveView, held_out, plain, render, sparkline
from venusrl.observe.plots import plot_rewards, smooth
from venusrl.observe.recorder import ObserveError, RunRecorder, mean_interval, read_events
from venusrl.observe.status import EvaluationPoint, Status, WorkerStatus
from venusrl.observe.summary import build_summary, summarise, write_summary


# --- events ---------------------------------------------------------------------------------------------
def test_events_are_lines_that_a_later_session_appends_to(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        recorder.event("worker_down", worker="engine-0", code=-9)
    with RunRecorder(tmp_path) as recorder:
        recorder.scalars(1, {"reward/mean": 0.5, "train/kl": math.nan})
    first, second = read_events(tmp_path)
    assert (first["kind"], first["worker"], first["code"]) == ("worker_down", "engine-0", -9)
    assert second["values"] == {"reward/mean": 0.5, "train/kl": None}
    assert second["t"] >= first["t"]


def test_a_line_torn_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        recorder.event("a")
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"t": 1, "kind": "to')
    with RunRecorder(tmp_path) as recorder:
        recorder.event("b")
    assert [event["kind"] for event in read_events(tmp_path)] == ["a", "b"]


def test_a_full_disk_is_one_clear_error_and_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.event("before")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, line: real(fd, line[:5]))
    with pytest.raises(ObserveError, match="disk is full; free space, then resume"):
        recorder.event("lost")
    monkeypatch.setattr(os, "write", real)
    recorder.event("after")
    recorder.close()
    assert [event["kind"] for event in read_events(tmp_path)] == ["before", "after"]


def test_a_closed_recorder_refuses_and_closes_again(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.close()
    recorder.close()
    with pytest.raises(ObserveError, match="is closed"):
        recorder.event("late")


def test_an_unusable_run_directory_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ObserveError, match=r"events\.jsonl"):
        RunRecorder(tmp_path / "file")
    with pytest.raises(ObserveError, match=r"no readable events\.jsonl"):
        list(read_events(tmp_path))


GOLDEN_HEADER = "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c"
GOLDEN_SCALARS = (
    "2c00000000000000f4aecc4509000000000000f83f10ac022a1e0a120a0b7265776172642f6d65616e150000803e0a080a01"
    "6115000080bf7e1ea991"
)


def records(content: bytes) -> list[bytes]:
    """The events of a TensorBoard file; checks the framing."""
    found = []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = content[12 : 12 + length]
        assert tensorboard.record(event) == content[: 16 + length]
        found.append(event)
        content = content[16 + length :]
    return found


def test_scalars_reach_tensorboard_a_file_a_session(tmp_path: Path) -> None:
    for step_number in (3, 300):
        with RunRecorder(tmp_path) as recorder:
            recorder.event("no scalar, no file")
            recorder.scalars(step_number, {"reward/mean": 0.25, "train/kl": math.inf})
    first, second = sorted((tmp_path / "tensorboard").iterdir())
    assert first.name.startswith("events.out.tfevents.")
    version, scalars = records(first.read_bytes())
    assert version.endswith(b"brain.Event:2")
    assert b"reward/mean" in scalars
    assert b"train/kl" not in scalars
    assert b"\x10\xac\x02" in records(second.read_bytes())[1]  # step 300


def test_the_tensorboard_encoding_is_the_published_one() -> None:
    assert tensorboard.crc32c(b"123456789") == 0xE3069283
    # Written once with the reference implementation's protocol buffers and record writer.
    assert tensorboard.record(tensorboard.header(1.5)).hex() == GOLDEN_HEADER
    assert tensorboard.record(tensorboard.scalars(1.5, 300, {"reward/mean": 0.25, "a": -1.0})).hex() == GOLDEN_SCALARS


def test_the_interval_is_honest_for_few_tasks_and_at_the_ends() -> None:
    mean, low, high = mean_interval([0.0] * 6)
    assert (mean, low) == (0.0, 0.0)
    assert high == pytest.approx(0.390, abs=1e-3)  # Wilson: 0 of 6
    mean, low, high = mean_interval([0.0, 1.0] * 50)
    assert (mean, low, high) == pytest.approx((0.5, 0.4038, 0.5962), abs=1e-4)  # Wilson: 50 of 100
    assert all(math.isnan(value) for value in mean_interval([]))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_the_interval_holds_the_mean_and_stays_among_rewards(values: list[float]) -> None:
    mean, low, high = mean_interval(values)
    assert -1e-9 <= low <= mean <= high <= 1 + 1e-9


# --- history and summary ----------------------------------------------------------------------------------
def step(t: float, number: int, **values: float) -> dict[str, Any]:
    named = {"reward/mean": 0.5, "perf/step_s": 1.0, **values}
    return {"t": t, "kind": "scalars", "step": number, "values": named}


def evaluated(t: float, version: int, reward: float, mode: str = "sampled") -> dict[str, Any]:
    known = {"reward": reward, "ci_low": reward - 0.1, "ci_high": reward + 0.1, "tasks": 100}
    return {"t": t, "kind": "evaluation", "version": version, "mode": mode, **known}


def started(t: float, version: int = 0) -> dict[str, Any]:
    return {"t": t, "kind": "run_started", "version": version}


def test_pauses_between_sessions_do_not_count() -> None:
    history = read_history(
        [started(100.0), step(110.0, 1), started(5000.0, 1), step(5020.0, 2), {"t": 5025.0, "kind": "run_finished"}]
    )
    assert history.wall_s == 35.0
    assert history.sessions == 2
    assert [(p.step, p.wall_s) for p in history.steps] == [(1, 10.0), (2, 30.0)]
    assert history.outcome == "finished"


def test_what_a_crash_lost_counts_once_as_trained_the_last_time() -> None:
    lost = [started(0.0), step(1.0, 1), step(2.0, 2), step(3.0, 3), evaluated(4.0, 3, 0.9)]
    again = [started(100.0, 1), step(101.0, 2, **{"reward/mean": 0.7})]
    history = read_history(lost + again)
    assert history.series("reward/mean") == [0.5, 0.7]
    assert history.evaluations == []
    assert history.outcome == ""


def test_an_evaluation_counts_at_the_time_its_version_was_made() -> None:
    history = read_history([started(0.0), evaluated(8.0, 0, 0.3), step(20.0, 1), evaluated(60.0, 1, 0.4)])
    assert [(e.version, e.wall_s) for e in history.evaluations] == [(0, 0.0), (1, 20.0)]


def test_the_summary_has_what_the_project_promises() -> None:
    events = [
        started(0.0),
        evaluated(5.0, 0, 0.3),
        evaluated(5.0, 0, 0.4, "greedy"),
        step(
            10.0,
            1,
            **{
                "train/trajectories": 64.0,
                "rollout/staleness_mean": 0.0,
                "rollout/staleness_max": 0.0,
                "perf/trainer_idle_fraction": 0.5,
                "perf/step_s": 3.0,
            },
        ),
        step(
            12.0,
            2,
            **{
                "train/trajectories": 32.0,
                "rollout/staleness_mean": 1.5,
                "rollout/staleness_max": 2.0,
                "perf/trainer_idle_fraction": 0.1,
                "perf/step_s": 1.0,
                "tokens/discarded/crash": 12.0,
            },
        ),
        evaluated(20.0, 2, 0.6),
        {"t": 21.0, "kind": "run_finished", "reason": "finished"},
    ]
    summary = summarise(read_history(events), {"run": {"name": "n", "seed": 4}, "training": {"steps": 2}}, "dir")
    assert (summary.eval_reward_start, summary.eval_reward_end) == (0.3, 0.6)
    assert summary.eval_reward_gain == pytest.approx(0.3)
    assert (summary.eval_greedy_start, summary.eval_greedy_end) == (0.4, None)
    assert (summary.steps, summary.max_steps, summary.wall_s) == (2, 2, 21.0)
    assert summary.trained_trajectories == 96
    assert summary.staleness_max == 2
    assert summary.staleness_mean == pytest.approx(0.5)
    assert summary.trainer_idle_fraction == pytest.approx(0.4)
    assert summary.discarded_tokens_by_reason == {"crash": 12}
    assert (summary.name, summary.outcome, summary.seeds) == ("n", "finished", {"run": 4})


def test_an_evaluation_at_the_end_alone_is_no_start() -> None:
    summary = summarise(read_history([started(0.0), evaluated(20.0, 2, 0.6)]), {}, "dir")
    assert (summary.eval_reward_start, summary.eval_reward_end, summary.eval_reward_gain) == (None, 0.6, None)


def test_what_never_happened_is_null_not_a_number(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        recorder.event("run_started", version=0)
        recorder.evaluation(0, "sampled", [])
    content = write_summary(tmp_path)
    assert content == json.loads((tmp_path / "summary.json").read_text())
    assert content["outcome"] == "unfinished"
    assert content["eval_reward_start"] is None
    assert content["trainer_idle_fraction"] is None
    assert content["evaluations"][0]["reward"] is None
    assert not list(tmp_path.glob("*.tmp"))


def test_no_run_and_a_broken_recipe_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(ObserveError, match=r"no readable events\.jsonl"):
        build_summary(tmp_path)
    RunRecorder(tmp_path).close()
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(ObserveError, match=r"recipe\.json cannot be read"):
        build_summary(tmp_path)


# --- pictures ---------------------------------------------------------------------------------------------
def test_the_picture_is_a_png_and_an_empty_run_is_an_error(tmp_path: Path) -> None:
    history = read_history([started(0.0), evaluated(1.0, 0, 0.3), step(2.0, 1), step(3.0, 2), evaluated(4.0, 2, 0.5)])
    plot_rewards(history, tmp_path / "reward.png", "demo")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert [f.name for f in tmp_path.iterdir()] == ["reward.png"]
    with pytest.raises(ObserveError, match="nothing was trained"):
        plot_rewards(read_history([]), tmp_path / "none.png", "demo")


def test_smoothing_neither_shifts_nor_invents() -> None:
    assert smooth([1.0, 1.0, 1.0, 1.0]) == [1.0] * 4
    assert smooth([0.0, 0.0, 1.0, 0.0, 0.0], 3) == [0.0, *[pytest.approx(1 / 3)] * 3, 0.0]
    assert smooth([]) == []


# --- live view --------------------------------------------------------------------------------------------
STATUS = Status(
    name="demo",
    version=17,
    max_steps=40,
    phase="training",
    elapsed_s=213.0,
    groups={"running": 6, "complete": 3, "training": 8},
    trajectories={"generating": 31, "tool": 9},
    waiting_for="2 mandatory groups",
    holds={"worker_full": 4},
    staleness_mean=0.62,
    staleness_max=1,
    staleness_bound=1,
    rewards=[0.1 * (i % 10) for i in range(200)],
    evaluations=[EvaluationPoint(0, "sampled", 0.31), EvaluationPoint(10, "sampled", 0.48)],
    tokens_per_s=1421.4,
    trainer="waiting",
    workers=[WorkerStatus("engine-0", "serving", 17, 31, 4, 64, 30000, 65536, step_s=0.0123)],
    discarded={"crash": 1024},
    lines=["[worker] down " + "x" * 200],
)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_fits_its_width_and_shows_what_matters(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(render(STATUS, width))
    text = capture.get()
    assert max(len(line) for line in text.splitlines()) == width
    for fact in ("17/40", "2 mandatory groups", "0.31 → 0.48", "1,421/s", "1,024", "engine-0", "[worker] down"):
        assert fact in text
    assert ("12.3 ms" in text) is (width >= 80)


def test_a_run_that_has_just_begun_can_be_shown() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(render(Status(name="demo", version=0, max_steps=0), 80))
    assert "step 0/0" in plain(Status(name="demo", version=0, max_steps=0))


def test_sparklines_keep_the_scale_and_the_width() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert len(sparkline([0.5] * 100, 20)) == 20
    assert sparkline([-1.0, 9.0], 5) == "▁█"
    assert sparkline([], 5) == ""
    assert sparkline([math.nan, 1.0], 5) == "█"


def test_held_out_names_first_and_newest_of_each_mode() -> None:
    points = [EvaluationPoint(0, "sampled", 0.3), EvaluationPoint(0, "greedy", 0.4), EvaluationPoint(9, "sampled", 0.5)]
    assert held_out(points) == "sampled 0.30 → 0.50 (v9) · greedy 0.40"


def test_on_a_pipe_lines_are_rare_whole_and_plain() -> None:
    output, now = io.StringIO(), [0.0]
    base = Status(name="demo", version=0, max_steps=2, phase="training", lines=["a"])
    with LiveView(Console(file=output, width=40), now=lambda: now[0]) as view:
        view.update(base)
        view.update(base)  # nothing new: silent
        view.update(Status(name="demo", version=1, max_steps=2, phase="training", lines=["a", "b [red]"]))
        now[0] = 31.0
        view.update(Status(name="demo", version=1, max_steps=2, phase="training", lines=["a", "b [red]"]))
        view.note("note")
    lines = output.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[0] == "[0:00] a"
    assert lines[1].startswith("[0:00] training · step 0/2")
    assert lines[2] == "[0:00] b [red]"
    assert lines[-1] == "note"


def test_on_a_terminal_the_panel_is_drawn_and_the_cursor_given_back() -> None:
    output = io.StringIO()
    view = LiveView(Console(file=output, width=80, force_terminal=True, _environ={"TERM": "xterm"}))
    with view:
        view.update(STATUS)
        view.note("heard")
    view.close()
    text = output.getvalue()
    assert "heard" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


# --- the documented names -----------------------------------------------------------------------------------
def test_every_metric_is_documented_and_every_documented_one_exists(repository: Path) -> None:
    name = re.compile(r"\b(?:reward|rollout|train|perf|eval|tokens)/[a-z_/]+")
    written = {
        literal
        for path in (repository / "src").rglob("*.py")
        if "simulation" not in path.parts  # its tables have columns, not scalars of a run
        for literal in re.findall(r'f?"((?:reward|rollout|train|perf|eval|tokens)/[a-z_/{}]+)"', path.read_text())
    }
    written = {"tokens/discarded/" if m.startswith("tokens/discarded/") else m for m in written}
    written = {m for one in written for m in ([one.replace("{mode}", x) for x in ("sampled", "greedy")])}
    documented = set(name.findall((repository / "docs" / "metrics.md").read_text()))
    assert written == documented
