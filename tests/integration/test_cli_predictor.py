"""``venusrl predictor``: what it reads, prints, writes and refuses."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from tests.integration.commands import Command, command

from venusrl.cli import recorded
from venusrl.simulation.recordings import RecordingError, of_run, of_trace
from venusrl.types import EndReason, Group, StopReason, Trajectory, Turn


@pytest.fixture
def predictor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command(monkeypatch, capsys, "predictor")


def trace(path: Path, sessions: int) -> Path:
    """Pairs of sessions of random length."""
    rng = random.Random(0)
    lines = []
    for n in range(sessions):
        calls: list[list[object]] = []
        context = 1000
        for turn in range(max(1, round(rng.lognormvariate(2.0, 0.6)))):
            kind = "s" if turn == 0 else "t"
            calls.append([context, 100, float(turn > 0), kind, 2.0])
            context += 100 + rng.randrange(50, 200)
        lines.append(json.dumps({"id": n, "turns": calls, "group": f"g{n // 2}"}))
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_a_trace_is_evaluated_and_learned_from(predictor: Command, tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    source = trace(tmp_path / "trace.jsonl.gz", 300)
    done = predictor("train", source, "--output", tmp_path / "learned", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["trajectories"] == 300
    assert said["quality"]["refits"] >= 1
    done = predictor("evaluate", source, "--state", tmp_path / "learned", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)["evaluations"]
    assert [one["predictor"] for one in found] == ["siblings", "learned"]
    for one in found:
        assert one["overall"]["coverage"] == pytest.approx(0.82, abs=0.1)
        assert one["overall"]["bias"] == pytest.approx(1.0, abs=0.2)
        assert [s["first"] for s in one["stages"]][:3] == [0, 1, 4]
    done = predictor("evaluate", source)
    assert "siblings" in done.out
    assert "learned" in done.out


def test_what_cannot_be_read_is_said(predictor: Command, tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    few = trace(tmp_path / "few.jsonl.gz", 10)
    (tmp_path / "bad.jsonl").write_text('{"id": 1, "turns": [[1, 2]]}\n')
    (tmp_path / "torn.jsonl.gz").write_bytes(few.read_bytes()[:50])
    (tmp_path / "empty.jsonl").write_text("")
    for argv, message in [
        (("evaluate", tmp_path / "nowhere"), "there is no"),
        (("evaluate", tmp_path / "bad.jsonl"), "line 1"),
        (("evaluate", tmp_path / "torn.jsonl.gz"), "cannot be read"),
        (("evaluate", tmp_path / "empty.jsonl"), "no session"),
        (("evaluate", few, "--state", few), "damaged"),
        (("evaluate", few, "--state", tmp_path / "nowhere"), "cannot be read"),
        (("train", few, "--output", tmp_path / "out"), "too few to learn from"),
    ]:
        left = predictor(*argv)
        assert left.code == 1, left
        assert message in left.err.replace("\n", " ")
        assert "Traceback" not in left.err
    assert not (tmp_path / "out").exists()


def test_a_run_is_read(predictor: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [
        Group(f"g{n}", f"t{n % 3}", n, 0, [_trajectory(f"g{n}.{i}", 2 + (n + i) % 5) for i in range(4)])
        for n in range(12)
    ]
    monkeypatch.setattr(recorded, "trained_groups", lambda path: iter(groups))
    pytest.importorskip("lightgbm")
    (other := tmp_path / "other").mkdir()
    done = predictor("evaluate", tmp_path, other, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["evaluations"][0]["trajectories"] == 96, "names of two runs do not clash"
    assert "named twice" in predictor("evaluate", tmp_path, tmp_path).err
    monkeypatch.setattr(recorded, "trained_groups", lambda path: iter(()))
    assert "no trained trajectory yet" in predictor("evaluate", tmp_path).err


def test_recorded_turns_are_told_as_they_were() -> None:
    group = Group("g", "t", 0, 0, [_trajectory("g.0", 2), _trajectory("g.1", 0)])
    (found,) = of_run([group])
    assert [m.name for m in found.members] == ["g.0"]
    first, last = found.members[0].turns
    assert (first.generated, first.model_s, first.tool_s, first.observation, first.exit_code) == (50, 2.0, 1.5, 30, 1)
    assert last.observation == 0


def test_a_persons_time_is_no_tool_time(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"id": 7, "turns": [[10, 5, 0, "s", 1], [20, 5, 4, "t", 1], [40, 5, 900, "u", 1]]}')
    (group,) = of_trace(path)
    assert [turn.tool_s for turn in group.members[0].turns] == [4.0, 0.0, 0.0]
    assert [turn.observation for turn in group.members[0].turns] == [5, 15, 0]
    with pytest.raises(RecordingError, match="cannot be read"):
        of_trace(tmp_path)


def _trajectory(name: str, turns: int) -> Trajectory:
    played = [
        Turn(k, 100 + 80 * k, 50, 0, StopReason.STOP, "", dispatched_at=1.0, finished_at=3.0, tool_s=1.5, exit_code=1)
        for k in range(turns)
    ]
    return Trajectory(name, name.split(".")[0], "t", 0, 0, 0, [], played, 1.0, EndReason.SUBMITTED, verify_s=2.0)
