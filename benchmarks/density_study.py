"""How many sandboxes fit, and how often memory overflows, by policy: the simulation of `sandboxes/admission/study.py`.

    python benchmarks/density_study.py [--quick] [--out density-study.json] [--only WORD]

For each trace and each runtime's shape (namespace: freed memory returns; microvm: it does not, and each costs its
emulator) an 8 GiB host is kept full under each policy for at least 10,000 episodes in groups of eight. Then the
published 400 GB host with 4 GB sandboxes (both in GiB here). Resumable: cells already in the output
file are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from venusrl.sandboxes.admission.api import Admission
from venusrl.sandboxes.admission.baselines import Declared, E2b, Oracle, Usage
from venusrl.sandboxes.admission.footprint import FootprintAdmission, FootprintConfig
from venusrl.sandboxes.admission.study import Outcome, Setting, World, simulate
from venusrl.sandboxes.admission.traces import MIB, Life, Trace, lives

TRACES = Path(__file__).parent / "traces"
GIB = 1 << 30
T_95 = 2.36
"""Student's 97.5% quantile for eight batches, the fewest there are (a seed has eight)."""
SHAPES = {
    "namespace": {"overhead": 1 * MIB, "returned": True},
    "microvm": {"overhead": 32 * MIB, "returned": False},
}


class Cell(msgspec.Struct, frozen=True):
    """One policy on one workload."""

    name: str
    policy: str
    trace: Trace
    setting: Setting


class Result(msgspec.Struct):
    """Of one cell. ``overload`` is the share of time above the capacity, with a 95% interval over batches of time.

    ``touched``: the share of episodes that lived through an overload, however short.
    """

    cell: str
    policy: str
    episodes: int
    sandboxes: float
    most: int
    overload: float
    low: float
    high: float
    touched: float
    peak: float
    wall_s: float


def policy_of(name: str, world: World) -> Admission:
    kind, _, value = name.partition(" ")
    if kind == "footprint":
        return FootprintAdmission(FootprintConfig(target=float(value)))
    if kind == "declared":
        return Declared(float(value or 1))
    if kind == "oracle":
        world.foresee()
        return Oracle(world.room)
    if kind == "peaks":
        return Oracle(world.room_of_peaks)
    made: dict[str, Callable[[], Admission]] = {"e2b": lambda: E2b(random.Random(1).random), "usage": Usage}
    return made[kind]()


def run(cell: Cell, seeds: int, episodes: int) -> Result:
    began = time.perf_counter()
    outcomes = [one_seed(cell, seed, episodes) for seed in range(seeds)]
    spans = [span for outcome in outcomes for span in outcome.spans]
    shares = [span.overloaded for span in spans]
    mean = statistics.fmean(shares)
    half = T_95 * statistics.stdev(shares) / math.sqrt(len(shares))
    done = sum(outcome.episodes for outcome in outcomes)
    return Result(
        cell.name,
        cell.policy,
        done,
        statistics.fmean(outcome.sandboxes for outcome in outcomes),
        max(outcome.most for outcome in outcomes),
        mean,
        max(0.0, mean - half),
        mean + half,
        sum(outcome.touched for outcome in outcomes) / done,
        max(outcome.peak for outcome in outcomes),
        time.perf_counter() - began,
    )


def one_seed(cell: Cell, seed: int, episodes: int) -> Outcome:
    def groups(number: int) -> tuple[Life, ...]:
        return lives(cell.trace, f"group{number}", random.Random(f"{seed}-{number}"))

    world = World(cell.trace, cell.setting, groups)
    return simulate(world, policy_of(cell.policy, world), episodes, warm_up_s=2.0 * cell.trace.life_s[1], spans=8)


def read_trace(name: str) -> Trace:
    return msgspec.json.decode((TRACES / f"{name}.json").read_bytes(), type=Trace)


def cells() -> list[Cell]:
    found = []
    policies = ["oracle", "footprint 0.01", "footprint 0.001", "footprint 0.05", "peaks", "declared", "declared 4"]
    for name in ("published-shape", "light"):
        for shape, how in SHAPES.items():
            setting = Setting(8 * GIB, overhead=int(how["overhead"]), returned=bool(how["returned"]))
            title = f"8 GiB {shape} {name}"
            found += [Cell(title, policy, read_trace(name), setting) for policy in (*policies, "usage", "e2b")]
    published = read_trace("published-shape")
    for templates in (2, 4, 8):
        setting = Setting(8 * GIB, templates=templates)
        title = f"8 GiB namespace published-shape {templates} templates"
        found += [Cell(title, policy, published, setting) for policy in ("oracle", "footprint 0.01")]
    for share in (False, True):
        setting = Setting(400 * GIB, overhead=0, share=share, tick_s=15.0, groups_a_tick=8)
        title = f"400 GiB, 4 GiB declared, {'shared' if share else 'not shared'}"
        four = ("declared", "peaks", "oracle", "footprint 0.001")
        found += [Cell(title, policy, published.scaled(8), setting) for policy in four]
    return found


def shown(result: Result, oracle: float | None) -> str:
    share = f"{result.sandboxes / oracle:6.1%}" if oracle else "     -"
    return (
        f"{result.cell:52} {result.policy:16} {result.sandboxes:7.1f} running {share} of oracle; overload "
        f"{result.overload:.5f} [{result.low:.5f}, {result.high:.5f}]; peak {result.peak:.3f}; "
        f"{result.episodes} episodes, {result.wall_s:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few episodes: a check that it runs, not a result")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=3400, help="episodes a seed, after the warm-up")
    parser.add_argument("--only", default="", help="cells whose name or policy has this word")
    parser.add_argument("--out", type=Path, default=Path("density-study.json"))
    args = parser.parse_args()
    seeds, episodes = (2, 200) if args.quick else (args.seeds, args.episodes)
    results: dict[str, Result] = {}
    if args.out.exists():
        results = msgspec.json.decode(args.out.read_bytes(), type=dict[str, Result])
    for cell in cells():
        key = f"{cell.name} | {cell.policy} | {seeds} x {episodes}"
        if args.only and args.only not in key:
            continue
        if key not in results:
            results[key] = run(cell, seeds, episodes)
            args.out.write_text(json.dumps(msgspec.to_builtins(results), indent=1))
        oracle = results.get(f"{cell.name} | oracle | {seeds} x {episodes}")
        print(shown(results[key], oracle.sandboxes if oracle else None))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
