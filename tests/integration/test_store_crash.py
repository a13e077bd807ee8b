"""The run store against the machine: SIGKILL at random instants, a full disk, a killed lock holder."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from venusrl.coordinator.errors import StorePruned
from venusrl.coordinator.store.order import TaskOrder
from venusrl.testing.runs import TASKS, new_store

LIFE = """
import os, random, sys
from pathlib import Path
from venusrl.coordinator.store import TrainedReport, blobs
from venusrl.testing.runs import made_up_trajectory, new_store

folder, steps, oversample = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
keep = int(sys.argv[4])
if keep:
    blobs.SEGMENT_BYTES = 4000
said = os.open(folder / "acknowledged", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def say(what):
    os.write(said, f"{what}\\n".encode())

store = new_store(folder / "run", resume=(folder / "run").exists())
state = store.recover()
say("up")
version, tasks, running, complete = state.version, {}, [], {}
pending = list(state.pending_batches)

def retire_stale():  # their tasks are taken again, at the same place of the order
    global running
    for group, start in list(complete.items()):
        if start < version - 1:
            del complete[group]
            store.close_group(group, "stale")
            again = store.open_group(2, reissue_of=group)
            tasks[again.id] = again.task_id
            running += again.trajectories

for group in state.groups:
    tasks[group.id] = group.task_id
    if group.state == "complete":
        complete[group.id] = group.start_version
    elif group.vacancies:
        running += [store.replace_trajectory(group.id, vacancy.index) for vacancy in group.vacancies]
    else:
        complete[group.id] = store.complete_group(group.id)

while version < steps:
    retire_stale()
    while len(complete) + len({member.group_id for member in running}) + 2 * len(pending) < oversample:
        group = store.open_group(2)
        tasks[group.id] = group.task_id
        running += group.trajectories
    if running:
        member = running.pop(random.randrange(len(running)))
        store.record_progress(member.id, version, 1)
        store.finish_trajectory(made_up_trajectory(member, tasks[member.group_id], version=version, sampled=200))
        say(f"finished {member.id}")
        if not any(other.group_id == member.group_id for other in running):
            complete[member.group_id] = store.complete_group(member.group_id)
    if not pending and len(complete) >= 2:
        retire_stale()
        chosen = sorted(complete, key=complete.get)[:2]
        if len(chosen) == 2:
            batch = store.form_batch(version, chosen)
            for group in chosen:
                del complete[group]
            pending = [store.batch_record(version)]
            say(f"formed {batch}")
    if pending:
        batch = pending.pop()
        store.mark_trained(TrainedReport(batch.id, version + 1, "/m", version % 2 == 1))
        if keep:
            store.prune(keep)
        version += 1
        say(f"trained {version}")
say("over")
"""


def start_life(folder: Path, steps: int, oversample: int, keep: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LIFE, *map(str, (folder, steps, oversample, keep))])


def acknowledged(folder: Path) -> list[str]:
    try:
        return (folder / "acknowledged").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []


def check_store(folder: Path) -> None:
    """Nothing acknowledged is missing, nothing is there twice, the order is whole."""
    said = acknowledged(folder)
    with new_store(folder / "run", resume=True) as store:
        assert store.check_invariants() == []
        for line in said:
            what, _, name = line.partition(" ")
            if what == "finished":
                assert store.trajectory(name) is not None
            if what == "formed":
                assert store.batch_for(int(name.removeprefix("b"))) is not None
            if what == "trained":
                assert store.current_version() >= int(name)
        state = store.recover()
        in_batches = [g for v in range(state.version + 1) if (b := store.batch_record(v)) for g in b.group_ids]
        waiting = [group.id for group in state.groups]
        taken = Counter(int(group[1:7]) for group in [*in_batches, *waiting])
        # T31: trained + pending = the dataset's order up to where it was opened, each once.
        assert taken == Counter(range(state.next_ordinal))
        order = TaskOrder(TASKS, seed=0, epochs=0)
        assert all(order.task_at(group.ordinal) == group.task_id for group in state.groups)


@pytest.mark.parametrize(("kill_at", "oversample"), [(kill_at, 4) for kill_at in range(1, 14, 3)])
def test_T31_killed_at_several_points_around_the_first_step(tmp_path: Path, kill_at: int, oversample: int) -> None:
    with start_life(tmp_path, 100_000, oversample) as life:
        while len(acknowledged(tmp_path)) < kill_at:
            assert life.poll() is None
            time.sleep(0.001)
        life.kill()
    check_store(tmp_path)
    with start_life(tmp_path, 4, oversample) as life:
        assert life.wait(PATIENCE_S) == 0
    check_store(tmp_path)


def test_twenty_kills_in_one_run_lose_nothing(tmp_path: Path) -> None:
    seed = random.Random(20)
    kills = 0
    while kills < 20:
        with start_life(tmp_path, 100_000, 5) as life:
            # By progress and not by time alone, so that a slow machine is killed at the same places.
            goal = len(acknowledged(tmp_path)) + seed.randrange(1, 12)
            while len(acknowledged(tmp_path)) < goal:
                assert life.poll() is None
                time.sleep(0.002)
            time.sleep(seed.random() * 0.01)
            life.kill()
        kills += 1
        if kills % 5 == 0:
            check_store(tmp_path)
    versions = [int(line.split()[1]) for line in acknowledged(tmp_path) if line.startswith("trained")]
    assert versions == sorted(set(versions))
    assert len(versions) > 5


def test_kills_of_a_run_that_deletes_old_trajectories_cost_no_kept_one_and_leave_no_file(tmp_path: Path) -> None:
    seed = random.Random(21)
    for _ in range(10):
        with start_life(tmp_path, 100_000, 5, 2) as life:
            goal = len(acknowledged(tmp_path)) + seed.randrange(8, 30)
            while len(acknowledged(tmp_path)) < goal:
                assert life.poll() is None
                time.sleep(0.002)
            time.sleep(seed.random() * 0.01)
            life.kill()
    trained = [int(line.split()[1]) for line in acknowledged(tmp_path) if line.startswith("trained")]
    assert trained == sorted(set(trained))
    with new_store(tmp_path / "run", resume=True) as store:
        store.recover()
        store.prune(2)
        assert store.check_invariants() == [], "all that is kept reads back"
        version = store.current_version()
        assert version > 5
        assert store.totals().trained_trajectories == 4 * version, "sums do not forget"
        assert store.batch_for(version - 1) is not None
        with pytest.raises(StorePruned, match="keep_trajectories_of_steps"):
            store.batch_for(version - 4)
    # Two or three batches and what waits: 20 trajectories of about 2 KB, in files of 4 KB, some of them shared.
    assert len(list((tmp_path / "run" / "blobs").glob("*.seg"))) <= 30


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from venusrl.testing.runs import new_store\n"
        "store = new_store(Path(sys.argv[1])); print('held', flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        second = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert second.returncode != 0
        assert f"process {holder.pid} on " in second.stderr
        holder.kill()
    with new_store(tmp_path, resume=True) as store:
        assert store.identity().resumes == 1


# --- a full disk ------------------------------------------------------------------------------------------
FULL = """
import resource, sys
from pathlib import Path
from venusrl.coordinator.errors import StoreFull
from venusrl.coordinator.store import TrainedReport
from venusrl.testing.runs import complete_group, new_store

folder, mode = Path(sys.argv[1]), sys.argv[2]
ballast = folder / "ballast"
ballast.write_bytes(bytes(200_000))
store = new_store(folder / "run")
if mode == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))

