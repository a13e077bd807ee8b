"""Which sandboxes are made of the same files, and whom admission counts them for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.unit.templates import archive, directory, entry, layout, symlink, without_flushing  # noqa: F401
from tests.waiting import until

from venusrl.sandboxes.admission.api import Admit, Deny, HostView, Request
from venusrl.sandboxes.admission.footprint import FootprintAdmission
from venusrl.sandboxes.host.api import Order
from venusrl.sandboxes.host.local import HostConfig, LocalHost
from venusrl.sandboxes.manager.errors import ManagerError
from venusrl.sandboxes.manager.local import assemble
from venusrl.sandboxes.protocol import Limits
from venusrl.sandboxes.runtimes.base import Spec
from venusrl.sandboxes.runtimes.namespace import merging
from venusrl.sandboxes.templates import tree
from venusrl.sandboxes.templates.api import Image, Start
from venusrl.sandboxes.templates.errors import BadTemplate
from venusrl.sandboxes.templates.service import Templates
from venusrl.sandboxes.templates.sharing import Share, Sharing
from venusrl.testing.agents import MemoryAgent
from venusrl.testing.clock import VirtualClock
from venusrl.testing.hosts import AdmitAll, FixedImages, PlainDoor
from venusrl.testing.runtimes import FakeRuntime

MIB = 1 << 20
ROOT = archive(
    entry("bin/sh", b"#!", mode=0o4755),
    entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"),
    entry("etc/group", b"root:x:0:\nuser:x:1000:\n"),
    directory("home/user", uid=1000, gid=1000),
    directory("tmp", mode=0o1777),
    symlink("link", "bin/sh"),
)
TOP = archive(entry("etc/.wh.group", b""), entry("home/.wh..wh..opq", b""), entry("home/new", b"n"))
pytestmark = pytest.mark.usefixtures("without_flushing")


def there(layers: tuple[str, ...]) -> list[bool]:
    return [Path(layer).exists() for layer in layers]


def inodes(layer: str) -> set[int]:
    return {path.lstat().st_ino for path in Path(layer).rglob("*") if not path.is_dir()}


async def templates(tmp_path: Path, share: Share) -> Templates:
    made = Templates(tmp_path / "t", share=share)
    await made.start()
    await made.from_oci("", "one", layout(tmp_path / "one", [ROOT]))
    await made.from_oci("", "two", layout(tmp_path / "two", [ROOT, TOP]))
    return made


async def made_of(made: Templates, name: str, tenant: str, sandbox: str) -> Image:
    image = await made.resolve(name, tenant)
    return (await made.sharing.made_of(Spec(sandbox, image, Limits(), tenant=tenant))).image


async def test_tenants_have_files_of_their_own(tmp_path: Path) -> None:
    made = await templates(tmp_path, "tenant")
    plain = await made.resolve("two")
    first = await made_of(made, "two", "a", "s1")
    again = await made_of(made, "two", "a", "s2")
    other = await made_of(made, "two", "b", "s3")
    assert first == again
    assert first.layers == plain.layers, "the first tenant pays nothing"
    assert not {*other.layers} & {*first.layers}
    assert len({plain.id, first.id, other.id}) == 3
    for mine, theirs in zip(first.layers, other.layers, strict=True):
        assert tree.measure(Path(mine)).digest == tree.measure(Path(theirs)).digest
        assert not inodes(mine) & inodes(theirs)
    # Templates share layers within a tenant, and only there.
    assert (await made_of(made, "one", "a", "s4")).layers[0] == first.layers[0]
    assert (await made_of(made, "one", "b", "s5")).layers[0] == other.layers[0]


async def test_the_first_tenant_stays_the_first_after_a_restart(tmp_path: Path) -> None:
    first = await made_of(await templates(tmp_path, "tenant"), "one", "a", "s1")
    again = Templates(tmp_path / "t", share="tenant")
    await again.start()
    assert not {*(await made_of(again, "one", "b", "s2")).layers} & {*first.layers}
    assert (await made_of(again, "one", "a", "s3")).layers == first.layers


async def test_of_many_that_begin_at_once_one_makes_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await templates(tmp_path, "tenant")
    await made_of(made, "one", "a", "s")
    copied: list[str] = []
    from venusrl.sandboxes.templates import store

    real = store._copy_tree

    def copy(source: str, target: Path) -> None:
        copied.append(source)
        real(source, target)

    monkeypatch.setattr(store, "_copy_tree", copy)
    images = await asyncio.gather(*(made_of(made, "one", "b", f"s{number}") for number in range(8)))
    assert len(copied) == len({image.layers for image in images}) == 1


async def test_nobody_shares_with_none(tmp_path: Path) -> None:
    made = await templates(tmp_path, "none")
    one, two = [await made_of(made, "two", "a", sandbox) for sandbox in ("s1", "s2")]
    plain = await made.resolve("two")
    assert len({*plain.layers, *one.layers, *two.layers}) == 3 * len(plain.layers)
    await made.sharing.let_go("s1")
    await made.sharing.let_go("s1")
    assert there((*one.layers, *two.layers)) == [False] * 2 + [True] * 2
    await made.sharing.sweep(["another"])
    assert there(two.layers) == [False] * 2
    assert made.store.damaged() == []


async def test_all_share_with_all(tmp_path: Path) -> None:
    made = await templates(tmp_path, "all")
    assert await made_of(made, "two", "a", "s1") == await made_of(made, "two", "b", "s2") == await made.resolve("two")


async def test_copies_go_with_their_layer(tmp_path: Path) -> None:
    made = await templates(tmp_path, "tenant")
    await made_of(made, "one", "a", "s1")
    copies = (await made_of(made, "one", "b", "s2")).layers
    for name in ("one", "two"):
        await made.remove("", name)
    await made.collect(cache_age_s=0.0)
    assert there(copies) == [False]


async def test_what_cannot_be_kept_apart_is_refused(tmp_path: Path) -> None:
    for share, runtime, others, image, refused in (
        ("none", "microvm", [], "one", "one memory"),
        ("none", "namespace", [], "host", "own directories"),
        ("tenant", "namespace", ["a", "b"], "host", "own directories"),
        ("tenant", "namespace", ["a"], "host", ""),
        ("tenant", "microvm", ["a", "b"], "one", ""),
        ("all", "namespace", ["a", "b"], "host", ""),
    ):
        made = Templates(tmp_path / f"{share}-{image}", share=share)  # type: ignore[arg-type]
        found = Image("host", "host") if image == "host" else Image("img-1", "one", ("/layer",))
        if refused:
            with pytest.raises(BadTemplate, match=refused):
                made.sharing.check(found, runtime, "a", others)
        else:
            made.sharing.check(found, runtime, "a", others)


class _Images:
    """Templates that are made already."""

    def __init__(self, made: Templates) -> None:
        self._made = made

    async def resolve(self, template: str, tenant: str) -> Image:
        return await self._made.resolve(template, tenant)

    def names(self) -> tuple[str, ...]:
        return self._made.names()

    def counters(self) -> dict[str, float]:
        return {}


async def test_a_host_makes_accounts_and_lets_go(tmp_path: Path) -> None:
    made = await templates(tmp_path, "none")
    runtime = FakeRuntime(lambda _: MemoryAgent(), world=tmp_path / "world")
    forgotten: list[str] = []

    async def forget(image: str) -> None:
        forgotten.append(image)

    runtime.forget = forget  # type: ignore[method-assign,assignment]
    admission = AdmitAll()
    host = LocalHost(
        tmp_path / "host",
        {"fake": runtime},
        _Images(made),
        admission,
        PlainDoor(),
        HostConfig(guard_s=0.01),
        sharing=made.sharing,
    )
    await host.start()
    held = await host.create(Order(id="s1", template="one", runtime="fake", tenant="a"))
    await host.create(Order(id="s2", template="one", runtime="fake", tenant="a"))
    image = (await made.resolve("one")).id
    assert held.template == image, "what others see is the template"
    specs = [runtime.instances[name].spec.image for name in ("s1", "s2")]
    assert [one.id for one in specs] == runtime.prepared == [f"{image}-s-s1", f"{image}-s-s2"]
    for one in specs:
        runtime.shared_bytes[one.id] = 5 * MIB
    await host._pages.measure()
    assert host.view().shared == {image: 10 * MIB}
    assert host.view().copies == {image: (f"{image}-s-s1", f"{image}-s-s2")}
    assert [request.pages for request in admission.requests] == [f"{image}-s-s1", f"{image}-s-s2"]
    await host.kill("s1")
    await host.close()
    assert forgotten == [f"{image}-s-s1"]
    assert there(tuple(one.layers[0] for one in specs)) == [False, True]


async def test_what_was_derived_goes_with_its_template(tmp_path: Path) -> None:
    """``venusrl env template rm`` and ``gc`` are another process: the host finds out by itself."""
    made = await templates(tmp_path, "tenant")
    images = {name: (await made.resolve(name)).id for name in ("one", "two")}
    runtime, clock = FakeRuntime(lambda _: MemoryAgent(), world=tmp_path / "world"), VirtualClock()

    def host() -> LocalHost:
        config = HostConfig(guard_s=1e9)
        parts = ({"fake": runtime}, _Images(made), AdmitAll(), PlainDoor(), config, clock)
        return LocalHost(tmp_path / "host", *parts, sharing=made.sharing)

    first = host()
    await first.start()
    for number, name in enumerate(images):
        await first.create(Order(id=f"s{number}", template=name, runtime="fake", tenant="a"))
    pages = {name: made.sharing.pages(image, "a", "") for name, image in images.items()}
    assert await runtime.derived() == set(pages.values())
    for name in images:
        await made.remove("", name)
    await made.collect(images.values(), cache_age_s=-1.0)
    await clock.run_for(60.0)
    assert await runtime.derived() == set(pages.values()), "their sandboxes live"
    await first.kill("s0")
    await made.collect([images["two"]], cache_age_s=-1.0)
    await clock.run_for(60.0)
    assert await runtime.derived() == {pages["two"]}
    await first.snapshot("s1", "kept")
    await first.kill("s1")
    await made.collect([images["two"]], cache_age_s=-1.0)
    await clock.run_for(60.0)
    assert await runtime.derived() == {pages["two"]}, "a snapshot leans on it"
    await first.close()
    second = host()
    await second.start()
    await second.remove_snapshot("kept")
    await made.collect(cache_age_s=-1.0)
    await clock.run_for(60.0)
    assert await runtime.derived() == set(), "of an earlier process too"
    await second.close()


def test_admission_counts_a_copy_for_whoever_has_none() -> None:
    host = HostView(
        "h",
        capacity=100 * MIB,
        available=100 * MIB,
        cpus=8.0,
        shared={"t": 60 * MIB},
        copies={"t": ("t-of-a", "t-of-b")},
    )
    request = Request(template="t", group="", declared=30 * MIB, cpus=0.1)
    for pages, fits in (("", True), ("t-of-a", True), ("t-of-c", False)):
        answer = FootprintAdmission().place((host,), msgspec.structs.replace(request, pages=pages))
        assert isinstance(answer, Admit if fits else Deny), pages


def sharing(share: Share, *, merge: bool = True) -> Sharing:
    made = Sharing(share)
    made.merge = merge
    return made


async def test_memory_is_merged_within_one_tenant_at_a_time(tmp_path: Path) -> None:
    runtime = FakeRuntime(lambda _: MemoryAgent(), world=tmp_path / "world")
    images = FixedImages(Image("img-1", "started", start=Start("python3")), Image("img-2", "plain"))

    async def host(share: Share) -> LocalHost:
        parts = (tmp_path / "host", {"fake": runtime}, images, AdmitAll(), PlainDoor(), HostConfig(guard_s=0.01))
        made = LocalHost(*parts, sharing=sharing(share))
        await made.start()
        return made

    async def merges(host: LocalHost, sandbox: str, tenant: str, template: str = "started") -> bool:
        await host.create(Order(id=sandbox, template=template, runtime="fake", tenant=tenant))
        return runtime.instances[sandbox].spec.merge

    first = await host("all")
    assert [await merges(first, "a1", "a"), await merges(first, "a2", "a", "plain")] == [True, False]
    assert await merges(first, "c1", "c")
    await first.close()
    again = await host("all")
    again._pages._sharing.share = "tenant"  # what was made before the restart merges still
    with pytest.raises(BadTemplate):  # no layers to keep apart: the images of this test have none
        await merges(again, "b1", "b")
    await again.pause("a1")
    assert (await again.resume("a1")).state == "running"
    assert again._pages._sharing.may_merge("b", again._pages._merging.values()) is False
    await again.kill("c1")
    assert again._pages._sharing.may_merge("a", again._pages._merging.values()) is True
    await again.kill("a1")
    assert again._pages._sharing.may_merge("b", again._pages._merging.values()) is True
    await again.close()
    assert sharing("none").may_merge("a", []) is False
    assert sharing("all", merge=False).may_merge("a", []) is False, "only where the operator says so"


async def test_merging_is_refused_where_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "why_not", lambda: "echo 1 > it")
    for share, why in (("none", "--share none"), ("tenant", "echo 1 > it")):
        with pytest.raises(ManagerError, match=f"--merge-memory: .*{why}"):
            await assemble(tmp_path / share, ["namespace"], share=share, merge=True)  # type: ignore[arg-type]


async def test_what_is_shared_is_counted_after_a_restart_too(tmp_path: Path) -> None:
    runtimes = [FakeRuntime(lambda _: MemoryAgent(), world=tmp_path / "world") for _ in range(2)]
    image = Image("img-1", "one")
    for runtime in runtimes:
        runtime.shared_bytes["img-1"] = 7 * MIB
        parts = (tmp_path / "host", {"fake": runtime}, FixedImages(image), AdmitAll(), PlainDoor())
        host = LocalHost(*parts, HostConfig(guard_s=0.01))
        await host.start()
        if runtime is runtimes[0]:
            await host.create(Order(id="s", template="one", runtime="fake"))
        await until(lambda: host.view().shared == {"img-1": 7 * MIB}, "the template's bytes being counted")  # noqa: B023
        assert runtime.prepared == ["img-1"]
        await host.close()
