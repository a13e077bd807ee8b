"""Scheduling policies side by side on the real demo: wall time a step and how long the trainer idles.

    python benchmarks/policies.py [--policies fcfs venus] [--pairs 2] [--steps 6] [--set KEY=VALUE ...] [--out DIR]

Arms alternate, and their order is reversed from pair to pair, so that a machine that gets slower meets both alike;
seeds are paired. No evaluation runs beside. The first step holds the engine's start and is left out of the times.
Writes results.json; prints each run with the load of the machine (1-minute averages before and after) and, for each
policy after the first, the ratio of wall time a step with a 95% interval over pairs. Resumable: finished runs are
reused.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from runs import ensure, history, interval


def overrides(policy: str, seed: int, steps: int) -> dict[str, object]:
    quiet = {"evaluation.every": 0, "evaluation.at_start": False, "evaluation.at_end": False}
    seeds = {"run.seed": seed, "training.seed": seed, "tasks.seed": seed}
    return {"schedule.policy": policy, "training.steps": steps, **quiet, **seeds}


def measure(run_dir: Path, summary: dict[str, Any]) -> dict[str, Any]:
    past = history(run_dir)
    walls = [point.wall_s for point in past.steps]
    later = past.steps[1:]
    idle = sum(p.values["perf/trainer_idle_fraction"] * p.values["perf/step_s"] for p in later)
    return {
        "step_s": (walls[-1] - walls[0]) / (len(walls) - 1),
        "idle": idle / sum(p.values["perf/step_s"] for p in later),
        "train_s": sum(p.values["perf/train_s"] for p in later) / len(later),
        "tokens": summary["trained_tokens"],
        "reward": sum(past.series("reward/mean")) / len(walls),
    }


def one(run_dir: Path, policy: str, seed: int, steps: int, settings: dict[str, object]) -> dict[str, Any]:
    """A run with the machine's load around it; kept beside the run, for a reused one."""
    kept = run_dir / "load.json"
    before = os.getloadavg()[0]
    fresh = not kept.is_file()
    summary = ensure("demo", run_dir, {**overrides(policy, seed, steps), **settings})
    if fresh:
        kept.write_text(json.dumps([before, os.getloadavg()[0]]) + "\n")
    return {"policy": policy, "seed": seed, "load": json.loads(kept.read_text()), **measure(run_dir, summary)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["fcfs", "venus"])
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe; VALUE as JSON")
    parser.add_argument("--out", type=Path, default=Path("runs/policies"))
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps: the first step is left out, so that there must be two at least")
    settings = {key: json.loads(value) for key, _, value in (word.partition("=") for word in args.set)}
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in args.policies}
    for pair in range(args.pairs):
        for policy in args.policies if pair % 2 == 0 else reversed(args.policies):
            runs[policy].append(one(args.out / f"{policy}-{pair}", policy, pair, args.steps, settings))
    base = runs[args.policies[0]]
    ratios = {
        policy: interval([b["step_s"] / r["step_s"] for b, r in zip(base, found, strict=True)])
        for policy, found in runs.items()
    }
    (args.out / "results.json").write_text(json.dumps({"runs": runs, "ratios": ratios}, indent=2) + "\n")
    print("| policy | pair | s a step | training, s a step | trainer idle | tokens trained | load before, after |")
    print("|---|---|---|---|---|---|---|")
    for policy, found in runs.items():
        for run in found:
            before, after = run["load"]
            print(
                f"| {policy} | {run['seed']} | {run['step_s']:.1f} | {run['train_s']:.1f} | {run['idle']:.1%} "
                f"| {run['tokens']:,} | {before:.1f}, {after:.1f} |"
            )
    for policy, (mean, half) in ratios.items():
        if policy != args.policies[0]:
            print(f"{policy}: {mean:.2f} ± {half:.2f} times faster a step than {args.policies[0]}")


if __name__ == "__main__":
    main()
