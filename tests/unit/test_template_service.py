"""Names, tags, builds, uploads and Dockerfiles; steps that need no sandbox are really done."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.unit.templates import archive, directory, entry, layout, symlink, without_flushing  # noqa: F401
from tests.waiting import until

from venusrl.sandboxes.protocol import HostDiskFull, SandboxDenied, SandboxError, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Instance, Spec
from venusrl.sandboxes.templates import dockerfile, tree
from venusrl.sandboxes.templates.api import Image
from venusrl.sandboxes.templates.build import BuildRules, Step
from venusrl.sandboxes.templates.capture import capture_of
from venusrl.sandboxes.templates.errors import BadTemplate, TemplateBusy, TemplateTaken
from venusrl.sandboxes.templates.records import Build
from venusrl.sandboxes.templates.requests import BuildRequest, Rules, Sizes
from venusrl.sandboxes.templates.service import Templates
from venusrl.testing.agents import MemoryAgent
from venusrl.testing.runtimes import FakeRuntime

PASSWD = b"root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
ROOT = archive(
    directory("bin"),
    entry("bin/sh", b"#!"),
    entry("etc/passwd", PASSWD),
    entry("etc/group", b"root:x:0:\nuser:x:1000:\n"),
    directory("home/user", uid=1000, gid=1000),
    directory("tmp", mode=0o1777),
    directory("opt", mode=0o750, uid=0, gid=1000),
    symlink("srv", "opt"),
)
HASH = "a" * 64


def fake_runtime() -> FakeRuntime:
    def agent(_: Spec) -> MemoryAgent:
        made = MemoryAgent()
        for path in ("/opt", "/srv/app"):
            made.nodes[path] = msgspec.structs.replace(made.nodes["/"])
        return made

    return FakeRuntime(agent)


async def make(tmp_path: Path, runtime: FakeRuntime | None = None, rules: Rules | None = None) -> Templates:
    templates = Templates(tmp_path / "t", runtime, rules)
    await templates.start()
    return templates


async def imported(templates: Templates, tmp_path: Path, tenant: str = "", name: str = "root") -> Build:
    folder = tmp_path / f"image-{tenant}-{name}"
    return await templates.from_oci(tenant, name, layout(folder, [ROOT], Env=["A=1"], WorkingDir="/opt"))


async def upload(templates: Templates, content: bytes, tenant: str = "") -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield content[:100]
        yield content[100:]

    await templates.put_upload(tenant, HASH, pieces())


async def built(templates: Templates, *steps: Step, name: str = "made", start: str = "", force: bool = False) -> Build:
    waiting = templates.create("", name)
    request = BuildRequest(from_template="root", steps=steps, start_cmd=start, force=force)
    await templates.build("", waiting.template, waiting.id, request)
    return await templates.wait(waiting.id)


def merged(image: Image) -> tree.Merged:
    return tree.Merged([Path(path) for path in image.layers])


pytestmark = pytest.mark.usefixtures("without_flushing")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sandboxes in memory; what a RUN changed is a file named after the sandbox's image."""
    captured: list[str] = []

    async def capture(instance: Instance, folder: Path) -> None:
        captured.append(instance.spec.image.id)
        folder.mkdir()  # noqa: ASYNC240 - a test's
        (folder / "ran").write_text(instance.spec.image.id)
        os.utime(folder / "ran", ns=(0, 0))

    monkeypatch.setattr("venusrl.sandboxes.templates.service.capture_of", lambda runtime: capture)
    return captured


async def test_an_import_is_a_template_that_resolves(tmp_path: Path) -> None:
    templates = await make(tmp_path)
    build = await imported(templates, tmp_path)
    image = await templates.resolve("root")
    assert image == await templates.resolve("root:default") == await templates.resolve(build.template)
    assert (image.env, image.workdir, image.user, image.name) == ({"A": "1"}, "/opt", "user", "root")
    assert build.state == "ready"
    assert {"host", "root", build.template} <= set(templates.names())
    assert (await templates.resolve("host")).layers == ()
    for name in ("none", "root:none", "img-none", "../x"):
        with pytest.raises(TemplateNotFound):
            await templates.resolve(name)


