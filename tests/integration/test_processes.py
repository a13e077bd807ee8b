"""Children are watched, bounded in their end, and never outlive the coordinator. Real processes throughout."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S, until

from venusrl.coordinator import guardian
from venusrl.coordinator.errors import ProcessError
from venusrl.coordinator.processes import Command, ProcessExit, SupervisedProcess

SHELL_TREE = "setsid sleep 300 & sleep 300 & echo $! ; exec sleep 300"


def python(code: str) -> Command:
    return Command([sys.executable, "-S", "-c", textwrap.dedent(code)])


def shell(code: str, **options: object) -> Command:
    return Command(["/bin/sh", "-c", code], **options)  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def descendants(root: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def process(tmp_path: Path, command: Command, name: str = "child") -> SupervisedProcess:
    return SupervisedProcess(name, command, log_path=tmp_path / "logs" / f"{name}.log")


async def tree_of(child: SupervisedProcess, size: int) -> set[int]:
    assert child.pid is not None
    pid = child.pid
    await until(lambda: len(descendants(pid)) >= size)
    return {pid, *descendants(pid)}


async def test_exit_code_log_and_callback(tmp_path: Path) -> None:
    ends: list[ProcessExit] = []
    child = SupervisedProcess(
        "engine", shell("echo to-out; echo to-err >&2; exit 7"), log_path=tmp_path / "engine.log", on_exit=ends.append
    )
    await child.start()
    end = await child.wait_exit()
    assert ends == [end]
    assert (end.code, end.asked, end.last_lines) == (7, False, ("to-out", "to-err"))
    assert "engine ended with exit code 7" in str(end)
    assert "to-err" in str(end)
    assert not child.running
    assert await child.wait_exit() == end


async def test_environment_directory_nice_and_standard_input(tmp_path: Path) -> None:
    command = shell("echo $GREETING; pwd; nice; wc -c", env={"GREETING": "hello"}, cwd=tmp_path, nice=3)
    child = process(tmp_path, command)
    await child.start()
    end = await child.wait_exit()
    assert end.last_lines == ("hello", str(tmp_path), str(3 + os.nice(0)), "0")


async def test_pinning(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    child = process(tmp_path, Command(["/bin/sh", "-c", "grep Cpus_allowed_list /proc/self/status"], cpus=(cpu,)))
    await child.start()
    assert (await child.wait_exit()).last_lines[0].split() == ["Cpus_allowed_list:", str(cpu)]
    impossible = process(tmp_path, Command(["/bin/true"], cpus=(4096,)))
    with pytest.raises(ProcessError, match="4096"):
        await impossible.start()


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    child = process(tmp_path, Command(["/no/such/program"]))
    await child.start()
    end = await child.wait_exit()
    assert end.code == 127
    assert "cannot start /no/such/program: No such file or directory" in str(end)


async def test_log_of_an_earlier_start_is_not_the_cause_of_a_later_end(tmp_path: Path) -> None:
    child = process(tmp_path, shell("echo $$"))
    await child.start()
    first = await child.wait_exit()
    await child.start()
    second = await child.wait_exit()
    assert len(second.last_lines) == 1
    assert first.last_lines != second.last_lines
    assert first.last_lines[0] in (tmp_path / "logs" / "child.log").read_text()


async def test_T45_stop_is_graceful_when_the_child_is(tmp_path: Path) -> None:
    code = "import signal,sys,time; signal.signal(15, lambda *_: sys.exit(5)); print('up', flush=True); time.sleep(99)"
    child = process(tmp_path, python(code))
    await child.start()
    await until(lambda: "up" in (tmp_path / "logs" / "child.log").read_text())
    end = await child.stop(grace_s=20)
    assert end is not None
    assert (end.code, end.asked) == (5, True)
    assert await child.stop() == end


async def test_T45_stop_is_bounded_when_the_child_ignores_it(tmp_path: Path) -> None:
    code = "import signal,time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    child = process(tmp_path, python(code))
    await child.start()
    await until(lambda: "up" in (tmp_path / "logs" / "child.log").read_text())
    began = time.monotonic()
    end = await child.stop(grace_s=0.1)
    assert time.monotonic() - began < 90  # of the 99 it asked for
    assert end is not None
    assert (end.code, end.asked) == (-signal.SIGKILL, True)


async def test_the_whole_tree_is_gone_after_stop_and_after_an_exit(tmp_path: Path) -> None:
    stopped = process(tmp_path, shell(SHELL_TREE), "stopped")
    await stopped.start()
    tree = await tree_of(stopped, 3)
    await stopped.stop()
    assert not [pid for pid in tree if alive(pid)]

    seen = tmp_path / "seen"
    os.mkfifo(seen)
    left = process(tmp_path, shell(f"setsid sleep 300 & sleep 300 & read -r seen < {seen}; exit 3"), "left")
    await left.start()
    tree = await tree_of(left, 3)
    await asyncio.to_thread(seen.write_text, "seen\n")
    assert (await left.wait_exit()).code == 3
    assert not [pid for pid in tree if alive(pid)]


async def test_killing_guardian_or_program_ends_both(tmp_path: Path) -> None:
    for victim in ("guardian", "program"):
        child = process(tmp_path, Command(["/bin/sleep", "300"]), victim)
        await child.start()
        tree = await tree_of(child, 1)
        assert child.pid is not None
        os.kill(child.pid if victim == "guardian" else max(tree - {child.pid}), signal.SIGKILL)
        end = await child.wait_exit()
        assert (end.code, end.asked) == (-signal.SIGKILL, False)
        assert "killed by SIGKILL" in str(end)
        await until(lambda: not [pid for pid in tree if alive(pid)])  # noqa: B023 - awaited in this very turn


async def test_a_guardian_killed_when_nobody_is_there_to_sweep_takes_the_program_with_it() -> None:
    spec = json.dumps({"argv": ["/bin/sleep", "300"], "cpus": [], "nice": 0})
    command = [sys.executable, "-I", "-S", guardian.__file__, spec]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as alone:  # noqa: ASYNC220
        await until(lambda: bool(descendants(alone.pid)))
        (program,) = descendants(alone.pid)
        alone.kill()
        await until(lambda: not alive(program))


async def test_cancelled_stop_kills_at_once(tmp_path: Path) -> None:
    code = "import signal,time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    child = process(tmp_path, python(code))
    await child.start()
    await until(lambda: "up" in (tmp_path / "logs" / "child.log").read_text())
    stopping = asyncio.create_task(child.stop(grace_s=60))
    await asyncio.sleep(0.05)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    async with asyncio.timeout(PATIENCE_S):
        assert (await child.wait_exit()).code == -signal.SIGKILL


async def test_keep_running_restarts_a_bounded_number_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("venusrl.coordinator.processes._BACKOFF_S", 0.01)
    child = process(tmp_path, shell("echo out of luck; exit 9"))
    with pytest.raises(ProcessError, match="out of luck"):
        await child.keep_running(restarts=2)
    assert child.starts == 3

    flag = tmp_path / "flag"
    healing = process(tmp_path, shell(f"test -e {flag} && exit 0; touch {flag}; exit 1"), "healing")
    assert (await healing.keep_running(restarts=2)).code == 0
    assert healing.starts == 2

    hopeless = process(tmp_path, shell("echo the disk is full; exit 3"), "hopeless")
    with pytest.raises(ProcessError, match="the disk is full"):
        await hopeless.keep_running(restarts=100, final=(3,))
    assert hopeless.starts == 1


async def test_stop_ends_keep_running_also_while_it_backs_off(tmp_path: Path) -> None:
    child = process(tmp_path, shell("exit 1"))
    keeping = asyncio.create_task(child.keep_running(restarts=100))
    await until(lambda: child.starts == 1 and not child.running)
    await child.stop()
    async with asyncio.timeout(PATIENCE_S):
        assert (await keeping).code == 1
    assert child.starts == 1


COORDINATOR = """
import asyncio, sys
from pathlib import Path
from venusrl.coordinator.processes import Command, SupervisedProcess

