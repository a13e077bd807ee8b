"""Does the demo learn because of its rewards? Three seeds of the demo beside its controls.

    python benchmarks/controls.py [--seeds 3] [--out runs/controls]

Arms: `demo` as shipped; `lr0` (learning rate 0: everything runs and nothing is learned); `shuffled`
(each batch's rewards permuted before advantages); `pretraining` (the same wall time, on both cores, spent on more
pre-training instead; its end is compared with the demo's start on the same tasks). Prints a table of held-out reward
(sampled) at version 0 and at the end, the gain, and its mean over seeds with a 95% interval; writes results.json.
Resumable: finished runs are reused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from runs import ensure, interval

ENDS_ONLY: dict[str, object] = {"evaluation.every": 0, "evaluation.greedy": False}
ARMS: dict[str, dict[str, object]] = {
    "demo": {},
    "lr0": {"training.learning_rate": 0.0, **ENDS_ONLY},
    "shuffled": {"training.shuffle_rewards": True, **ENDS_ONLY},
}
PRETRAINING = "pretraining"
KEYS = ("eval_reward_start", "eval_reward_end", "eval_reward_gain", "wall_s", "staleness_mean", "trainer_idle_fraction")


def train(arm: str, seed: int, out: Path) -> dict[str, float]:
    summary = ensure("demo", out / f"{arm}-{seed}", {**ARMS[arm], **_seeds(seed)})
    return {key: summary[key] for key in KEYS}


def pretrain(seed: int, out: Path) -> dict[str, float]:
    """As long as the demo of that seed took, then one evaluation on its held-out tasks."""
    demo = train("demo", seed, out)
    model = out / f"{PRETRAINING}-{seed}-model"
    if not model.is_dir():
        argv = [sys.executable, "-m", "venusrl.cli.main", "demo-policy", "continue", "-o", str(model), "--threads", "2"]
        subprocess.run([*argv, "--seconds", str(demo["wall_s"]), "--seed", str(1001 + seed)], check=True)
    only_evaluate = {"training.steps": 1, "training.learning_rate": 0.0, "evaluation.at_end": False}
    overrides = {**only_evaluate, **ENDS_ONLY, "model.path": str(model.resolve()), **_seeds(seed)}
    summary = ensure("demo", out / f"{PRETRAINING}-{seed}", overrides)
    start, end = demo["eval_reward_start"], summary["eval_reward_start"]
    ends = {"eval_reward_start": start, "eval_reward_end": end, "eval_reward_gain": end - start}
    return {**demo, **ends}


def _seeds(seed: int) -> dict[str, object]:
    return {"run.seed": seed, "training.seed": seed, "tasks.seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    arms = [*ARMS, PRETRAINING]
    parser.add_argument("--arms", nargs="+", default=arms, choices=arms)
    parser.add_argument("--out", type=Path, default=Path("runs/controls"))
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(args.seeds):
        for arm in args.arms:
            row = pretrain(seed, args.out) if arm == PRETRAINING else train(arm, seed, args.out)
            results.setdefault(arm, []).append(row)
    print("| arm | start | end | gain, each seed | mean gain ± 95% | wall s |\n|---|---|---|---|---|---|")
    for arm, rows in results.items():
        gains = [row["eval_reward_gain"] for row in rows]
        mean, half = interval(gains)
        columns = [" ".join(f"{row[k]:.3f}" for row in rows) for k in ("eval_reward_start", "eval_reward_end")]
        columns += [
            " ".join(f"{g:+.3f}" for g in gains),
            f"{mean:+.3f} ± {half:.3f}",
            " ".join(f"{r['wall_s']:.0f}" for r in rows),
        ]
        print(f"| {arm} | " + " | ".join(columns) + " |")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