async def test_an_image_without_the_user_gets_one(tmp_path: Path) -> None:
    templates = await make(tmp_path)
    bare = archive(entry("bin/sh", b""), entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\nx:x:1000:1000::/:/bin/sh"))
    await templates.from_oci("", "bare", layout(tmp_path / "i", [bare]))
    view = merged(await templates.resolve("bare"))
    assert b"\nuser:x:1001:1001::/home/user:/bin/sh\n" in (view.read("etc/passwd") or b"")
    found = view.find("home/user")
    assert found is not None
    assert found.node.kind == "directory"
    assert view.find("tmp") is not None


async def test_a_working_directory_that_an_image_only_names_is_made(tmp_path: Path) -> None:
    templates = await make(tmp_path)
    await templates.from_oci("", "named", layout(tmp_path / "i", [ROOT], WorkingDir="/srv/new"))
    found = merged(await templates.resolve("named")).find("opt/new")  # through the image's own link
    assert found is not None
    assert found.node.kind == "directory"
    with pytest.raises(BadTemplate, match="is a file"):
        await templates.from_oci("", "wrong", layout(tmp_path / "j", [ROOT], WorkingDir="/bin/sh/x"))


async def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    templates = await make(tmp_path)
    own = await imported(templates, tmp_path, "a", "mine")
    await imported(templates, tmp_path, "", "all")
    image = await templates.resolve("mine", "a")
    assert (await templates.resolve("all", "b")).name == "all"
    for wanted in ("mine", own.template, image.id):
        with pytest.raises(TemplateNotFound):
            await templates.resolve(wanted, "b")
    with pytest.raises(TemplateNotFound):
        templates.status("b", own.template, own.id)
    with pytest.raises(TemplateNotFound, match="not yours"):
        await templates.remove("b", "all")
    templates.set_public("a", "mine", public=True)
    assert (await templates.resolve(own.template, "b")).name == "mine"
    assert {t.names[0] for t in templates.visible("b")} == {"mine", "all"}


async def test_steps_make_layers_and_are_not_done_twice(tmp_path: Path, fakes: list[str]) -> None:
    runtime = fake_runtime()
    templates = await make(tmp_path, runtime)
    await imported(templates, tmp_path)
    await upload(
        templates,
        archive(directory("src"), entry("src/f", b"x", mode=0o600), entry("src/l/g", b"y"), symlink("src/s", "f")),
    )
    steps = (
        Step("ENV", ("B", "2", "C", "3")),
        Step("WORKDIR", ("/srv/app",)),
        Step("COPY", ("src", "."), HASH),
        Step("RUN", ("echo hello; true",)),
        Step("USER", ("root",)),
    )
    build = await built(templates, *steps)
    assert build.reason is None
    image = await templates.resolve("made")
    assert (image.env, image.workdir, image.user) == ({"A": "1", "B": "2", "C": "3"}, "/srv/app", "root")
    view = merged(image)
    assert view.read("opt/app/f") == b"x"
    assert view.read("opt/app/l/g") == b"y"
    assert view.resolve("opt/app/s") == "opt/app/f"
    kept = view.find("opt")
    assert kept is not None
    assert kept.node.mode == 0o750  # a directory below keeps its mode
    assert len(fakes) == 1
    again = await built(templates, *steps, name="again")
    assert again.image == build.image
    assert len(fakes) == 1
    await built(templates, *steps[:3], Step("RUN", ("echo hello; true",), force=True), name="forced")
    assert len(fakes) == 2
    assert templates.status("", build.template, build.id, offset=2, limit=1)[1][0].step == "2"
    assert runtime.alive == []


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (Step("RUN", ("false",)), "exit code 1"),
        (Step("RUN", ("no-such-program",)), "not found"),
        (Step("RUN", ()), "needs a command"),
        (Step("COPY", ("f", "/x"), HASH), "not uploaded"),
        (Step("COPY", ("f", "/x"), "../../etc/passwd"), "64 hex"),
        (Step("COPY", ("../f", "/x"), HASH), "leads out"),
        (Step("USER", ("nobody",)), "no user"),
        (Step("ENV", ("A",)), "in turn"),
        (Step("ADD", ("a", "b")), "not known"),
        (Step("WORKDIR", ("/etc/passwd/x",)), "file"),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_a_failed_step_is_named(tmp_path: Path, fakes: list[str], step: Step, says: str) -> None:
    runtime = fake_runtime()
    templates = await make(tmp_path, runtime)
    await imported(templates, tmp_path)
    build = await built(templates, Step("ENV", ("A", "1")), step)
    assert build.state == "error"
    assert build.reason is not None
    assert build.reason.step == "2"
    assert says in build.reason.message
    assert runtime.alive == []
    with pytest.raises(TemplateNotFound, match="no build of it is ready"):
        await templates.resolve("made")


async def test_a_build_that_hangs_can_be_cancelled_and_timed_out(tmp_path: Path, fakes: list[str]) -> None:
    runtime = fake_runtime()
    templates = await make(tmp_path, runtime, Rules(at_once=1, waiting=1, build=BuildRules(step_timeout_s=0.05)))
    await imported(templates, tmp_path)
    timed = await built(templates, Step("RUN", ("sleep 100",)))
    assert timed.reason is not None
    assert "more than" in timed.reason.message
    templates = await make(tmp_path, runtime, Rules(at_once=1, waiting=1))
    request = BuildRequest(from_template="root", steps=(Step("RUN", ("sleep 100",)),))
    waiting = [templates.create("", "slow") for _ in range(3)]
    for each in waiting[:2]:
        await templates.build("", each.template, each.id, request)
    with pytest.raises(SandboxDenied):
        await templates.build("", waiting[2].template, waiting[2].id, request)
    with pytest.raises(TemplateBusy):
        await templates.build("", waiting[0].template, waiting[0].id, request)
    await until(lambda: bool(runtime.alive), "the first build's beginning")
    for each in waiting[:2]:
        await templates.cancel("", each.template, each.id)
    assert [templates.records.build(each.id).state for each in waiting] == ["error", "error", "waiting"]
    assert runtime.alive == []


async def test_a_build_that_a_crash_cut_short_is_an_error_later(tmp_path: Path) -> None:
    templates = await make(tmp_path)
    here, gone = templates.create("", "a"), templates.create("", "b")
    templates._begin(here)
    templates._begin(gone)
    record = templates.records.build(gone.id)
    templates.records.put_build(msgspec.structs.replace(record, maker="1:1"))
    later = await make(tmp_path)
    assert later.records.build(here.id).state == "building"
    found = later.records.build(gone.id)
    assert (found.state, found.reason is not None) == ("error", True)


async def test_tags_move_when_a_build_is_ready(tmp_path: Path) -> None:
    templates = await make(tmp_path)
    first = await imported(templates, tmp_path)
    assert templates.assign_tags("", "root", ["v1", "stable"]) == (first.id, ("v1", "stable"))
    assert (await templates.resolve("root:stable")).id == first.image
    templates.remove_tags("", "root", ["v1"])
    with pytest.raises(TemplateNotFound, match=r"default, stable"):
        await templates.resolve("root:v1")
    await templates.remove("", "root")
    with pytest.raises(TemplateNotFound):
        templates.find("", first.template)
    assert (await templates.collect()).kept_layers > 0  # lately asked for
    assert (await make(tmp_path, rules=Rules(cache_age_s=-1))).store.layers() != []


async def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    templates = await make(tmp_path)
    with pytest.raises(TemplateTaken):
        templates.create("", "host")
    for name in ("", "../x", "a b", "a:b c", "x" * 200):
        with pytest.raises(BadTemplate):
            templates.create("", name)
    with pytest.raises(BadTemplate, match="processors"):
        templates.create("", "a", sizes=Sizes(cpus=1000))
    build = templates.create("", "a")
    with pytest.raises(BadTemplate, match="exactly one"):
        await templates.build("", build.template, build.id, BuildRequest())
    small = await make(tmp_path, rules=Rules(upload_bytes=50))
    with pytest.raises(BadTemplate, match="at most"):
        await upload(small, b"x" * 200)
    assert not small.has_upload("", HASH)
    await upload(templates, b"x")
    assert templates.has_upload("", HASH)
    assert not templates.has_upload("other", HASH)


def test_a_dockerfile_is_read(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("a")
    (tmp_path / "src/b.txt").write_text("b")
    (tmp_path / ".dockerignore").write_text("**/*.txt\n")
    text = 'FROM x:1\n# no\nRUN a && \\\n  b\nENV A=1 B="2 3"\nCOPY --chown=user src /app/\nCMD ["run", "it now"]\n'
    recipe = dockerfile.read(text, tmp_path)
    assert (recipe.base, recipe.start) == ("x:1", "run 'it now'")
    assert [step.kind for step in recipe.steps] == ["USER", "WORKDIR", "RUN", "ENV", "COPY", "USER", "WORKDIR"]
    assert recipe.steps[3].args == ("A", "1", "B", "2 3")
    assert recipe.steps[4].args == ("src", "/app/", "user", "")
    assert list(recipe.uploads) == [recipe.steps[4].files_hash]
    assert dockerfile.read(text, tmp_path).uploads == recipe.uploads
    shutil.rmtree(tmp_path / "src")
    with pytest.raises(BadTemplate, match=r"line 6.*src"):
        dockerfile.read(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "RUN a",
        "FROM a\nADD b c",
        "FROM a\nFROM b",
        "FROM a\nCOPY --from=b c d",
        "FROM a\nCOPY ../x /y",
        "FROM a\nARG b",
        "",
    ],
)
def test_what_a_dockerfile_may_not_say(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadTemplate):
        dockerfile.read(text, tmp_path)


async def test_no_runtime_no_build(tmp_path: Path) -> None:
    templates = await make(tmp_path)
    build = await built(templates) if (await imported(templates, tmp_path)) else None
    assert build is not None
    assert build.reason is not None
    assert "no runtime" in build.reason.message
    with pytest.raises(SandboxError, match="namespace runtime"):
        capture_of(fake_runtime())


async def test_an_image_that_was_imported_by_its_name_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: list[str]
) -> None:
    """What the operator imported, not what another tenant calls so; and no other tag of it."""
    templates = await make(tmp_path, fake_runtime())
    await imported(templates, tmp_path, name="ubuntu:22.04")
    await imported(templates, tmp_path, tenant="other", name="debian:12")

    def pull(_store: object, reference: str, *_: object, **__: object) -> None:
        raise BadTemplate(f"{reference} would be fetched")

    monkeypatch.setattr("venusrl.sandboxes.templates.oci.pull", pull)
    for image, fetched in (
        ("ubuntu:22.04", ""),
        ("docker.io/library/ubuntu:22.04", ""),
        ("ubuntu:24.04", "ubuntu:24.04"),
        ("ubuntu", "ubuntu"),
        ("registry.test/ubuntu:22.04", "registry.test/ubuntu:22.04"),
        ("debian:12", "debian:12"),
    ):
        waiting = templates.create("t", "made")
        await templates.build("t", waiting.template, waiting.id, BuildRequest(from_image=image))
        done = await templates.wait(waiting.id)
        assert (done.reason.message if done.reason else "") == (f"{fetched} would be fetched" if fetched else ""), image
    await templates.close()