async def main():
    folder = Path(sys.argv[1])
    for name in ("one", "two"):
        command = Command(["/bin/sh", "-c", sys.argv[2]])
        child = SupervisedProcess(name, command, log_path=folder / f"{name}.log")
        await child.start()
        print(child.pid, flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


@pytest.mark.parametrize("killed_after_s", [0.0, 0.4])
async def test_kill_9_of_the_parent_ends_every_child(tmp_path: Path, killed_after_s: float) -> None:
    parent = subprocess.Popen(  # noqa: ASYNC220 - it must be killed, not awaited
        [sys.executable, "-c", COORDINATOR, str(tmp_path), SHELL_TREE], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        guardians = [int(parent.stdout.readline()) for _ in range(2)]
        await asyncio.sleep(killed_after_s)
        trees = {pid for guardian in guardians for pid in (guardian, *descendants(guardian))}
        assert len(trees) >= 2
        parent.kill()
    await until(lambda: not [pid for pid in trees if alive(pid)])
    await until(lambda: not [pid for guardian in guardians for pid in descendants(guardian)])


async def test_terminal_interrupt_does_not_reach_children(tmp_path: Path) -> None:
    child = process(tmp_path, Command(["/bin/sleep", "300"]))
    await child.start()
    assert child.pid is not None
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    await child.stop()
