"""The same run in two processes gives the same bytes: nothing depends on the order of sets or on hash seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import hashlib
from decimal import Decimal

import msgspec

from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.policies.registry import REGISTRY, find
from venusrl.simulation.run import simulate
from venusrl.simulation.scenario import EngineSpec, FailureSpec, FleetSpec, SandboxSpec, Scenario, TrainerSpec
from venusrl.simulation.workloads.synthetic import Synthetic

costs = EngineCosts(0.01, 0.0005, 1e-6, 1e-4, 1e-9)
engines = tuple(EngineSpec(f"e{i}", 4000, 6, costs, kv_control=True) for i in range(3))
case = Scenario(
    name="test",
    scheduler=SchedulerConfig(3, 3, Decimal(1), 1, max_steps=2),
    fleet=FleetSpec(engines, load_s=0.5, stale_kv="flush"),
    trainer=TrainerSpec(fixed_s=3.0, publish_s=1.0),
    workload=Synthetic(turns=(1, 5)),
    failures=FailureSpec(0.1, 3, 100.0, 5.0),
    sandboxes=SandboxSpec(12.0, 3),
)
for name in sorted(REGISTRY):
    mode = find(name)
    fleet = msgspec.structs.replace(case.fleet, weight_update=mode.update(case.scheduler))
    mine = msgspec.structs.replace(case, fleet=fleet, scheduler=mode.config(case.scheduler))
    result = msgspec.json.encode(simulate(mine, mode.policy(), 0))
    print(name, hashlib.sha256(result).hexdigest())
"""


def outcome(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_no_policy_depends_on_hash_seeds() -> None:
    first = outcome("1")
    assert "venus" in first
    assert "thunderagent" in first
    assert first == outcome("2")
