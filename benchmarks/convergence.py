"""Asynchrony against on-policy training: reward over steps and over wall time.

    python benchmarks/convergence.py [--seeds 3] [--steps 24] [--out runs/convergence]

Arms: async factor 0, 0.5 and 1.5 from the same start, each pinned (engine and trainer on one core each: emulated
disaggregation) and not pinned (at 0 the trainer could otherwise use both cores while nothing is generated). Seeds
are paired. Writes results.json and convergence.png; prints, for each pinning, the difference of training reward to
on-policy at equal steps with a 95% interval over seeds, and the ratio of wall time to train the same number of
steps. Resumable: finished runs are reused.
"""

from __future__ import annotations

import argparse
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import matplotlib

from runs import ensure, history, interval

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ALPHAS = ("0", "0.5", "1.5")
PINNINGS: dict[str, dict[str, object]] = {
    "pinned": {"rollout.cpus": [0], "training.cpus": [1], "rollout.threads": 1, "training.threads": 1},
    "unpinned": {"rollout.threads": 2, "training.threads": 2},
}


def arm(alpha: str, pinning: str, seed: int, steps: int) -> dict[str, object]:
    update = "drain" if alpha == "0" else "in_flight"
    seeds = {"run.seed": seed, "training.seed": seed, "tasks.seed": seed}
    # All arms start from the same weights: one evaluation, at the end.
    evaluation = {"evaluation.every": 0, "evaluation.greedy": False, "evaluation.at_start": False}
    shape = {"schedule.async_factor": Decimal(alpha), "rollout.weight_update": update, "training.steps": steps}
    return {**shape, **PINNINGS[pinning], **seeds, **evaluation}


def measure(run_dir: Path, summary: dict[str, Any]) -> dict[str, Any]:
    past = history(run_dir)
    return {
        "reward": past.series("reward/mean"),
        "wall": [point.wall_s - past.steps[0].wall_s for point in past.steps],
        "train_s": past.steps[-1].wall_s - past.steps[0].wall_s,
        "end": summary["eval_reward_end"],
        "staleness_mean": summary["staleness_mean"],
        "idle": summary["trainer_idle_fraction"],
    }


def compare(cells: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Differences to on-policy (alpha 0), paired by seed; also over both pinnings: they change time, not learning."""
    report: dict[str, Any] = {}
    pooled: dict[str, list[tuple[float, float]]] = {}
    for name, runs in cells.items():
        alpha, pinning = name.split("-")
        base = cells[f"0-{pinning}"]
        pairs = [
            (_mean(r["reward"]) - _mean(b["reward"]), r["end"] - b["end"]) for r, b in zip(runs, base, strict=True)
        ]
        pooled.setdefault(alpha, []).extend(pairs)
        ratios = [b["train_s"] / r["train_s"] for r, b in zip(runs, base, strict=True)]
        report[name] = {
            **_differences(pairs),
            "speed_ratio": interval(ratios),
            "staleness_mean": _mean([r["staleness_mean"] for r in runs]),
            "trainer_idle": _mean([r["idle"] for r in runs]),
        }
    both = {f"{alpha}-both": _differences(pairs) for alpha, pairs in pooled.items() if alpha != "0"}
    return {**report, **both}


def _differences(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    return {
        "reward_difference": interval([p[0] for p in pairs]),
        "held_out_difference": interval([p[1] for p in pairs]),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def draw(cells: dict[str, list[dict[str, Any]]], path: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), sharey=True)
    for row, pinning in enumerate(PINNINGS):
        for color, alpha in zip(("tab:blue", "tab:orange", "tab:green"), ALPHAS, strict=True):
            for seed, run in enumerate(cells.get(f"{alpha}-{pinning}", [])):
                smooth = [
                    sum(run["reward"][max(0, i - 4) : i + 1]) / len(run["reward"][max(0, i - 4) : i + 1])
                    for i in range(len(run["reward"]))
                ]
                label = f"async factor {alpha}" if seed == 0 else None
                axes[row][0].plot(range(1, len(smooth) + 1), smooth, color=color, alpha=0.8, label=label)
                axes[row][1].plot(run["wall"], smooth, color=color, alpha=0.8, label=label)
        axes[row][0].set(xlabel="training step", ylabel=f"training reward ({pinning})")
        axes[row][1].set(xlabel="seconds since the first step")
        for axis in axes[row]:
            axis.grid(alpha=0.3)
            axis.legend(loc="upper left")
    figure.suptitle("Reward over steps and over wall time (mean of the last 5 steps; one line a seed)")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--pinnings", nargs="+", default=list(PINNINGS), choices=list(PINNINGS))
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"))
    args = parser.parse_args()
    cells: dict[str, list[dict[str, Any]]] = {}
    for seed in range(args.seeds):
        for pinning in args.pinnings:
            for alpha in ALPHAS:
                run_dir = args.out / f"{alpha}-{pinning}-{seed}"
                summary = ensure("demo", run_dir, arm(alpha, pinning, seed, args.steps))
                cells.setdefault(f"{alpha}-{pinning}", []).append(measure(run_dir, summary))
    report = compare(cells)
    (args.out / "results.json").write_text(json.dumps({"cells": cells, "report": report}, indent=2) + "\n")
    draw(cells, args.out / "convergence.png")
    print("| arm | reward difference to alpha 0 | held-out difference | speed ratio | staleness | trainer idle |")
    print("|---|---|---|---|---|---|")
    for name, row in report.items():
        columns = [f"{m:+.3f} ± {h:.3f}" for m, h in (row["reward_difference"], row["held_out_difference"])]
        if "speed_ratio" in row:
            columns.append("{:.2f} ± {:.2f}".format(*row["speed_ratio"]))
            columns += [f"{row['staleness_mean']:.2f}", f"{row['trainer_idle']:.2f}"]
        print(f"| {name} | " + " | ".join(columns) + " |")


if __name__ == "__main__":
    main()
