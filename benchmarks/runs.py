"""Runs of a shipped recipe as a benchmark's unit: start, resume or reuse, then read back.

Owns: one training run per named arm, through the command line that users type, in a folder of its own. Guarantees:
a finished arm is never run again, an interrupted one is resumed; a failed one stops the benchmark with the run's
own message.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from venusrl.observe.history import History, read_history
from venusrl.observe.recorder import read_events


def ensure(recipe: str, run_dir: Path, overrides: dict[str, object]) -> dict[str, Any]:
    """Run ``recipe`` with ``overrides`` into ``run_dir`` unless it is already done; return its summary."""
    summary = run_dir / "summary.json"
    if not (summary.is_file() and json.loads(summary.read_text())["outcome"] == "finished"):
        argv = [sys.executable, "-m", "venusrl.cli.main", "train", recipe, "--run-dir", str(run_dir), "--json"]
        for key, value in overrides.items():
            argv += ["--set", f"{key}={_toml(value)}"]
        if (run_dir / "store.sqlite").exists() or (run_dir / "recipe.json").exists():
            argv.append("--resume")
        print(f"[{run_dir.name}] {' '.join(f'{k}={v}' for k, v in overrides.items())}", flush=True)
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads(summary.read_text()))


def history(run_dir: Path) -> History:
    return read_history(read_events(run_dir))


def _toml(value: object) -> str:
    return json.dumps(value) if isinstance(value, str | bool | list) else str(value)


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95% confidence interval (Student's t; 0 for a single value)."""
    t975 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, 0.0
    variance = sum((v - mean) ** 2 for v in values) / (n - 1)
    return mean, t975.get(n - 1, 2.0) * (variance / n) ** 0.5
