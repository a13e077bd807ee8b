"""The density study: that its numbers follow from its traces, and that it tells good policies from bad ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from venusrl.sandboxes.admission.api import Admission
from venusrl.sandboxes.admission.baselines import Declared, E2b, Oracle, Usage
from venusrl.sandboxes.admission.footprint import FootprintAdmission, FootprintConfig
from venusrl.sandboxes.admission.study import Groups, Outcome, Setting, World, simulate
from venusrl.sandboxes.admission.traces import MIB, Command, Life, Trace, lives, memory, program

TRACES = Path(__file__).resolve().parents[2] / "benchmarks" / "traces"
SMALL = Trace(
    name="small",
    about="for tests",
    declared_mib=128,
    template_mib=12,
    group=4,
    life_s=(60.0, 120.0),
    resident_mib=(20.0, 20.0),
    resident_over_s=20.0,
    think_s=15.0,
    together=0.8,
    apart_s=1.0,
    varies=0.1,
    commands=(Command("edit", 1.0, 0.0, 0.1, 16), Command("test", 1.0, 60.0, 5.0)),
)
SETTING = Setting(1024 * MIB)


def groups_of(trace: Trace) -> Groups:
    return lambda number: lives(trace, f"g{number}", random.Random(f"1-{number}"))


def outcome(policy: Callable[[World], Admission], setting: Setting = SETTING, episodes: int = 120) -> Outcome:
    world = World(SMALL, setting, groups_of(SMALL))
    return simulate(world, policy(world), episodes, warm_up_s=240.0, spans=4)


def oracle(world: World) -> Admission:
    world.foresee()
    return Oracle(world.room)


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json")), ids=lambda path: path.stem)
def test_committed_traces_are_what_their_names_say(path: Path) -> None:
    trace = msgspec.json.decode(path.read_bytes(), type=Trace)
    assert trace.name == path.stem
    assert trace.declared_mib == 512
    peaks = [max(value for _, value in memory(life, returned=True)) / MIB for life in groups_of(trace)(1)]
    assert max(peaks) <= trace.peak_mib + 1.0
    if trace.name == "published-shape":
        assert trace.peak_mib + trace.template_mib == 67
        assert max(peaks) == pytest.approx(55.0)


def test_the_same_draws_give_the_same_lives() -> None:
    assert groups_of(SMALL)(3) == groups_of(SMALL)(3)
    assert groups_of(SMALL)(3) != groups_of(SMALL)(4)


def test_a_groups_commands_come_together() -> None:
    members = groups_of(SMALL)(5)
    assert len(members) == 4
    together = 0
    for step in members[0].steps:
        near = [other for other in members[1].steps if other.name == step.name and abs(other.at_s - step.at_s) < 1.5]
        together += bool(near) and not step.resident
    assert together >= 2


def test_memory_follows_the_steps_and_a_virtual_machine_keeps_its_peak() -> None:
    life = Life("g", 100.0, groups_of(SMALL)(2)[0].steps)
    namespace, machine = memory(life, returned=True, extra=7), memory(life, returned=False, extra=7)
    assert namespace[0][0] == 0.0
    assert min(value for _, value in namespace) >= 7
    values = [value for _, value in machine]
    assert values == sorted(values)
    assert values[-1] == max(value for _, value in namespace)


def test_a_larger_workload_keeps_its_proportions() -> None:
    large = SMALL.scaled(8)
    assert (large.declared_mib, large.template_mib, large.peak_mib) == (1024, 96, 8 * SMALL.peak_mib)


def test_programs_say_how_much_and_how_long() -> None:
    test = next(step for step in groups_of(SMALL)(2)[0].steps if step.name == "test" and step.seconds == 5.0)
    assert f"bs={int(test.mib * 1024)}k" in program(test, 1)
    assert "sleep 10.00" in program(test, 1, scale=2.0)


def test_the_oracle_never_overloads_and_declared_wastes() -> None:
    best, declared = outcome(oracle), outcome(lambda _: Declared())
    assert best.overloaded == 0.0
    assert best.peak <= 1.0
    assert 7.0 <= declared.sandboxes <= 8.0
    peaks = outcome(lambda world: Oracle(world.room_of_peaks))
    assert best.sandboxes >= peaks.sandboxes > declared.sandboxes


def test_footprint_comes_near_the_oracle_within_its_target() -> None:
    ours = outcome(lambda _: FootprintAdmission(FootprintConfig(target=0.05)), episodes=300)
    assert ours.overloaded <= 0.05
    assert ours.sandboxes > 0.7 * outcome(oracle).sandboxes


def test_policies_that_do_not_look_ahead_overload() -> None:
    assert outcome(lambda _: Usage()).overloaded > 0.1
    assert outcome(lambda _: E2b(random.Random(1).random)).overloaded > 0.5
    assert outcome(lambda _: Declared(32.0)).overloaded > 0.1


def test_long_lives_are_learned_from_before_any_has_ended() -> None:
    """A service that has just started knows declared sizes only: eight fit. Nobody ends, yet more are let in."""
    trace = msgspec.structs.replace(SMALL, life_s=(1000.0, 1000.0), declared_mib=512)
    world = World(trace, Setting(4400 * MIB), groups_of(trace))
    policy = FootprintAdmission(FootprintConfig(target=0.05))
    waiting, number, running = world.group(0), 0, list[int]()
    while world.now < 900.0:
        if world.try_group(waiting, policy):
            number += 1
            waiting = world.group(number)
        world.advance(world.now + 5.0)
        world.sample(policy)
        running.append(sum(len(host.sandboxes) for host in world.hosts))
    assert running[1] == 8
    assert running[-1] >= 24
    assert sum(host.overloaded_s for host in world.hosts) <= 0.05 * world.now


def test_what_can_never_start_is_said_and_not_waited_for() -> None:
    with pytest.raises(ValueError, match="no group of 4"):
        outcome(lambda _: Declared(), Setting(100 * MIB))


def test_it_repeats_itself() -> None:
    policy = FootprintConfig(target=0.01)
    assert outcome(lambda _: FootprintAdmission(policy)) == outcome(lambda _: FootprintAdmission(policy))
