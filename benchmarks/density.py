"""How many sandboxes run together in one memory cgroup that holds everything: service, templates, sandboxes, kernel.

    python benchmarks/density.py [--quick] [--only WORD] [--out density.json] [--figure density.png]

Needs root and a memory cgroup (v1 or v2). Each cell is a fresh process in a fresh cgroup: real sandboxes live the
committed traces (`benchmarks/traces`), in groups of eight that burst together, as many as the policy lets in. Counted:
how many run together, failed commands, OOM kills, memory of an idle sandbox. The oracle beside it is the simulation of
the same lives on a host of the same capacity, with the overhead that was measured. Resumable: cells already in the
output file are not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from density_run import Cell, Group, Result, Run, runtime_of
from venusrl.sandboxes.admission.baselines import Oracle
from venusrl.sandboxes.admission.study import Setting, World, simulate
from venusrl.sandboxes.admission.traces import MIB, Trace, lives
from venusrl.sandboxes.runtimes.namespace import cgroup

TRACES = Path(__file__).parent / "traces"
POLICIES = {
    "declared": ("declared", True),
    "footprint": ("footprint 0.001", False),
    "sharing": ("footprint 0.001", True),
}
"""Short name to policy and whether the template's pages are shared."""


def read_trace(name: str, life_s: tuple[float, float]) -> Trace:
    """The committed trace, with lives short enough to see several generations of them."""
    trace = msgspec.json.decode((TRACES / f"{name}.json").read_bytes(), type=Trace)
    ramp = min(trace.resident_over_s, life_s[0] / 2)
    return msgspec.structs.replace(trace, life_s=life_s, resident_over_s=ramp)


def cells(args: argparse.Namespace) -> list[Cell]:
    found = []
    life_s = (args.life / 2, args.life)
    for runtime in args.runtime:
        for name in ("published-shape", "light"):
            trace = read_trace(name, life_s)
            for templates in (1,) if args.quick else (1, 8):
                for policy, share in POLICIES.values():
                    if share or (templates == 1 and runtime == "namespace"):  # clones of a machine always share
                        found.append(
                            Cell(
                                runtime,
                                trace,
                                policy,
                                templates,
                                share,
                                args.memory,
                                args.reserve,
                                args.seconds,
                                args.kernel,
                            )
                        )
    return [cell for cell in found if args.only in cell.key]


def memory_group() -> Path:
    """A fresh group for a cell. Raises SystemExit where none can be made."""
    mounts = cgroup.parse_mounts(Path("/proc/self/mountinfo").read_text())
    for mount in mounts:
        if mount.version == 2 or "memory" in mount.controllers:
            path = mount.path / f"{cgroup.PREFIX}density-{os.getpid()}"
            try:
                path.mkdir(exist_ok=True)
            except OSError:
                continue
            if (path / "memory.limit_in_bytes").exists() or (path / "memory.max").exists():
                return path
            path.rmdir()
    raise SystemExit("no memory cgroup can be made here: run as root, with the memory controller on")


def run_cell(cell: Cell) -> Result:
    """In a process of its own, inside the group."""
    path = memory_group()
    limit = path / "memory.max"
    (limit if limit.exists() else path / "memory.limit_in_bytes").write_text(str(cell.memory_mib * MIB))
    joined = path
    if limit.exists():  # v2: processes live in leaves only
        joined = path / "service"
        joined.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        given = Path(directory) / "cell.json"
        given.write_bytes(msgspec.json.encode(cell))
        inside = [sys.executable, __file__, "--inside", str(given), "--group", str(path), "--out", str(out)]
        enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        try:
            subprocess.run(["/bin/sh", "-c", enter, str(joined), *inside], check=True, timeout=3600)
        finally:
            cgroup.remove_tree(path)
        return msgspec.json.decode(out.read_bytes(), type=Result)


