"""One simulated run from beginning to end.

Owns: ``simulate``: putting the parts together. Must not know: which policy it runs.
"""

from __future__ import annotations

from venusrl.scheduling import actions as act
from venusrl.scheduling import events as ev
from venusrl.scheduling.policies import Policy
from venusrl.scheduling.scheduler import Scheduler
from venusrl.simulation.core import Core, Log, SimulationStuck
from venusrl.simulation.engine import RequestTooLarge
from venusrl.simulation.episodes import Episodes
from venusrl.simulation.recorder import Recorder
from venusrl.simulation.results import Result
from venusrl.simulation.sandboxes import PolicyFault
from venusrl.simulation.scenario import Scenario
from venusrl.simulation.trainer import Trainer

__all__ = ["PolicyFault", "RequestTooLarge", "RunFailed", "SimulationStuck", "simulate"]


class RunFailed(Exception):
    """The scheduler gave the run up (``FailRun``)."""


def simulate(scenario: Scenario, policy: Policy, seed: int, log: Log | None = None) -> Result:
    """Run ``policy`` (fresh: it keeps state) on ``scenario``. Deterministic in its arguments.

    ``log`` hears of every event with the scheduler's answer (``testing.promises`` checks them).

    Raises SimulationStuck (nothing can happen any more, or simulated time ran out), RunFailed, RequestTooLarge (the
    scenario is impossible) or PolicyFault (the policy broke a rule).
    """
    core = Core(Scheduler(scenario.scheduler, policy), log)
    recorder = Recorder(core, scenario)
    episodes = Episodes(core, scenario, seed, recorder)
    trainer = Trainer(core, scenario.trainer, episodes.collect, episodes.fleet.publish)
    for ending in (act.FinishRun, act.FailRun):
        core.carry_out[ending] = core.end
    core.report(ev.VersionPublished(0))
    episodes.fleet.start()
    recorder.watch(episodes.live, list(episodes.fleet.servers.values()), trainer)
    core.run(scenario.max_sim_s, scenario.patience_s)
    if isinstance(core.ended, act.FailRun):
        raise RunFailed(f"{scenario.name} under {policy.name}: {core.ended.reason} {core.ended.detail}")
    return recorder.result(policy.name, seed)
