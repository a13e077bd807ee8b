"""The environment service with many sandboxes: its latencies among them, and what it leaves behind.

    python benchmarks/env_scale.py [--alive 1000] [--lives 10000] [--at-once 16] [--warm 120] [--shared] [--json]

Starts ``venusrl env serve`` (namespace runtime) as a process of its own and talks to it over HTTP as a client does.
First so many sandboxes live at once: how fast ``--at-once`` clients make them, and, with all alive and one client
alone, how long a create, a command and a list take; then all are killed. Then so many live one after another, each with
a file and a process of its own. Counted before and after: processes below this one (zombies too), mounts, control
groups (directories, and what /proc/cgroups says), files in the state directory, the service's memory, descriptors and
threads. Prints the figures and ends with 1 when something was left that must not be, or anything failed.

Needs root, and a quiet machine for the latencies. ``--shared``: others use the machine meanwhile, so what only the
whole machine can tell (/proc/cgroups, control groups, mounts, network devices) is told, not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from venusrl.sandboxes.e2b_wire import Ended, Made, Printed, Wire
from venusrl.sandboxes.protocol import SandboxDenied
from venusrl.sandboxes.runtimes.namespace import kernel

TTL_S = 24 * 3600
CALL_S = 120.0
COMMAND_S = 60.0
SETTLE_S = 90.0
SLACK = {"rss_mib": 64, "descriptors": 8, "threads": 8, "files": 3} | dict.fromkeys(
    ("groups_memory", "groups_cpu", "groups_pids", "groups_freezer"), 32
)
"""What may be more: the service's caches, groups whose last page the kernel has not let go of yet, the database's side
files and what admission has learned. None is per life."""
MACHINE = ("groups", "mounts", "devices", "groups_memory", "groups_cpu", "groups_pids", "groups_freezer")
SERVICE = [sys.executable, "-m", "venusrl.cli.main", "env", "serve"]


class Service:
    """A running service: its process, where it answers, its state directory."""

    def __init__(self, process: subprocess.Popen[str], told: dict[str, Any], state: Path) -> None:
        self.pid = process.pid
        self.process = process
        self.state = state
        environment = told["environment"]
        self.key = environment["E2B_API_KEY"]
        self.url = environment["E2B_API_URL"]
        self.wire = Wire(self.url, self.key, environment["E2B_SANDBOX_URL"])


@contextmanager
def serving(folder: Path, log_file: Path) -> Iterator[Service]:
    """One service; its sandboxes end with it."""
    with log_file.open("w") as log:
        where = ["--state", str(folder / "state"), "--listen", "127.0.0.1:0", "--kill-on-exit", "--json"]
        process = subprocess.Popen([*SERVICE, *where], stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        text = ""
        while not text.endswith("\n}\n"):
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the service did not start:\n{log_file.read_text()[-2000:]}")
            text += line
        told = json.loads(text)
        if "environment" not in told:
            raise SystemExit(f"the service did not start: {told.get('error', text)}")
        try:
            yield Service(process, told, folder / "state")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(300)


# What there is


def count(service: Service) -> dict[str, int]:
    """Everything that could be left behind."""
    own = Path("/proc", str(service.pid))
    status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
    below = list(processes())
    return {
        "processes": len(below),
        "zombies": sum(state == "Z" for state in below),
        "mounts": len((own / "mountinfo").read_text().splitlines()),
        "groups": sum(len(folders) for _, folders, _ in os.walk("/sys/fs/cgroup")),
        **{f"groups_{name}": number for name, number in controllers().items()},
        "devices": len(os.listdir("/sys/class/net")),
        "files": sum(len(files) for _, _, files in os.walk(service.state)),
        "state_mib": sum(path.lstat().st_size for path in service.state.rglob("*") if path.is_file()) >> 20,
        "descriptors": len(os.listdir(own / "fd")),
        "threads": int(status["Threads"]),
        "rss_mib": int(status["VmRSS"].split()[0]) >> 10,
    }


def controllers() -> dict[str, int]:
    """Control groups by controller as the kernel has them, those that only wait for their last page too."""
    lines = Path("/proc/cgroups").read_text().splitlines()[1:]
    numbers = {name: int(number) for name, _, number, _ in (line.split() for line in lines)}
    return {name: numbers[name] for name in ("memory", "cpu", "pids", "freezer") if name in numbers}


def processes() -> Iterator[str]:
    """The state of each process below this one; ``main`` takes orphans."""
    found: dict[int, tuple[int, str]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:2]
                found[int(entry.name)] = (int(parent), state)
    below = {os.getpid()}
    while more := {pid for pid, (parent, _) in found.items() if parent in below} - below:
        below |= more
    return (found[pid][1] for pid in below - {os.getpid()})


def leaks(before: dict[str, int], after: dict[str, int], *, shared: bool, clients: int) -> dict[str, int]:
    """What is more than it was, and should not be. The database may grow: it remembers the ended for a day. Each client
    keeps a connection, which is a descriptor of the service, until it has been idle for a while."""
    judged = [name for name in before if name != "state_mib" and not (shared and name in MACHINE)]
    grown = {name: after[name] - before[name] for name in judged}
    slack = SLACK | {"descriptors": SLACK["descriptors"] + clients}
    return {name: by for name, by in grown.items() if by > slack.get(name, 0)}


# What is done


refusals: Counter[str] = Counter()
"""How often there was no room, by what the service said."""


async def make(wire: Wire) -> tuple[Made, float]:
    """A sandbox, and how many seconds were waited for room, as long as the service says."""
    began = asked = time.perf_counter()
    while True:
        try:
            made = await wire.create("host", TTL_S, {}, secrets.token_hex(16), CALL_S)
            return made, asked - began
        except SandboxDenied as error:
            if not refusals[why := re.sub(r"[0-9.]+", "N", str(error))[:200]]:
                print(f"no room: {error}; again in {error.retry_after_s:g} s", file=sys.stderr, flush=True)
            refusals[why] += 1
            await asyncio.sleep(error.retry_after_s or 1.0)
            asked = time.perf_counter()


async def command(wire: Wire, made: Made, text: str, wanted: str) -> None:
    """Run ``text`` in it. Ends the program when it does not say ``wanted``."""
    told, code = b"", None
    async for event in wire.start(made, "user", ["/bin/sh", "-c", text], {}, "/tmp", COMMAND_S):
        if isinstance(event, Printed):
            told += event.data
        elif isinstance(event, Ended):
            code = event.code
    if told.decode().strip() != wanted or code != 0:
        raise SystemExit(f"a command in {made.id} said {told!r} and ended with {code}")


async def listing(service: Service) -> int:
    """How many sandboxes there are, page by page."""
    seen, token = 0, ""
    while True:
        params = {"limit": "100", **({"nextToken": token} if token else {})}
        async with service.wire.session().get(
            f"{service.url}/v2/sandboxes", params=params, headers={"X-API-Key": service.key}
        ) as answer:
            if answer.status != 200:
                raise SystemExit(f"a list was answered with {answer.status}: {await answer.text()}")
            seen += len(await answer.json())
            token = answer.headers.get("x-next-token", "")
        if not token:
            return seen


async def together(number: int, at_once: int, what: str, work: Callable[[int], Awaitable[float]]) -> dict[str, float]:
    """``work`` so many times by ``at_once`` clients: the rate, and how long one took but for its wait for room."""
    numbers, times, waits = iter(range(number)), [], 0.0
    tell = max(1, number // 10)

    async def client() -> None:
        nonlocal waits
        for each in numbers:
            began = time.perf_counter()
            waited = await work(each)
            times.append(time.perf_counter() - began - waited)
            waits += waited
            if len(times) % tell == 0:
                print(f"{what}: {len(times)} of {number}", file=sys.stderr, flush=True)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_once)))
    seconds = time.perf_counter() - began
    return {"a_second": round(number / seconds, 1), "waited_for_room_s": round(waits, 1), **spread(times)}


def spread(times: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(1e3 * each for each in times)
    last = len(ordered) - 1
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {name: round(ordered[round(share * last)], 2) for name, share in shares.items()}


async def alone(number: int, what: str, work: Callable[[int], Awaitable[float]]) -> dict[str, float]:
    """One client, one after another."""
    return await together(number, 1, what, work)


async def many_alive(service: Service, number: int, at_once: int) -> dict[str, Any]:
    """So many at once; the latencies among them; their end."""
    wire, made = service.wire, []

    async def create(_: int) -> float:
        one, waited = await make(wire)
        made.append(one)
        return waited

    creating = await together(number, at_once, "create", create)
    if (seen := await listing(service)) != number:
        raise SystemExit(f"{seen} sandboxes are listed, {number} were made")
    extra: list[Made] = []

    async def one_more(_: int) -> float:
        if extra:
            await wire.kill(extra.pop().id, CALL_S)
        one, waited = await make(wire)
        extra.append(one)
        return waited

    chosen = random.Random(0).choices(made, k=200)
    rss = count(service)["rss_mib"]
    for each in made[:1]:  # room under the key's quota for the one more
        await wire.kill(each.id, CALL_S)
    living = made[1:]
    chosen = [each for each in chosen if each is not made[0]]

    async def run(at: int) -> float:
        await command(wire, chosen[at], "echo ok", "ok")
        return 0.0

    async def look(_: int) -> float:
        await listing(service)
        return 0.0

    result = {
        "create_by_clients": creating,
        "create_and_kill_alone": await alone(50, "create among them", one_more),
        "command_alone": await alone(len(chosen), "command among them", run),
        "list_all_pages_alone": await alone(20, "list of them", look),
        "service_rss_mib": rss,
    }
    living += extra

    async def end(at: int) -> float:
        await wire.kill(living[at].id, CALL_S)
        return 0.0

    return result | {"kill_by_clients": await together(len(living), at_once, "kill", end)}


async def live(service: Service, number: int, at_once: int) -> dict[str, float]:
    """Whole lives: made, used (a file and a process stay behind), killed."""
    wire = service.wire

    async def one(_: int) -> float:
        made, waited = await make(wire)
        await command(wire, made, "echo x > x; sleep 1000 >/dev/null 2>&1 & cat x", "x")
        await wire.kill(made.id, CALL_S)
        return waited

    return await together(number, at_once, "lives", one)


async def warm(service: Service, number: int, seconds: float) -> None:
    """Let some live for a while: admission counts ages of a template that it has never seen as the declared size."""
    if seconds:
        made = [(await make(service.wire))[0] for _ in range(number)]
        await asyncio.sleep(seconds)
        for one in made:
            await service.wire.kill(one.id, CALL_S)


async def settled(service: Service, before: dict[str, int], *, shared: bool, clients: int) -> dict[str, int]:
    """What there is once nothing goes away any more. Orphans that ended were given to this process: it takes them."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        while reaped():
            pass
        after = count(service)
        if not leaks(before, after, shared=shared, clients=clients) or time.monotonic() > deadline:
            return after
        await asyncio.sleep(1.0)