async def test_a_full_disk_is_told_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = await make(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    monkeypatch.setattr("venusrl.sandboxes.templates.directory.copy_base", full)
    with pytest.raises(HostDiskFull, match="env template gc"):
        await templates.from_directory("", "x", None)
    assert [build.state for build in templates.records.builds()] == ["error"]


async def test_a_directory_with_a_dockerfile_is_not_taken_for_a_root(tmp_path: Path) -> None:
    templates = await make(tmp_path)
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text("FROM base")
    with pytest.raises(BadTemplate, match="--dockerfile"):
        await templates.from_directory("", "x", tmp_path / "context")
    await templates.close()


async def test_a_tenants_image_is_fetched_outward_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: list[str]
) -> None:
    templates = await make(tmp_path, fake_runtime())
    asked: list[bool] = []

    def pull(*_: object, outward_only: bool) -> None:
        asked.append(outward_only)
        raise BadTemplate("it was asked for")

    monkeypatch.setattr("venusrl.sandboxes.templates.oci.pull", pull)
    for tenant in ("t", ""):
        waiting = templates.create(tenant, "made")
        await templates.build(tenant, waiting.template, waiting.id, BuildRequest(from_image="registry.test/x:1"))
        await templates.wait(waiting.id)
    assert asked == [True, False], "the operator may fetch from the machine's own"
    await templates.close()
