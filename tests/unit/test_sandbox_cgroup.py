"""Where control groups are made and what is written there, both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from venusrl.sandboxes.protocol import Limits, SandboxError
from venusrl.sandboxes.runtimes.namespace import cgroup

HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate
22 27 0:21 / /proc rw - proc proc rw
"""
LIMITS = Limits(memory_mib=64, pids=10, cpus=0.5)


def test_mounts_of_both_versions_are_read() -> None:
    memory, cpu, unified = cgroup.parse_mounts(HYBRID)
    assert (memory.version, memory.path, memory.controllers) == (
        1,
        Path("/sys/fs/cgroup/memory"),
        frozenset({"rw", "memory"}),
    )
    assert "cpu" in cpu.controllers
    assert (unified.version, unified.path) == (2, Path("/sys/fs/cgroup/unified"))


def test_own_paths_by_controller() -> None:
    assert cgroup.own_paths("4:memory:/a/b\n2:cpu,cpuacct:/\n0::/user.slice/x\n") == {
        "memory": "/a/b",
        "cpu": "/",
        "cpuacct": "/",
        "": "/user.slice/x",
    }


def test_our_own_group_is_tried_first_then_the_top() -> None:
    mount = cgroup.CgroupMount(1, Path("/cg/memory"), "/", frozenset({"memory"}))
    assert cgroup.candidates(mount, "/a/b") == [Path("/cg/memory/a/b"), Path("/cg/memory")]
    assert cgroup.candidates(mount, "/") == [Path("/cg/memory")]


def test_version_2_also_tries_beside_us_where_processes_forbid_children() -> None:
    mount = cgroup.CgroupMount(2, Path("/cg"), "/", frozenset())
    assert cgroup.candidates(mount, "/user/app/run.scope") == [
        Path("/cg/user/app/run.scope"),
        Path("/cg/user/app"),
        Path("/cg"),
    ]
    assert cgroup.candidates(mount, "/") == [Path("/cg")]


def test_a_container_that_sees_only_its_own_part() -> None:
    mount = cgroup.CgroupMount(1, Path("/cg/memory"), "/docker/abc", frozenset({"memory"}))
    assert cgroup.candidates(mount, "/docker/abc/x") == [Path("/cg/memory/x"), Path("/cg/memory")]
    assert cgroup.candidates(mount, "/docker/other") == [Path("/cg/memory")]


def test_version_1_limits(tmp_path: Path) -> None:
    node = cgroup.NodeGroups(1, {name: tmp_path / name for name in ("memory", "pids", "cpu")})
    for directory in node.directories.values():
        directory.mkdir()
    group = cgroup.SandboxGroup(node, "one", LIMITS)
    assert (tmp_path / "memory/one/memory.limit_in_bytes").read_text() == str(64 << 20)
    assert int((tmp_path / "pids/one/pids.max").read_text()) == 12  # bubblewrap's own two come on top
    (tmp_path / "memory/one/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert group.oom_kills() == 3


def test_version_2_limits(tmp_path: Path) -> None:
    group = cgroup.SandboxGroup(cgroup.NodeGroups(2, {"": tmp_path}), "one", LIMITS)
    assert (tmp_path / "one/memory.max").read_text() == str(64 << 20)
    assert (tmp_path / "one/pids.max").read_text() == "12"
    (tmp_path / "one/memory.events").write_text("low 0\nmax 7\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert group.oom_kills() == 1


def test_only_our_own_groups_are_ever_cleared(tmp_path: Path) -> None:
    precious = tmp_path / "user.slice"
    precious.mkdir()
    with pytest.raises(SandboxError, match="refusing"):
        cgroup.remove_tree(precious)
    assert precious.is_dir()


def test_removing_what_is_gone_is_fine(tmp_path: Path) -> None:
    cgroup.remove_tree(tmp_path / "venusrl.gone")
    nested = tmp_path / "venusrl.node" / "sandbox"
    nested.mkdir(parents=True)
    cgroup.remove_tree(nested.parent)
    assert not nested.parent.exists()
