"""``venusrl simulate``: what it prints, writes, refuses and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration.commands import Command, command

from venusrl.simulation.suites import runner
from venusrl.simulation.suites.records import Record, Run, execute

DEMO = ("demo", "--workload", "synthetic", "--steps", "1", "--seeds", "2", "--jobs", "1", "--out", "out")


@pytest.fixture
def simulate(workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command(monkeypatch, capsys, "simulate")


def test_a_recipe_is_simulated_and_written_down(simulate: Command) -> None:
    done = simulate(*DEMO, "--policy", "venus", "--policy", "fcfs", "--json", "-")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    (cell,) = result["cells"]
    assert set(cell["entries"]) == {"venus", "fcfs"}
    assert cell["entries"]["fcfs"]["times_venus"]["pairs"] == 2
    assert "venus is" in done.err
    assert "synthetic" in Path("out/report.md").read_text()
    assert json.loads(Path("out/summary.json").read_text()) == result
    assert Path("out/timeline.png").stat().st_size > 5_000

    refused = simulate(*DEMO, "--policy", "venus")
    assert refused.code == 1
    assert "--resume" in refused.err
    again = simulate(*DEMO, "--policy", "venus", "--resume", "--json", "again.json")
    assert again.code == 0
    assert "measure: 2 of 2 runs are there already" in again.err
    assert "venus" in again.out
    assert len(Path("out", runner.RECORDS_FILE).read_text().splitlines()) == 4


def test_mistakes_name_what_there_is(simulate: Command) -> None:
    for argv, said in (
        (("papers",), "suites are paper, pressure"),
        (("paper", "--policy", "luck"), "there is no policy 'luck'; there are fcfs"),
        (("demo", "--workload", "luck"), "there is no workload 'luck'"),
        (("demo", "--model", "gpt"), "models are qwen3-4b"),
        (("demo", "--workload", "replay:nowhere"), "there is no run in nowhere"),
    ):
        left = simulate(*argv)
        assert left.code == 1
        assert said in left.err
        assert "Traceback" not in left.err


def test_ctrl_c_keeps_what_is_finished(simulate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # the command to go on with is not broken over lines
    calls: list[Run] = []

    def interrupted(run: Run) -> Record:
        calls.append(run)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return execute(run)

    monkeypatch.setattr(runner, "execute", interrupted)
    left = simulate(*DEMO, "--policy", "venus", "--policy", "fcfs")
    assert left.code == 130
    assert "2 finished runs are kept" in left.err
    assert "venusrl simulate demo --workload synthetic" in left.err
    assert left.err.rstrip().endswith("--policy venus --policy fcfs --resume")
    assert len(Path("out", runner.RECORDS_FILE).read_text().splitlines()) == 2


def test_a_failed_run_is_named_and_fails_the_command(simulate: Command) -> None:
    left = simulate(
        "smollm2", "--workload", "claude-code", "--steps", "1", "--seeds", "1", "--jobs", "1", "--out", "out"
    )
    assert left.code == 1
    assert "some runs failed" in left.err
    assert "RequestTooLarge" in Path("out/report.md").read_text()


def test_the_cases_of_validation_are_chosen_by_name(simulate: Command) -> None:
    done = simulate("validation", "--case", "order", "--out", "out", "--json", "-")
    assert done.code == 0, done.err
    assert {check["case"] for check in json.loads(done.out)} == {"order"}
    assert "largest / smallest" in Path("out/report.md").read_text()
    unknown = simulate("validation", "--case", "nothing")
    assert (unknown.code, "embedded" in unknown.err) == (1, True)
    elsewhere = simulate(*DEMO, "--case", "order")
    assert (elsewhere.code, "simulate validation --case" in elsewhere.err) == (1, True)


def test_a_run_that_says_nothing_of_its_engine_is_not_compared(simulate: Command) -> None:
    folder = Path("out/run")
    folder.mkdir(parents=True)
    lines = [
        {"t": 1.0, "kind": "run_started", "resumed": False, "version": 0},
        {"t": 2.0, "kind": "worker_up", "worker": "worker-0"},
        {"t": 3.0, "kind": "run_finished", "reason": "stopped"},
    ]
    events = folder / "events.jsonl"
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    interrupted = simulate("validation", "--case", "embedded", "--out", "out")
    assert (interrupted.code, "interrupted" in interrupted.err) == (1, True)
    lines[-1]["reason"] = "finished"
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    short = simulate("validation", "--case", "embedded", "--out", "out")
    assert (short.code, "too short" in short.err) == (1, True)
