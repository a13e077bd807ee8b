"""Templates for real: overlayfs shows what we say, a build runs in sandboxes, registries' tools understand us."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.integration.persistent import run
from tests.unit.templates import Member, archive, directory, entry, layout, symlink
from tests.waiting import PATIENCE_S

from venusrl.sandboxes.protocol import Limits, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Spec
from venusrl.sandboxes.runtimes.namespace import kernel
from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime
from venusrl.sandboxes.templates import tree
from venusrl.sandboxes.templates.build import BuildRules, Step
from venusrl.sandboxes.templates.requests import BuildRequest, Rules, Sizes
from venusrl.sandboxes.templates.service import Templates

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="owners and overlays need root: run as root"),
    pytest.mark.skipif(shutil.which("busybox") is None, reason="no root to start from: apt-get install busybox-static"),
]
TOOLS = ("sh", "cat", "id", "rm", "ls", "mkdir", "mv", "test", "sleep", "ln", "chmod", "pwd", "stat", "touch")


def busybox() -> bytes:
    """A root in an archive."""
    program = Path(str(shutil.which("busybox"))).read_bytes()
    return archive(
        entry("bin/busybox", program, mode=0o755),
        *(symlink(f"bin/{tool}", "busybox") for tool in TOOLS),
        entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"),
        entry("etc/group", b"root:x:0:\nuser:x:1000:\n"),
        entry("etc/old", b"old"),
        directory("root", mode=0o700),
        directory("home/user", uid=1000, gid=1000),
        entry("data/a", b"a"),
        entry("data/b", b"b", uid=1000, gid=1000),
        directory("tmp", mode=0o1777),
    )


def gone(name: str) -> Member:
    return entry(name, b"")


@pytest.fixture
async def templates(tmp_path: Path) -> AsyncIterator[Templates]:
    runtime = NamespaceRuntime(tmp_path / "n")
    await runtime.start()
    made = Templates(tmp_path / "t", runtime, Rules(build=BuildRules(ready_timeout_s=PATIENCE_S)))
    await made.start()
    yield made
    await made.close()
    assert await runtime.sweep(set()) == []
    await runtime.close()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "mounted"
    target.mkdir()
    yield target
    subprocess.run(["umount", str(target)], check=True)


async def test_overlayfs_shows_what_the_merged_view_says(templates: Templates, tmp_path: Path, mounted: Path) -> None:
    layers = [
        busybox(),
        archive(
            entry("etc/.wh.old", b""), entry("data/.wh..wh..opq", b""), entry("data/c", b"c"), entry("bin/.wh.mv", b"")
        ),
        archive(
            entry("data/d", b"d", mode=0o4755), entry(".wh.root", b""), directory("root"), entry("etc/old/new", b"n")
        ),
    ]
    await templates.from_oci("", "stack", layout(tmp_path / "i", layers))
    image = await templates.resolve("stack")
    lower = ":".join(reversed(image.layers))
    kernel.mount("overlay", str(mounted), "overlay", kernel.MS_RDONLY, f"lowerdir={lower}")
    real = {path: node for path, node in tree.walk(mounted) if path}
    ours = {path: found.node for path, found in tree.Merged([Path(p) for p in image.layers]).walk() if path}
    bare = {path: (n.kind, n.mode, n.uid, n.gid, n.size, n.mtime_ns, n.target) for path, n in real.items()}
    assert bare == {path: (n.kind, n.mode, n.uid, n.gid, n.size, n.mtime_ns, n.target) for path, n in ours.items()}
    assert {path for path in real if path.startswith("data/")} == {"data/c", "data/d"}
    assert "etc/old/new" in real
    assert templates.store.damaged() == []


async def build(templates: Templates, request: BuildRequest, name: str = "made") -> tuple[str, str]:
    waiting = templates.create("", name, sizes=Sizes(memory_mib=128, disk_mib=64))
    await templates.build("", waiting.template, waiting.id, request)
    done = await templates.wait(waiting.id)
    log = "\n".join(each.message for each in templates.records.logs(done.id, 0, 1000))
    return done.state, log if done.reason is None else f"{done.reason.step}: {done.reason.message}"


async def test_a_build_runs_its_steps_in_sandboxes(templates: Templates, tmp_path: Path) -> None:
    await templates.from_oci("", "root", layout(tmp_path / "i", [busybox()]))
    steps = (
        Step("USER", ("root",)),
        Step("RUN", ("echo told; id -u; rm /etc/old; rm -r /data; mkdir /data; echo e >/data/e; chmod 4755 /data/e",)),
        Step("USER", ("user",)),
        Step("WORKDIR", ("/home/user/app",)),
        Step("RUN", ("id -u >who; pwd >where; test ! -e /etc/old; ln -s who link",)),
    )
    state, log = await build(
        templates, BuildRequest(from_template="root", steps=steps, start_cmd="touch /tmp/on; sleep 100")
    )
    assert state == "ready", log
    assert "told\n0\n" in log
    image = await templates.resolve("made")
    view = tree.Merged([Path(path) for path in image.layers])
    assert view.find("etc/old") is None
    assert view.find("data/a") is None
    kept, own = view.find("data/e"), view.find("home/user/app/who")
    assert kept is not None
    assert own is not None
    assert (kept.node.mode, kept.node.uid) == (0o4755, 0)
    assert (own.node.uid, own.node.gid) == (1000, 1000)
    runtime = templates._runtime
    assert runtime is not None
    box = await runtime.create(Spec(id="box", image=image, limits=Limits(memory_mib=128, disk_mib=16)))
    try:
        assert await run(box.agent, "cat /home/user/app/link /home/user/app/where /data/*; ls /etc/old") == (
            1,
            "1000\n/home/user/app\ne\nls: /etc/old: No such file or directory\n",
        )
        assert (await run(box.agent, "rm -rf /data /bin/cat", "root"))[0] == 0
    finally:
        await box.kill()
    assert templates.store.damaged() == []


FAILURES = {
    "step": (
        BuildRequest(from_template="root", steps=(Step("RUN", ("exit 3",)),)),
        "1: the command ended with exit code 3",
    ),
    "start": (BuildRequest(from_template="root", start_cmd="exit 4", ready_cmd="false"), "finalize: the start command"),
    "host": (BuildRequest(from_template="root", steps=(Step("RUN", ("cat /etc/shadow",)),)), "1: the command ended"),
    "reference": (BuildRequest(from_image="docker-archive:/etc/passwd"), "not the name of an image"),
}


@pytest.mark.parametrize("kind", FAILURES)
async def test_a_build_that_fails_says_where(templates: Templates, tmp_path: Path, kind: str) -> None:
    request, says = FAILURES[kind]
    await templates.from_oci("", "root", layout(tmp_path / "i", [busybox()]))
    state, why = await build(templates, request)
    assert state == "error"
    assert says in why
    with pytest.raises(TemplateNotFound):
        await templates.resolve("made")


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed: apt-get install skopeo")
async def test_what_other_tools_write_is_read(templates: Templates, tmp_path: Path) -> None:
    """A layout of ours becomes docker's archive, and a layout of gzip layers, by skopeo's hand."""
    source = layout(tmp_path / "i", [busybox(), archive(entry("etc/.wh.old", b""))])
    (source / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    for number, target in enumerate((f"docker-archive:{tmp_path}/saved.tar:x:1", f"oci-archive:{tmp_path}/oci.tar:x")):
        command = ["skopeo", "--insecure-policy", "copy", "--quiet", f"oci:{source}", target]
        process = await asyncio.create_subprocess_exec(*command)
        assert await process.wait() == 0
        await templates.from_oci("", f"t{number}", Path(target.split(":")[1]))
    first, second = await templates.resolve("t0"), await templates.resolve("t1")
    assert first.layers == second.layers
    assert tree.Merged([Path(path) for path in first.layers]).find("etc/old") is None
