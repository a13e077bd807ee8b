"""Does the demo learn because of its rewards? Three seeds of the demo beside its controls.

    python benchmarks/controls.py [--seeds 3] [--out runs/controls]

Arms: `demo` as shipped; `lr0` (learning rate 0: everything runs, nothing is learned); `shuffled` (each batch's
rewards permuted before advantages). Prints a table of held-out reward (sampled) at version 0 and at the end, the
gain, and its mean over seeds with a 95% interval; writes results.json. Resumable: finished runs are reused.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from runs import ensure, interval

ARMS: dict[str, dict[str, object]] = {
    "demo": {},
    "lr0": {"training.learning_rate": 0.0},
    "shuffled": {"training.shuffle_rewards": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path("runs/controls"))
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(args.seeds):
        for arm in args.arms:
            seeds = {"run.seed": seed, "training.seed": seed, "tasks.seed": seed}
            summary = ensure("demo", args.out / f"{arm}-{seed}", {**ARMS[arm], **seeds})
            keys = (
                "eval_reward_start",
                "eval_reward_end",
                "eval_reward_gain",
                "wall_s",
                "staleness_mean",
                "trainer_idle_fraction",
            )
            results.setdefault(arm, []).append({key: summary[key] for key in keys})
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
