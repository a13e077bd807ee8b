"""What a sandbox was short of, as each runtime knows it, and as E2B's own SDK tells its user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration import microvms, persistent
from tests.integration.env_server import connection, served

from venusrl.sandboxes.protocol import Limits
from venusrl.sandboxes.runtimes.base import Instance, Shortages, Spec
from venusrl.sandboxes.runtimes.gvisor.runtime import GvisorRuntime
from venusrl.sandboxes.templates.api import Image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="limits need control groups: run as root")
LIMITS = Limits(memory_mib=microvms.MEMORY_MIB, disk_mib=32)
GREEDY = "tail /dev/zero"
FILL = "cat /dev/zero > ~/big"


async def fail(instance: Instance, command: str) -> None:
    code, said = await persistent.shell(instance, command)
    assert code != 0, said


async def filled_and_emptied(instance: Instance) -> None:
    await fail(instance, FILL)
    assert (await instance.shortages()).disk_full
    await persistent.output(instance, "rm ~/big")
    assert not (await instance.shortages()).disk_full


async def test_a_namespace_is_short(tmp_path: Path) -> None:
    async with persistent.running(tmp_path / "n") as runtime:
        instance = await runtime.create(Spec("s", persistent.HOST, LIMITS))
        assert await instance.shortages() == Shortages()
        await fail(instance, GREEDY)
        assert (await instance.shortages()).memory_kills > 0
        await filled_and_emptied(instance)
        await fail(instance, "mkdir -p /tmp/many && cd /tmp/many && i=0; while : > $i; do i=$((i+1)); done")
        assert (await instance.shortages()).disk_full, "no further file fits"
        assert await persistent.output(instance, "echo it goes on") == "it goes on"


@pytest.fixture
def tiny(tmp_path: Path) -> Image:
    return microvms.image(microvms.tiny_root(tmp_path / "root"))


@pytest.mark.skipif(shutil.which("runsc") is None, reason="runsc is not installed: apt-get install runsc")
async def test_a_gvisor_sandbox_is_short_of_disk(tmp_path: Path, tiny: Image) -> None:
    runtime = GvisorRuntime(tmp_path / "g")
    await runtime.start()
    instance = await runtime.create(Spec("s", tiny, LIMITS))
    try:
        assert await instance.shortages() == Shortages()
        await filled_and_emptied(instance)
    finally:
        await instance.kill()
        await runtime.close()


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    """A microVM runtime's state, with a kernel; skips, saying what is missing."""
    return microvms.new_state(tmp_path / "m", microvms.guest_kernel())


async def test_a_virtual_machine_is_short(tiny: Image, machines: Path) -> None:
    runtime = await microvms.runtime(machines)
    instance = await runtime.create(microvms.spec("s", tiny))
    try:
        before = await instance.shortages()
        assert not before.disk_full
        await fail(instance, GREEDY)
        assert (await instance.shortages()).memory_kills > before.memory_kills
        await filled_and_emptied(instance)
    finally:
        await instance.kill()
        await runtime.close()


def failed(command: Callable[[], object]) -> tuple[int, str]:
    """What E2B's SDK says of a command that fails."""
    e2b = pytest.importorskip("e2b", reason="E2B's SDK is not installed: pip install e2b")
    with pytest.raises(e2b.CommandExitException) as raised:
        command()
    return raised.value.exit_code, raised.value.error or ""


def test_the_sdk_tells_its_user(tmp_path: Path) -> None:
    e2b = pytest.importorskip("e2b", reason="E2B's SDK is not installed: pip install e2b")
    with served(tmp_path / "state") as server:
        box = e2b.Sandbox.create("host", **connection(server))
        assert failed(lambda: box.commands.run(GREEDY))[1].endswith("(out of memory)")
        assert failed(lambda: box.commands.run("exit 7")) == (7, "exit status 7")
        assert failed(lambda: box.commands.run(FILL))[1].endswith("(no space left on the sandbox's disk)")
        assert box.commands.run("rm ~/big && echo it goes on").stdout == "it goes on\n"
