"""The plan of a sandbox's making: what it says, what a failed step means."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from venusrl.sandboxes.protocol import DiskFull, HostDiskFull, Limits, SandboxError, TemplateNotFound
from venusrl.sandboxes.runtimes.namespace import groups, making, steps, wire
from venusrl.sandboxes.runtimes.namespace.cgroup import NodeGroups
from venusrl.sandboxes.runtimes.namespace.orders import Make

LIMITS = Limits(memory_mib=100, pids=30, disk_mib=50, cpus=0.5)


def order(layers: tuple[str, ...] = (), archive: str | None = None) -> Make:
    return Make(1, "name", layers, LIMITS, 70000, 65536, "user", archive)


def tools() -> making.Tools:
    return making.Tools(groups=None, sockets=7, idmapped=True, root=b"", last=b"")


def failed(step: int, error: int, subject: str = "x") -> bytes:
    return struct.pack("=II", step, error) + subject.encode()


def test_a_step_is_its_number_its_numbers_and_its_strings() -> None:
    head = struct.pack("=BBBQQQ", 1, 0, 1, 0o700, 5, 0)
    assert steps.folder("ab", 0o700, 5) == head + struct.pack("=I", 2) + b"ab\0"


def test_a_groups_steps_make_limit_and_join_it(tmp_path: Path) -> None:
    node = NodeGroups(1, {name: tmp_path / name for name in ("memory", "pids", "cpu", "freezer")})
    told = b"".join(groups.steps_into(node, "s", LIMITS))
    assert told.index(b"memory.limit_in_bytes") < told.index(b"tasks")
    assert str(100 << 20).encode() in told
    assert b"50000" in told
    assert told.count(b"/s/tasks") == 4
    assert b"memsw" not in told


def test_a_layer_that_cannot_be_shown_is_the_templates_fault(tmp_path: Path) -> None:
    layer = tmp_path / "a{b}"
    layer.mkdir()
    made = making.plan(order((str(layer),)), tools(), 9, making.Furniture(), None)
    errors = [making.error(made, failed(step, errno.EINVAL)) for step in range(12)]
    (blamed,) = [each for each in errors if isinstance(each, TemplateNotFound) and "id-mapped" in str(each)]
    assert str(layer) in str(blamed)
    assert "Invalid argument: x" in str(blamed)


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, HostDiskFull), (errno.EPERM, SandboxError)])
def test_any_other_failure_names_its_subject(number: int, kind: type[SandboxError]) -> None:
    made = making.plan(order(), tools(), None, making.Furniture(), None)
    error = making.error(made, failed(0, number, "root/dev"))
    assert type(error) is kind
    assert "root/dev" in str(error)
    assert os.strerror(number) in str(error)


def test_what_filled_the_disk_is_heard_before_the_maker() -> None:
    made = making.plan(order(archive="/kept"), tools(), 9, making.Furniture(), 11)
    body = wire.encode(wire.failure(0, DiskFull("too small")))[wire.HEADER_BYTES :]
    error = making.error(made, steps.told(body) + failed(3, errno.ECANCELED))
    assert type(error) is DiskFull
    assert str(error) == "too small"


def test_an_images_furniture_is_what_it_lacks(tmp_path: Path) -> None:
    def lacks() -> making.Furniture:
        root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
        try:
            return making.furniture(root, "user")
        finally:
            os.close(root)

    bare = lacks()
    assert bare.etc
    assert bare.home == "home/user"
    assert dict(bare.files)["etc/passwd"].startswith(b"root:x:0:0:")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nother:x:1:1::/:/bin/sh")
    (tmp_path / "etc/group").write_text("user:x:7:\n")
    some = lacks()
    assert not some.etc
    assert not some.home
    (only,) = some.files
    assert only[1].endswith(b"other:x:1:1::/:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n")
    (tmp_path / "etc/passwd").write_bytes(only[1])
    assert lacks() == making.Furniture()
