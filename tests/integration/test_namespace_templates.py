"""Root file systems as templates, and directories mounted for one command."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.namespaces import LIMITS, output, serving

from venusrl.sandboxes.node import EmbeddedNode
from venusrl.sandboxes.probe import tiny_root
from venusrl.sandboxes.protocol import BadPath, Mount, SandboxError, TemplateNotFound


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[EmbeddedNode]:
    async with serving(tmp_path / "node") as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> str:
    made = tmp_path / "rootfs"
    tiny_root(made, ("sh", "ls", "cat", "rm", "ln", "mkdir", "readlink", "id"))
    (made / "etc").mkdir()
    (made / "etc/motd").write_text("from the template")
    (made / "etc/private").write_text("only its owner's")
    (made / "etc/private").chmod(0o600)
    return str(made)


@pytest.fixture
def tests(tmp_path: Path) -> Mount:
    """A directory that only its owner can reach, with a test in it."""
    hidden = tmp_path / "hidden"
    (hidden / "deep").mkdir(parents=True)
    (hidden / "test.sh").write_text("echo tested")
    (hidden / "test.sh").chmod(0o700)
    (hidden / "deep/data").write_text("data")
    (hidden / "deep/data").chmod(0o600)
    (hidden / "link").symlink_to("deep/data")
    hidden.chmod(0o700)
    return Mount(str(hidden), "/tests")


async def test_a_root_file_system_is_seen_whole_and_writable(node: EmbeddedNode, root: str) -> None:
    sandbox = await node.create(root, LIMITS, {})
    assert (
        await output(node, sandbox, "cat /etc/motd; cat /etc/private; pwd") == "from the templateonly its owner's/work"
    )
    changed = await node.run(sandbox, "echo new > /etc/motd; rm /etc/private; echo x > /bin/x; cat /etc/motd")
    assert (changed.exit_code, changed.output) == (0, "new\n")
    assert await output(node, sandbox, "cat /etc/motd; ls /etc") == "new\nmotd"
    assert await node.read(sandbox, "/etc/motd") == b"new\n"
    assert (Path(root) / "etc/motd").read_text() == "from the template"


async def test_sandboxes_of_one_root_do_not_see_each_others_changes(node: EmbeddedNode, root: str) -> None:
    first, second = await node.create(root, LIMITS, {}), await node.create(root, LIMITS, {})
    await node.run(first, "echo mine > /etc/motd")
    assert await output(node, second, "cat /etc/motd") == "from the template"
    await node.kill(first)
    assert await output(node, second, "cat /etc/motd") == "from the template"


async def test_the_place_of_the_template_does_not_show(node: EmbeddedNode, root: str) -> None:
    sandbox = await node.create(root, LIMITS, {})
    seen = await output(node, sandbox, "cat /proc/self/mountinfo; readlink /proc/self/exe; readlink /proc/1/exe")
    assert root not in seen
    assert str(Path(root).parent) not in seen


async def test_files_go_in_and_out_of_a_whole_root(node: EmbeddedNode, root: str) -> None:
    sandbox = await node.create(root, LIMITS, {})
    await node.write(sandbox, {"a/b": b"1", "/etc/deep/c": b"2"})
    assert await output(node, sandbox, "cat a/b /etc/deep/c; echo 3 >> a/b") == "12"
    assert await node.read(sandbox, "a/b") == b"13\n"
    await node.run(sandbox, "ln -s /etc/motd link; ln -s ../../../../../../../../etc/hostname up")
    assert await node.read(sandbox, "link") == b"from the template"
    with pytest.raises(FileNotFoundError):
        await node.read(sandbox, "up")


async def test_a_root_whose_needed_places_were_replaced_still_runs(node: EmbeddedNode, root: str) -> None:
    sandbox = await node.create(root, LIMITS, {})
    await node.run(sandbox, "cd /; rm -r /work /logs; ln -s /etc /work; ln -s / /logs", cwd="/")
    assert await output(node, sandbox, "pwd; ls; cat /proc/self/comm") == "/work\ncat"


async def test_hidden_tests_are_mounted_readable_and_read_only(node: EmbeddedNode, root: str, tests: Mount) -> None:
    for template in ("host", root):
        sandbox = await node.create(template, LIMITS, {})
        assert (await node.run(sandbox, "ls /tests/test.sh")).exit_code != 0
        result = await node.run(sandbox, "sh /tests/test.sh && /tests/test.sh; cat /tests/link", mounts=(tests,))
        assert result.exit_code == 0
        assert result.output.endswith("data")
        for attempt in ("echo x > /tests/test.sh", "rm /tests/test.sh", "echo x > /tests/new", "rm -rf /tests"):
            assert (await node.run(sandbox, attempt, mounts=(tests,))).exit_code != 0, attempt
        assert (await node.run(sandbox, "cat /tests/test.sh")).exit_code != 0
        await node.kill(sandbox)
    assert (Path(tests.source) / "test.sh").read_text() == "echo tested"


async def test_a_link_left_in_the_way_does_not_divert_a_mount(node: EmbeddedNode, root: str, tests: Mount) -> None:
    sandbox = await node.create(root, LIMITS, {})
    await node.run(sandbox, "mkdir /work/fake; echo 'echo forged' > /work/fake/test.sh; ln -s /work/fake /tests")
    result = await node.run(sandbox, "sh /tests/test.sh; cat /work/fake/test.sh", mounts=(tests,))
    assert result.output == "tested\necho forged\n"


async def test_the_place_of_a_mount_does_not_show(node: EmbeddedNode, tests: Mount) -> None:
    sandbox = await node.create("host", LIMITS, {})
    seen = (await node.run(sandbox, "cat /proc/self/mountinfo", mounts=(tests,))).output
    assert "/tests" in seen
    assert "hidden" not in seen


@pytest.mark.parametrize("target", ["/work/tests", "/tmp/x", "/usr/x", "/proc", "/", "tests", "/a/../proc", "/etc/x"])
async def test_mounts_have_a_place_of_their_own(node: EmbeddedNode, tests: Mount, target: str) -> None:
    sandbox = await node.create("host", LIMITS, {})
    with pytest.raises(BadPath):
        await node.run(sandbox, "true", mounts=(Mount(tests.source, target),))


async def test_what_cannot_be_mounted(node: EmbeddedNode, tmp_path: Path) -> None:
    sandbox = await node.create("host", LIMITS, {})
    with pytest.raises(BadPath, match="no such file"):
        await node.run(sandbox, "true", mounts=(Mount(str(tmp_path / "none"), "/tests"),))
    big = tmp_path / "big"
    big.write_bytes(b"")
    os.truncate(big, 100 << 20)
    with pytest.raises(BadPath, match="64 MiB"):
        await node.run(sandbox, "true", mounts=(Mount(str(big), "/big"),))
    assert await output(node, sandbox, "echo fine") == "fine"


async def test_a_template_must_be_one(node: EmbeddedNode, tmp_path: Path) -> None:
    for template in ("none", "/no/such/root", str(tmp_path)):
        with pytest.raises(TemplateNotFound):
            await node.create(template, LIMITS, {})
    assert node.stats().sandboxes == 0


async def test_a_working_directory_must_exist(node: EmbeddedNode) -> None:
    sandbox = await node.create("host", LIMITS, {})
    assert (await node.run(sandbox, "pwd", cwd="/usr")).output == "/usr\n"
    await node.write(sandbox, {"sub/x": b""})
    assert (await node.run(sandbox, "pwd", cwd="/work/sub")).output == "/work/sub\n"
    with pytest.raises(BadPath):
        await node.run(sandbox, "pwd", cwd="/work/none")


async def test_environment_of_one_command(node: EmbeddedNode) -> None:
    sandbox = await node.create("host", LIMITS, {})
    assert (await node.run(sandbox, "echo $A:$HOME", env={"A": "b c"})).output == "b c:/tmp\n"
    assert (await node.run(sandbox, "echo $A")).output == "\n"
    with pytest.raises(SandboxError, match="environment"):
        await node.run(sandbox, "true", env={"A=B": "c"})