async def measure(service: Service, options: argparse.Namespace) -> dict[str, Any]:
    try:
        await live(service, 4 * options.at_once, options.at_once)  # what is made once for all is there then
        await warm(service, options.at_once, options.warm)
        before = count(service)
        alive = await many_alive(service, options.alive, options.at_once) if options.alive else {}
        judged = {"shared": options.shared, "clients": options.at_once}
        between = await settled(service, before, **judged)
        lives = await live(service, options.lives, options.at_once) if options.lives else {}
        after = await settled(service, before, **judged)
    finally:
        await service.wire.close()
    return {
        "alive": options.alive,
        "lives": options.lives,
        "at_once": options.at_once,
        "warm_s": options.warm,
        "with_all_alive": alive,
        "one_after_another": lives,
        "refused_for_want_of_room": dict(refusals),
        "before": before,
        "between": between,
        "after": after,
        "leaks": leaks(before, after, **judged),
        "load": [round(each, 1) for each in os.getloadavg()],
        "cpus": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--alive", type=int, default=1000, help="so many at once; at most the default key's quota, 1000"
    )
    parser.add_argument("--lives", type=int, default=10_000, help="so many one after another; 0 = none")
    parser.add_argument("--at-once", type=int, default=16, help="clients")
    parser.add_argument("--warm", type=float, default=0.0, help="seconds that some live before, for admission to learn")
    parser.add_argument("--shared", action="store_true", help="others use this machine too")
    parser.add_argument("--log", type=Path, help="keep the service's log in this file")
    parser.add_argument("--json", action="store_true", help="one line")
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("sandboxes with limits need root: run as root")
    kernel.become_subreaper()
    with tempfile.TemporaryDirectory(prefix="venusrl-") as folder:
        with serving(Path(folder), options.log or Path(folder, "log")) as service:
            result = asyncio.run(measure(service, options))
        while reaped():
            pass
        result["processes_left_after_the_end"] = len(list(processes()))
    print(json.dumps(result, indent=None if options.json else 2))
    if result["leaks"] or result["processes_left_after_the_end"]:
        sys.exit(1)


def reaped() -> bool:
    """Take an orphan that ended, if there is one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


if __name__ == "__main__":
    main()