done = 0
try:
    while done < 20_000:
        complete_group(store)
        done += 1
except StoreFull as error:
    print(error)
for attempt in range(3):  # it stays a clear error, and harms nothing, however often it is tried
    try:
        complete_group(store)
        done += 1
    except StoreFull:
        pass

ballast.unlink()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.close()
store = new_store(folder / "run", resume=True)
groups = [group.id for group in store.recover().groups if group.state == "complete"]
assert len(groups) == done, (len(groups), done)
store.form_batch(0, groups[:2])
store.mark_trained(TrainedReport("b000000", 1, "/m", True))
complete_group(store)
assert store.check_invariants() == [], store.check_invariants()
print("whole", done)
"""


@pytest.mark.parametrize("mode", ["limit", "disk"])
def test_a_full_disk_is_one_clear_error_and_nothing_is_lost(tmp_path: Path, mode: str) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path), mode]
    if mode == "disk":
        mount = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m none "$0" && "$@"']
        try:
            subprocess.run([*mount, str(tmp_path), "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs a user namespace to mount a small disk: {error}")
        command = [*mount, str(tmp_path), *command]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    message, last = result.stdout.splitlines()
    assert "free some space, then resume; nothing finished is lost" in message
    assert last.startswith("whole ")
    assert int(last.split()[1]) > 3