def oracle(result: Result) -> float:
    """How many an omniscient policy would have kept running, of the same lives on the same memory."""
    cell = result.cell
    setting = Setting(
        (cell.memory_mib - cell.reserve_mib) * MIB,
        overhead=int(result.overhead_mib * MIB),
        returned=cell.runtime == "namespace",
        share=cell.share,
        templates=cell.templates,
        tick_s=1.0,
        groups_a_tick=100,
    )
    world = World(
        cell.trace, setting, lambda number: lives(cell.trace, f"group{number}", random.Random(f"real-group{number}"))
    )
    world.foresee()
    return simulate(world, Oracle(world.room), 1000, 2.0 * cell.trace.life_s[1]).sandboxes


def shown(result: Result, best: float, declared: float | None) -> str:
    ratio = f"{result.running / declared:5.2f}x declared" if declared else "     -"
    return (
        f"{result.cell.key:70} {result.running:6.1f} running (most {result.most}) {ratio} "
        f"{result.running / best:6.1%} of oracle ({best:.0f}); overhead {result.overhead_mib:.2f} MiB; "
        f"{result.commands} commands, {result.failed} failed, {result.oom_kills} OOM kills, {result.paused} paused; "
        f"peak {result.used_peak_mib:.0f} MiB; late {result.late_s:.2f} s; {result.wall_s:.0f} s"
    )


def draw(results: dict[str, Result], path: Path) -> None:
    """One bar a policy, one group of bars a runtime and trace."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    titles = list(dict.fromkeys(f"{one.cell.runtime}\n{one.cell.trace.name}" for one in results.values()))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for place, (name, (policy, share)) in enumerate(POLICIES.items()):
        heights = [0.0] * len(titles)
        for one in results.values():
            if one.cell.templates == 1 and (one.cell.policy, one.cell.share) == (policy, share):
                heights[titles.index(f"{one.cell.runtime}\n{one.cell.trace.name}")] = one.running
        bars = axes.bar([index + 0.27 * (place - 1) for index in range(len(titles))], heights, 0.25, label=name)
        axes.bar_label(bars, fmt="%.0f")
    axes.set_xticks(range(len(titles)), titles)
    axes.set_ylabel("sandboxes running together in 8 GiB")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=160)


async def live(cell: Cell, state: Path, group: Group) -> Result:
    (state / "runtime").mkdir()
    return await Run(cell, state, group, await runtime_of(cell, state / "runtime"))()


def inside(args: argparse.Namespace) -> None:
    cell = msgspec.json.decode(args.inside.read_bytes(), type=Cell)
    with tempfile.TemporaryDirectory() as state:
        result = asyncio.run(live(cell, Path(state), Group(args.group)))
    args.out.write_bytes(msgspec.json.encode(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute a cell, one template: a check, not a result")
    parser.add_argument("--runtime", action="append", default=[])
    parser.add_argument("--memory", type=int, default=8192, help="MiB of the cgroup")
    parser.add_argument("--reserve", type=int, default=512, help="MiB of it that admission leaves alone")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long the host is kept full, a cell")
    parser.add_argument("--life", type=float, default=120.0, help="the longest life in seconds; the shortest is half")
    parser.add_argument(
        "--kernel", default="", help="Debian's kernel package, a file, for microVMs; else it is fetched"
    )
    parser.add_argument("--only", default="", help="cells whose key has this")
    parser.add_argument("--out", type=Path, default=Path("density.json"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args)
        return
    # Ended by a signal it takes the cell's sandboxes with it, as after an error.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.runtime = args.runtime or ["namespace"]
    if args.quick:
        args.seconds, args.life = 60.0, 30.0
    results: dict[str, Result] = {}
    if args.out.exists():
        results = msgspec.json.decode(args.out.read_bytes(), type=dict[str, Result])
    for cell in cells(args):
        key = f"{cell.key} | {cell.seconds:.0f} s of {cell.memory_mib} MiB"
        if key not in results:
            results[key] = run_cell(cell)
            args.out.write_text(json.dumps(msgspec.to_builtins(results), indent=1))
        same = (one for one in results.values() if one.cell.policy == "declared" and one.cell.runtime == cell.runtime)
        declared = next((one.running for one in same if one.cell.trace.name == cell.trace.name), None)
        print(shown(results[key], oracle(results[key]), declared), flush=True)
    if args.figure:
        draw(results, args.figure)


if __name__ == "__main__":
    main()
