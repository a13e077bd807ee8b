"""A template of another machine is brought here: once, only what is lacking, or not at all."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from tests.unit.environments import ADMIN, JOIN, environment
from tests.unit.templates import archive, directory, entry, layout, without_flushing  # noqa: F401

from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.manager import app
from venusrl.sandboxes.manager.origin import ServiceTemplates
from venusrl.sandboxes.manager.records import NodeRecord
from venusrl.sandboxes.protocol import RuntimeUnavailable, TemplateNotFound
from venusrl.sandboxes.templates import transfer
from venusrl.sandboxes.templates.api import Image
from venusrl.sandboxes.templates.fetch import FetchedTemplates, OfferedImage, OfferedLayer
from venusrl.sandboxes.templates.service import Templates
from venusrl.testing.clock import VirtualClock

pytestmark = pytest.mark.usefixtures("without_flushing")
ROOT = archive(directory("bin"), entry("bin/sh", b"#!"), entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\n"))


class Patient(VirtualClock):
    """Waits for nothing."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Source:
    """An origin in this process. ``asked``: which layers; the next ``cuts`` break off; ``gate`` is awaited."""

    def __init__(self, templates: Templates) -> None:
        self.templates = templates
        self.asked: list[str] = []
        self.cuts = 0
        self.gate: asyncio.Event | None = None

    async def describe(self, template: str, tenant: str) -> OfferedImage:
        bare, digests = transfer.describe(self.templates.store, await self.templates.resolve(template, tenant))
        found = [self.templates.store.layer(digest) for digest in digests]
        return OfferedImage(bare, tuple(OfferedLayer(one.digest, one.bytes, one.entries) for one in found))

    async def layer(self, digest: str) -> AsyncIterator[bytes]:
        self.asked.append(digest)
        if self.gate is not None:
            await self.gate.wait()
        buffer = io.BytesIO()
        transfer.send(self.templates.store, digest, buffer)
        content = buffer.getvalue()
        yield content[:20]
        if self.cuts:
            self.cuts -= 1
            raise HostLost("the line broke")
        yield content[20:]


async def source(root: Path) -> tuple[Source, Image]:
    templates = Templates(root / "origin")
    await templates.start()
    await templates.from_oci("", "root", layout(root / "layout", [ROOT]))
    return Source(templates), await templates.resolve("root")


async def here(root: Path, origin: Any) -> FetchedTemplates:
    templates = Templates(root / "here")
    await templates.start()
    return FetchedTemplates(templates, origin, Patient())


async def test_many_wait_for_one_transfer_and_the_next_needs_none(tmp_path: Path) -> None:
    origin, image = await source(tmp_path)
    fetched = await here(tmp_path, origin)
    origin.gate = asyncio.Event()
    waiting = [asyncio.create_task(fetched.resolve(name, "t")) for name in (image.id, "root", image.id)]
    while not origin.asked:  # noqa: ASYNC110 - another task's progress
        await asyncio.sleep(0)
    assert fetched.counters()["templates_arriving"] == 1
    waiting[0].cancel()  # the others still get it
    origin.gate.set()
    got = await asyncio.gather(*waiting[1:])
    assert {one.id for one in got} == {image.id}
    assert all(str(tmp_path / "here") in path for path in got[0].layers)
    assert sorted(origin.asked) == sorted({Path(path).parent.name for path in image.layers})
    assert image.id in fetched.names()
    count = len(origin.asked)
    assert (await fetched.resolve(image.id, "t")).layers == got[0].layers
    assert len(origin.asked) == count == fetched.counters()["template_layers_fetched"]


async def test_only_layers_that_are_lacking_travel(tmp_path: Path) -> None:
    origin, image = await source(tmp_path)
    fetched = await here(tmp_path, origin)
    await fetched.resolve(image.id, "")
    count = len(origin.asked)
    with origin.templates.store.making():
        other = origin.templates.store.put_image(Image("", "other", image.layers, env={"B": "2"}))
    assert (await fetched.resolve(other.id, "")).env == {"B": "2"}
    assert len(origin.asked) == count


async def test_a_layer_that_breaks_off_is_asked_for_again(tmp_path: Path) -> None:
    origin, image = await source(tmp_path)
    fetched = await here(tmp_path, origin)
    origin.cuts = 2
    assert (await fetched.resolve(image.id, "")).id == image.id
    origin, _ = await source(tmp_path / "second")
    fetched = await here(tmp_path / "second", origin)
    origin.cuts = 3
    with pytest.raises(HostLost, match=r"layer .* of template root cannot be had: the line broke"):
        await fetched.resolve(image.id, "")
    assert fetched.counters()["template_fetches_failed"] == 1
    assert (await fetched.resolve(image.id, "")).id == image.id  # the next who asks begins anew


async def test_what_is_not_the_layer_is_not_kept(tmp_path: Path) -> None:
    origin, image = await source(tmp_path)

    class Liar(Source):
        async def layer(self, digest: str) -> AsyncIterator[bytes]:
            self.asked.append(digest)
            buffer = io.BytesIO()
            with self.templates.store.making(), self.templates.store.staging() as scratch:
                (scratch / "made").mkdir()
                (scratch / "made" / "evil").write_bytes(b"x")
                other = self.templates.store.add(scratch / "made")
            transfer.send(self.templates.store, other.digest, buffer)
            yield buffer.getvalue()

    fetched = await here(tmp_path, Liar(origin.templates))
    with pytest.raises(HostLost, match="is not the layer"):  # not the caller's fault: another host is tried
        await fetched.resolve(image.id, "")
    assert fetched.names() == ("host",)
    assert list((tmp_path / "here" / "layers").iterdir()) == []


async def test_over_http_for_a_node_alone(tmp_path: Path) -> None:
    origin, image = await source(tmp_path)
    async with environment(tmp_path) as env:
        env.store.put_node(NodeRecord("far", "http://127.0.0.1:9", "k" * 32, 0.0, False))
        served = app.build(env.service, admin_key=ADMIN, join_key=JOIN, templates=origin.templates)
        async with TestServer(served) as server:
            url = str(server.make_url("/"))
            fetched = await here(tmp_path, ServiceTemplates(url, "far", "k" * 32))
            assert (await fetched.resolve("root", "t")).id == image.id
            assert fetched.counters()["template_bytes_fetched"] > 0
            with pytest.raises(TemplateNotFound, match="no template 'other'"):
                await fetched.resolve("other", "t")
            env.store.put_node(NodeRecord("local", "", "", 0.0, False))  # the service's own, which has no key
            for name, key in (("far", "x" * 32), ("near", "k" * 32), ("local", "")):
                stranger = await here(tmp_path / "stranger", ServiceTemplates(url, name, key))
                with pytest.raises(RuntimeUnavailable, match="not the key of a node"):
                    await stranger.resolve("root", "t")
        with pytest.raises(HostLost, match="cannot be had of"):
            await fetched.resolve("root", "t")
