"""The suites: which scenarios are compared, by which policies.

Owns: ``Cell``, ``Suite``, and the definition of each suite by name. Must not know: how a run is carried out.

Common to all cells: groups of 8; 32 H100, half of them train; a wait at the deadline, nothing dropped; no KV control
and no KV transfer, since no released server has them; groups that cannot train before the end are not opened. The
scenario of a cell is the loosest one: arms may be stricter (``arms.prepare``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from decimal import Decimal

import msgspec

from venusrl.scheduling.config import SchedulerConfig
from venusrl.simulation import models
from venusrl.simulation.scenario import Scenario, Script, Workload
from venusrl.simulation.suites.arms import FAMILY, OFF, SWITCHES, VENUS, Arm, arm, missing, names
from venusrl.simulation.workloads.drift import Drift
from venusrl.simulation.workloads.openswe import OpenSwe

GROUP = 8
SEEDS = 5
TUNING_SEED = 1000
"""Seeds from here on are for tuning, those below for measuring."""


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One scenario of a suite. ``labels``: what tells it from the others."""

    name: str
    scenario: Scenario
    labels: dict[str, str] = {}


class Suite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``tuned``: whether the baselines' concurrency is tuned per cell. ``left_out``: arms that belong to it and cannot
    run here, with the package that they need."""

    name: str
    about: str
    cells: list[Cell]
    arms: list[Arm]
    seeds: int = SEEDS
    tuned: bool = True
    left_out: dict[str, str] = {}


class UnknownSuite(ValueError):
    """There is no suite, or no cell, of that name; the message lists those there are."""


def scenario(
    name: str,
    workload: Workload,
    *,
    model: str,
    batch: int,
    alpha: str,
    steps: int,
    gpus: int = 32,
    trainer_scale: float = 1.0,
    sync_scale: float = 1.0,
    staleness: int | None = None,
) -> Scenario:
    """A scenario as the module says. ``staleness``: the largest one allowed, if not the least that alpha needs."""
    factor = Decimal(alpha)
    fleet, trainer = models.cluster(models.MODELS[model], gpus=gpus, trainer_scale=trainer_scale, sync_scale=sync_scale)
    return Scenario(
        name=name,
        scheduler=SchedulerConfig(
            batch_groups=batch,
            group_size=GROUP,
            async_factor=factor,
            max_staleness=math.ceil(factor) if staleness is None else staleness,
            max_steps=steps,
        ),
        fleet=fleet,
        trainer=trainer,
        workload=workload,
    )


def paper_cell(
    model: str,
    batch: int,
    alpha: str,
    steps: int,
    *,
    half: bool = False,
    staleness: int | None = None,
    **scales: float,
) -> Cell:
    """One cell of the grid of model, batch and asynchrony. ``half``: half the turns on half the GPUs, which leaves
    working set over KV about as it is. ``staleness``, ``scales``: as ``scenario`` takes them."""
    suffix = "-half" * half + "".join(f"-{key.removesuffix('_scale')}x{value:g}" for key, value in scales.items())
    suffix += "" if staleness is None else f"-stale{staleness}"
    name = f"{model.removeprefix('qwen3-')}-B{batch}-a{alpha}{suffix}"
    workload, gpus = (OpenSwe(length=0.5), 16) if half else (OpenSwe(), 32)
    trainer_scale, sync_scale = scales.get("trainer_scale", 1.0), scales.get("sync_scale", 1.0)
    made = scenario(
        name,
        workload,
        model=model,
        batch=batch,
        alpha=alpha,
        steps=steps,
        gpus=gpus,
        trainer_scale=trainer_scale,
        sync_scale=sync_scale,
        staleness=staleness,
    )
    labels = {"model": model, "batch": str(batch), "alpha": alpha}
    labels |= {} if staleness is None else {"staleness": str(staleness)}
    return Cell(name, made, labels | {key: f"{value:g}" for key, value in scales.items()})


def _paper(quick: bool) -> Suite:
    about = "training throughput over model, batch and asynchrony (openswe)"
    if quick:
        # More steps than the window holds batches, or nothing would ever wait for room in it.
        grid = [("qwen3-4b", "1", 3), *(("qwen3-32b", a, 3) for a in ("0", "0.5", "1")), ("qwen3-32b", "1.5", 4)]
        quick_cells = [paper_cell(m, 16, a, steps, half=True) for m, a, steps in (*grid, ("qwen3-32b", "2", 4))]
        return Suite("paper", f"{about}, half the turns on half the GPUs", quick_cells, _compared(), seeds=3)
    cells = [
        paper_cell(model, batch, alpha, steps={16: 10, 32: 8, 64: 6}[batch])
        for model in ("qwen3-4b", "qwen3-32b")
        for batch in (16, 32, 64)
        for alpha in ("0", "0.5", "1", "1.5", "2")
    ]
    return Suite("paper", about, cells, _compared())


def _pressure(quick: bool) -> Suite:
    """The working set of a full window against the fleet's KV: what is scarce is set by hand, all else stays. Commands
    are cut at a minute: with the published tail of tools the window is empty but for a few stragglers most of the time,
    and no KV is scarce whatever its size."""
    batch, alpha, steps = (8, "1", 4) if quick else (16, "1", 8)
    workload = OpenSwe(tool_timeout_s=60.0)
    working_set = 2 * batch * GROUP * mean_context(workload)
    cells = []
    for ratio in (0.45, 0.75, 0.87, 1.2, 1.5, 1.85):
        name = f"pressure-{ratio:g}"
        base = scenario(name, workload, model="qwen3-4b", batch=batch, alpha=alpha, steps=steps)
        # Few workers, so that the longest trajectory fits one at every pressure.
        engines = base.fleet.engines[: max(2, batch // 2)]
        capacity = int(working_set / ratio / len(engines))
        sized = tuple(msgspec.structs.replace(engine, kv_capacity=capacity) for engine in engines)
        fleet = msgspec.structs.replace(base.fleet, engines=sized)
        cells.append(Cell(name, msgspec.structs.replace(base, fleet=fleet), {"pressure": f"{ratio:g}"}))
    about = "working set over KV capacity (openswe, commands cut at 60 s, 4B costs)"
    return Suite("pressure", about, cells, _compared(), 3 if quick else SEEDS)


def _drift(quick: bool) -> Suite:
    steps, batch = (6, 8) if quick else (12, 16)
    cells = []
    for name, before, after in (("longer", 0.5, 1.0), ("shorter", 1.0, 0.5)):
        workload = Drift(steps * batch // 2, OpenSwe(length=before), OpenSwe(length=after))
        made = scenario(f"drift-{name}", workload, model="qwen3-32b", batch=batch, alpha="1", steps=steps)
        cells.append(Cell(made.name, made, {"drift": name}))
    chosen = ["fcfs", "thunderagent-repaired", *FAMILY]
    return Suite(
        "drift",
        "turns double or halve in the middle of the run",
        cells,
        _arms(chosen),
        3 if quick else SEEDS,
        tuned=False,
    )


def _scale(quick: bool) -> Suite:
    gpus, batch = (128, 156) if quick else (1024, 1250)
    made = scenario(f"scale-{gpus}", OpenSwe(length=0.25), model="qwen3-4b", batch=batch, alpha="1", steps=2, gpus=gpus)
    about = f"{gpus} GPUs, {2 * batch * GROUP:,} live trajectories, a quarter of the turns"
    chosen = ["fcfs", "thunderagent-repaired", VENUS]
    return Suite(
        "scale", about, [Cell(made.name, made, {"gpus": str(gpus)})], _arms(chosen), 1 if quick else 3, tuned=False
    )


def _sensitivity(quick: bool) -> Suite:
    steps = 3 if quick else 8
    cells = [
        paper_cell(model, 16, "1", steps, half=quick, staleness=None, **{scale: factor})
        for model in ("qwen3-4b", "qwen3-32b")
        for scale in ("trainer_scale", "sync_scale")
        for factor in (0.5, 1.0, 2.0)
    ]
    cells += [  # in fewer steps than this nothing would be that stale
        paper_cell("qwen3-32b", 16, "1", max(steps, 6), half=quick, staleness=bound) for bound in (1, 2, 3)
    ]
    chosen = ["slime", "rollflash", "thunderagent-repaired", VENUS]
    return Suite(
        "sensitivity",
        "trainer and publication at half and double; staleness beyond what alpha needs",
        cells,
        _arms(chosen),
        3 if quick else SEEDS,
        tuned=False,
    )


def _ablation(quick: bool) -> Suite:
    steps = 3 if quick else 8
    grid = [("qwen3-32b", 16, "0"), ("qwen3-32b", 16, "1")]
    if not quick:
        grid += [("qwen3-32b", 32, "1"), ("qwen3-4b", 64, "1")]
    chosen = ["fcfs", VENUS, *(OFF + switch for switch in SWITCHES)]
    cells = [paper_cell(*place, steps, half=quick) for place in grid]
    return Suite(
        "ablation",
        "each mechanism of venus switched off in turn",
        cells,
        _arms(chosen),
        3 if quick else SEEDS,
        tuned=False,
    )


SUITES: dict[str, Callable[[bool], Suite]] = {
    "paper": _paper,
    "pressure": _pressure,
    "drift": _drift,
    "scale": _scale,
    "sensitivity": _sensitivity,
    "ablation": _ablation,
}
"""By name; the argument asks for the quick version. ``validation`` is no comparison of policies: see ``validation``."""


def find_suite(
    name: str,
    *,
    quick: bool = False,
    policies: Iterable[str] = (),
    seeds: int | None = None,
    places: Collection[str] = (),
) -> Suite:
    """The suite, with other policies or seeds if wanted, or only the cells named ``places``. Raises UnknownSuite or
    ``UnknownArm``."""
    if name not in SUITES:
        raise UnknownSuite(f"there is no suite {name!r}; there are {', '.join(SUITES)}, validation")
    suite = SUITES[name](quick)
    by_name = {cell.name: cell for cell in suite.cells}
    for place in places:
        if place not in by_name:
            raise UnknownSuite(f"suite {name} has no cell {place!r}; it has {', '.join(by_name)}")
    wanted = [arm(policy) for policy in policies] or suite.arms
    left_out = {each.name: package for each in wanted if (package := missing(each))}
    chosen = [each for each in wanted if each.name not in left_out]
    cells = [by_name[place] for place in dict.fromkeys(places)] or suite.cells
    return msgspec.structs.replace(suite, cells=cells, arms=chosen, seeds=seeds or suite.seeds, left_out=left_out)


def _compared() -> list[Arm]:
    return _arms(names())


def _arms(chosen: Iterable[str]) -> list[Arm]:
    return [arm(name) for name in chosen]


def mean_context(workload: Workload) -> float:
    """Tokens that a live trajectory holds on average over its turns (of 128 sampled ones)."""
    held = turns = 0
    for ordinal in range(16):
        for index in range(GROUP):
            script = workload.script(TUNING_SEED, ordinal, index, 0)
            held += _held(script)
            turns += len(script.turns)
    return held / turns


def _held(script: Script) -> int:
    total, context = 0, script.prompt
    for turn in script.turns:
        context += turn.generated
        total += context
        context += turn.observation
    return total
