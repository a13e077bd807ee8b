"""Suites without a long simulation: statistics, cells, arms, tuning, resuming, tables, pictures."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from venusrl.recipe import RecipeError, load
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.predictor.siblings import Siblings
from venusrl.simulation.run import simulate
from venusrl.simulation.scenario import EngineSpec, FleetSpec, Scenario, TrainerSpec
from venusrl.simulation.suites import arms, cells, figures, runner, tuning
from venusrl.simulation.suites.analysis import Analysis, analyse
from venusrl.simulation.suites.forecasts import BEFORE, Ranks
from venusrl.simulation.suites.from_recipe import recipe_suite
from venusrl.simulation.suites.goals import goals
from venusrl.simulation.suites.records import Record, Run, Trace, execute
from venusrl.simulation.suites.statistics import paired_ratio, t_probability, t_quantile
from venusrl.simulation.suites.stragglers import PHASES, idle_by_phase
from venusrl.simulation.suites.tables import BRIEF, brief, report
from venusrl.simulation.truth import TrueLengths
from venusrl.simulation.workloads.drift import Drift
from venusrl.simulation.workloads.openswe import OpenSwe
from venusrl.simulation.workloads.synthetic import Synthetic


def tiny(name: str = "tiny", **changes: object) -> Scenario:
    """Two workers that hold four trajectories each; two steps of two groups of three."""
    engines = tuple(EngineSpec(f"e{i}", 8_000, 16, EngineCosts(0.01, 1e-4, 1e-7, 1e-4, 0.0)) for i in range(2))
    made = Scenario(
        name=name,
        scheduler=SchedulerConfig(2, 3, Decimal(1), 1, max_steps=2),
        fleet=FleetSpec(engines, load_s=0.5),
        trainer=TrainerSpec(fixed_s=5.0),
        workload=Synthetic(turns=(2, 4), spread=0.3),
    )
    return msgspec.structs.replace(made, **changes)


def tiny_suite(*names: str, seeds: int = 2) -> cells.Suite:
    chosen = [arms.arm(name) for name in names]
    return cells.Suite("tiny", "for tests", [cells.Cell("tiny", tiny())], chosen, seeds, tuned=False)


# --- statistics ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("degrees", "critical"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)]
)
def test_student_t_against_the_printed_table(degrees: int, critical: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(critical, abs=6e-4)
    assert t_probability(0.0, degrees) == 0.5


def test_a_ratio_is_paired_geometric_and_symmetric() -> None:
    ratio = paired_ratio([2.0, 8.0, 4.0], [1.0, 2.0, 2.0])
    assert ratio.mean == pytest.approx(16 ** (1 / 3))
    assert ratio.low is not None
    assert ratio.high is not None
    # By hand: logs ln2, ln4, ln2; mean 0.924196, sd 0.400187; t(2) = 4.302653.
    half = 4.302653 * 0.400187 / math.sqrt(3)
    assert (math.log(ratio.low), math.log(ratio.high)) == pytest.approx((0.924196 - half, 0.924196 + half), abs=1e-5)
    inverse = paired_ratio([1.0, 2.0, 2.0], [2.0, 8.0, 4.0])
    assert (inverse.mean, inverse.low) == pytest.approx((1 / ratio.mean, 1 / ratio.high))
    assert paired_ratio([3.0], [2.0]).low is None


# --- arms and cells -------------------------------------------------------------------------------------------
def test_an_arm_may_be_stricter_than_the_cell_and_never_looser() -> None:
    scenario = tiny(scheduler=SchedulerConfig(2, 3, Decimal("1.5"), 2, max_steps=2))
    for name in arms.names():
        prepared, policy = arms.prepare(arms.arm(name), scenario, 0)
        assert prepared.scheduler.window <= scenario.scheduler.window
        assert prepared.scheduler.max_staleness <= scenario.scheduler.max_staleness
        assert prepared.scheduler.deadline == "wait"
        assert (prepared.workload, prepared.trainer) == (scenario.workload, scenario.trainer)
        assert prepared.fleet.engines == scenario.fleet.engines
        assert policy.name == name
    assert arms.prepare(arms.arm("slime"), scenario, 0)[0].fleet.weight_update == "abort"
    on_policy = tiny(scheduler=SchedulerConfig(2, 3, Decimal(0), 0, max_steps=2))
    assert arms.prepare(arms.arm("slime"), on_policy, 0)[0].fleet.weight_update == "drain"


def test_the_ablation_switches_off_one_mechanism_at_a_time() -> None:
    assert {"frontier", "retention", "late_binding", "pacing"} <= set(arms.SWITCHES)
    made = arms.arm("venus-without-pacing")
    assert made.venus is not None
    assert [s for s in arms.SWITCHES if not getattr(made.venus, s)] == ["pacing"]
    with pytest.raises(arms.UnknownArm, match="there are fcfs, "):
        arms.arm("venus-without-luck")


@pytest.mark.parametrize("name", sorted(cells.SUITES))
@pytest.mark.parametrize("quick", [False, True])
def test_suites_are_well_formed(name: str, quick: bool) -> None:
    suite = cells.find_suite(name, quick=quick)
    assert len({cell.name for cell in suite.cells}) == len(suite.cells)
    assert len({arm.name for arm in suite.arms}) == len(suite.arms)
    assert arms.VENUS in {arm.name for arm in suite.arms}
    for cell in suite.cells:
        assert cell.scenario.scheduler.max_steps is not None
        assert msgspec.json.encode(cell.scenario)
    if not quick and name in ("paper", "pressure", "sensitivity", "ablation", "drift"):
        assert suite.seeds >= 5


def test_the_paper_suite_is_the_grid_and_its_quick_version_six_cells() -> None:
    full, quick = cells.find_suite("paper"), cells.find_suite("paper", quick=True)
    assert len(full.cells) == 30
    assert (len(quick.cells), quick.seeds) == (6, 3)
    assert {cell.labels["alpha"] for cell in full.cells} == {"0", "0.5", "1", "1.5", "2"}
    with pytest.raises(cells.UnknownSuite, match="paper, pressure"):
        cells.find_suite("papers")


def test_sensitivity_varies_what_its_cells_are_named_after() -> None:
    made = {cell.name: cell.scenario.scheduler for cell in cells.find_suite("sensitivity", quick=True).cells}
    bounds = {name: config.max_staleness for name, config in made.items() if "stale" in name}
    assert bounds == {f"32b-B16-a1-half-stale{bound}": bound for bound in (1, 2, 3)}
    assert {config.max_staleness for name, config in made.items() if name not in bounds} == {1}
    assert all((config.max_steps or 0) > bounds[name] + 1 for name, config in made.items() if name in bounds)


def test_a_suite_can_be_run_in_part() -> None:
    some = cells.find_suite("paper", places=["32b-B64-a1", "4b-B16-a0", "32b-B64-a1"])
    assert [cell.name for cell in some.cells] == ["32b-B64-a1", "4b-B16-a0"]
    with pytest.raises(cells.UnknownSuite, match="no cell '32b-B8-a1'; it has 4b-B16-a0, "):
        cells.find_suite("paper", places=["32b-B8-a1"])


def test_pressure_cells_have_the_pressure_of_their_name() -> None:
    for cell in cells.find_suite("pressure", quick=True).cells:
        config, workload = cell.scenario.scheduler, cell.scenario.workload
        context = cells.mean_context(workload)
        capacity = sum(engine.kv_capacity for engine in cell.scenario.fleet.engines)
        working_set = config.window * config.group_size * context
        assert working_set / capacity == pytest.approx(float(cell.labels["pressure"]), rel=0.01)
        assert isinstance(workload, OpenSwe)
        assert min(engine.kv_capacity for engine in cell.scenario.fleet.engines) > workload.context_tokens


# --- runs -----------------------------------------------------------------------------------------------------
def test_keys_tell_apart_all_that_shapes_a_run() -> None:
    scenario, venus = tiny(), arms.arm("venus")
    base = Run("c", scenario, venus, 0)
    others = [
        Run("c", tiny(trainer=TrainerSpec(fixed_s=6.0)), venus, 0),
        Run("c", tiny(workload=Synthetic(turns=(2, 5), spread=0.3)), venus, 0),
        Run("c", scenario, arms.arm("fcfs"), 0),
        Run("c", scenario, tuning.limited(venus, 3), 0),
        Run("c", scenario, venus, 1),
        Run("c", scenario, venus, 0, trace=True),
    ]
    assert len({run.key for run in (base, *others)}) == 7
    assert Run("c", tiny(), arms.arm("venus"), 0).key == base.key


@pytest.mark.parametrize("name", ["fcfs", "venus", "oracle", "shuffled"])
def test_a_run_leaves_a_record_that_obeys_the_bound(name: str) -> None:
    record = execute(Run("tiny", tiny(), arms.arm(name), 3, trace=True))
    assert record.error == ""
    assert record.steps == 2
    assert record.time_s >= record.bound_s > 0
    assert sum(record.staleness.values()) == 2 * 2 * 3
    assert record.trace is not None
    assert record.trainer_busy_s + record.trainer_idle_s == pytest.approx(record.time_s, rel=0.01)
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record


def test_idle_time_is_shared_out_by_what_the_last_trajectory_did() -> None:
    slow_tools = tiny(workload=Synthetic(turns=(2, 4), tool_s=(300.0, 300.0)))
    record = execute(Run("tiny", slow_tools, arms.arm("fcfs"), 0))
    assert set(record.idle_phases_s) == set(PHASES)
    assert sum(record.idle_phases_s.values()) == pytest.approx(record.trainer_idle_s, rel=0.01)
    assert record.idle_phases_s["tools"] > 0.9 * record.trainer_idle_s
    with pytest.raises(ValueError, match="set keep_trajectories"):
        idle_by_phase(simulate(tiny(), arms.prepare(arms.arm("fcfs"), tiny(), 0)[1], 0))


def test_forecasts_are_ranked_against_the_truth_by_steps_since_the_shift() -> None:
    workload = Drift(16, OpenSwe(length=0.1), OpenSwe(length=0.2))
    scheduler = SchedulerConfig(4, 8, Decimal(1), 1, max_steps=7)
    engines = tuple(EngineSpec(f"e{i}", 2_000_000, 64, EngineCosts(0.01, 1e-4, 1e-7, 1e-4, 0.0)) for i in range(2))
    scenario = tiny(scheduler=scheduler, workload=workload, fleet=FleetSpec(engines, load_s=0.5))
    ranks = {name: execute(Run("drift", scenario, arms.arm(name), 0)).ranks for name in ("oracle", "constant", "fcfs")}
    assert set(ranks["oracle"]) >= {BEFORE, 0, 1}
    assert all(rho == pytest.approx(1.0) for rho in ranks["oracle"].values())
    assert all(abs(rho) < 0.6 for rho in ranks["constant"].values())
    assert ranks["fcfs"] == {}


def test_watching_the_forecasts_changes_nothing_in_the_run() -> None:
    scenario = tiny(workload=Synthetic(turns=(2, 6)))
    watcher = Ranks(Siblings(), TrueLengths(scenario.workload, 0), shift=2, step=6)
    plain = simulate(scenario, arms.prepare(arms.arm("venus"), scenario, 0)[1], 0)
    assert simulate(scenario, arms.prepare(arms.arm("venus"), scenario, 0)[1], 0, watcher) == plain


def test_a_failed_run_is_a_record_too() -> None:
    record = execute(Run("tiny", tiny(workload=Synthetic(prompt=(9_000, 9_000))), arms.arm("fcfs"), 0))
    assert "RequestTooLarge" in record.error


def test_the_truth_is_what_the_scripts_say() -> None:
    workload = Synthetic(turns=(3, 3))
    script, truth = workload.script(5, 2, 1, 0), TrueLengths(workload, 5)
    tokens = [turn.generated for turn in script.turns]
    left = truth.remaining("g2/1.0", 1)
    assert (left.turns, left.tokens) == (2, sum(tokens[1:]))
    assert left.tool_s == pytest.approx(sum(turn.tool_s for turn in script.turns[:2]))
    assert left.context == left.tokens + sum(turn.observation for turn in script.turns[:2])
    last = truth.remaining("g2/1.0", 3)
    assert (last.turns, last.tokens, last.tool_s) == (0, 0, 0)
    assert truth.tool_s("g2/1.0", 2) == 0.0
    assert truth.remaining("g2.r1/1.0", 0) != truth.remaining("g2/1.0", 0)


# --- carrying out ------------------------------------------------------------------------------------------
def quiet(_: runner.Progress) -> None:
    pass


def test_a_suite_is_resumed_where_it_was_killed(tmp_path: Path) -> None:
    suite = tiny_suite("fcfs", "venus")
    records = runner.Records(tmp_path, resume=False)
    whole = runner.carry_out(suite, records, quick=True, jobs=1, report=quiet)
    records.close()
    path = tmp_path / runner.RECORDS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    with pytest.raises(runner.SuiteError, match="--resume"):
        runner.Records(tmp_path, resume=False)

    path.write_bytes(b"".join(lines[:2]) + lines[2][:40])  # killed while it wrote the third
    again = runner.Records(tmp_path, resume=True)
    seen: list[runner.Progress] = []
    resumed = runner.carry_out(suite, again, quick=True, jobs=1, report=seen.append)
    again.close()
    assert [(p.done, p.kept) for p in seen] == [(2, 2), (3, 2), (4, 2)]
    assert seen[0].last == ""
    assert seen[-1].left_s == 0.0
    assert [without_cpu(r) for r in resumed] == [without_cpu(r) for r in whole]
    assert len(path.read_bytes().splitlines()) == 4


def without_cpu(record: Record) -> Record:
    return msgspec.structs.replace(record, cpu_s=0.0)


def test_processes_give_what_one_process_gives(tmp_path: Path) -> None:
    suite = tiny_suite("fcfs", "fcfs-gate")
    found = []
    for jobs in (1, 2):
        records = runner.Records(tmp_path / str(jobs), resume=False)
        found.append(runner.carry_out(suite, records, quick=True, jobs=jobs, report=quiet))
        records.close()
    assert list(map(without_cpu, found[0])) == list(map(without_cpu, found[1]))


def test_tuning_takes_the_fastest_limit_and_leaves_our_own_policy_alone() -> None:
    base = cells.find_suite("paper", quick=True, policies=["fcfs", "venus"])
    scarce = next(cell for cell in base.cells if cell.name == "32b-B16-a2-half")
    suite = msgspec.structs.replace(base, cells=[scarce])
    runs = tuning.tuning_runs(suite, quick=True)
    assert {run.arm.name for run in runs} == {"fcfs"}
    assert {run.seed for run in runs} == {cells.TUNING_SEED}
    limits = tuning.grid(scarce, quick=True)
    assert [run.arm.concurrency for run in runs] == limits
    assert limits[0] is None
    assert len(limits) == 2

    def tried(limit: int | None, time_s: float, error: str = "") -> Record:
        return Record("k", "c", "fcfs", 1000, "tune", error, concurrency=limit, time_s=time_s)

    assert tuning.choose([tried(None, 50.0), tried(8, 30.0), tried(16, 0.0, "stuck")]) == {("c", "fcfs"): 8}
    assert tuning.choose([tried(8, 30.0), tried(None, 30.0)]) == {("c", "fcfs"): None}


# --- analysis, tables, pictures ------------------------------------------------------------------------------
def made_up(arm: str, seed: int, time_s: float, cell: str = "32b", error: str = "") -> Record:
    trace = Trace([0.0, 1.0], [0.5, 0.6], [0.9, 0.9], [3, 4], [1, 0], [0, 0], [(0.0, 1.0, "groups")], [(1.0, 2.0)])
    return Record(
        f"{cell}/{arm}/{seed}",
        cell,
        arm,
        seed,
        error=error,
        time_s=time_s,
        throughput=1e6 / time_s,
        staleness={0: 4, 1: 12},
        idle_s={"groups": time_s / 2},
        idle_phases_s=dict.fromkeys(PHASES, time_s / 12),
        ranks={BEFORE: 0.4, 0: 0.1, 1: 0.38} if arm in arms.FAMILY else {},
        pressure=1.7,
        bound_s=80.0,
        bound_parts={"kv": 80.0, "trainer": 20.0},
        trace=trace if seed == 0 else None,
    )


def example() -> Analysis:
    times = {
        "venus": (100.0, 104.0),
        "slime": (300.0, 320.0),
        "thunderagent-best": (150.0, 150.0),
        "fcfs": (290.0, 310.0),
    }
    times |= {"constant": (101.0, 103.0), "oracle": (95.0, 96.0), "shuffled": (110.0, 112.0)}
    times |= {f"venus-without-{switch}": (105.0, 106.0) for switch in arms.SWITCHES}
    records = [made_up(arm, seed, time_s) for arm, both in times.items() for seed, time_s in enumerate(both)]
    return analyse("tiny", [*records, made_up("continuum", 0, 1.0, error="SimulationStuck: held")])


def test_the_analysis_pairs_seeds_and_judges_goals() -> None:
    cell = example().cell("32b")
    slime = cell.entries["slime"].times_venus
    assert slime is not None
    assert slime.mean == pytest.approx(math.sqrt(3.0 * 320 / 104))
    assert cell.entries["venus"].bound_share == pytest.approx((0.8 + 80 / 104) / 2)
    assert cell.entries["venus"].staleness == {0: 0.25, 1: 0.75}
    assert cell.entries["continuum"].errors == ("seed 0: SimulationStuck: held",)
    assert cell.scarce
    judged = {goal.what: goal for goal in goals(example())}
    assert judged["over slime-like FIFO"].met is True
    best_gate = judged["over the best gate"]
    assert best_gate.figure == pytest.approx(1.47, abs=0.01)
    assert best_gate.against == "thunderagent-best"
    assert best_gate.most == pytest.approx(150 / 80)
    assert judged["share of the limit"].met is False
    assert judged["heuristic over constant lengths"].met is True
    assert judged["heuristic ranks one step after the shift"].met is True
    assert "no gain where KV is plenty (within 2%)" not in judged


def test_where_kv_is_plenty_a_gain_is_a_miss() -> None:
    def judged(fcfs_s: float) -> bool | None:
        records = [made_up("venus", 0, 100.0), made_up("fcfs", 0, fcfs_s)]
        plenty = [msgspec.structs.replace(record, pressure=0.75) for record in records]
        return next(g.met for g in goals(analyse("tiny", plenty)) if g.what.startswith("no gain"))

    assert judged(101.0) is True
    assert judged(110.0) is False
    assert judged(90.0) is False


def test_a_single_seed_proves_nothing_about_bounds() -> None:
    one = analyse("tiny", [made_up("venus", 0, 100.0), made_up("fcfs", 0, 300.0)])
    against = next(goal for goal in goals(one) if goal.what.startswith("over every baseline"))
    assert against.met is None


def test_tables_and_report_say_what_was_measured() -> None:
    shown = brief(example().cell("32b"))
    assert {len(row) for row in shown} >= {len(BRIEF)}
    assert shown[0][0] == "oracle"
    assert ["failed" in row for row in shown][-1]
    text = report(tiny_suite("venus"), example(), "venusrl simulate tiny", ["speedup.png"])
    for part in (
        "![speedup](speedup.png)",
        "| slime |",
        "3.04x",
        "**0.78** of 0.80",
        "8%",
        "Failed runs:",
        "SimulationStuck",
        "| pacing | 1.03",
    ):
        assert part in text


def test_pictures_are_drawn_for_what_there_is(tmp_path: Path) -> None:
    names = figures.draw(example(), tmp_path)
    stems = ("speedup", "bound", "where", "timeline", "kv", "staleness", "prediction", "drift", "ablation")
    expected = [f"{stem}.png" for stem in stems]
    assert names == expected
    assert all((tmp_path / name).stat().st_size > 5_000 for name in names)
    only = analyse("tiny", [made_up("venus", 0, 100.0)])
    assert "ablation.png" not in figures.draw(only, tmp_path)


def test_no_legend_is_cut_off() -> None:
    analysis = example()
    for make in (figures.speedup, figures.where_time_went, figures.kv_occupancy, figures.timeline, figures.staleness):
        figure = make(analysis)
        figure.canvas.draw()
        (legend,) = figure.legends
        inside, outside = legend.get_window_extent(), figure.bbox
        assert outside.x0 <= inside.x0, make.__name__
        assert inside.x1 <= outside.x1, make.__name__


# --- recipes ---------------------------------------------------------------------------------------------------
def test_a_recipe_is_simulated_with_its_schedule_engines_and_caps() -> None:
    recipe = load("qwen3-4b-swe", ["schedule.async_factor=1.5", "agent.max_turns=40"])
    suite = recipe_suite(recipe, OpenSwe(), model="qwen3-4b", gpu="h100", steps=3, seeds=2)
    scenario = suite.cells[0].scenario
    assert (scenario.scheduler.window, scenario.scheduler.max_steps) == (80, 3)
    assert [e.kv_capacity for e in scenario.fleet.engines] == [400_000] * len(recipe.rollout.urls)
    assert isinstance(scenario.workload, OpenSwe)
    assert scenario.workload.max_turns == 40
    assert recipe.schedule.policy in {arm.name for arm in suite.arms}
    wrong = load("qwen3-4b-swe", ["schedule.policy=venus", "schedule.policy_options.pace=1"])
    with pytest.raises(RecipeError, match="policy_options"):
        recipe_suite(wrong, OpenSwe(), model="qwen3-4b", gpu="h100", steps=3, seeds=2)
