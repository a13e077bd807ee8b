"""Where a node that joined gets templates: the service it joined, over HTTP.

Owns: ``ServiceTemplates``, the ``templates.fetch.Origin`` that asks ``routes_layers``.

Must not know: where templates are kept, which are needed.

Guarantees: an answer that is not whole is an error; a service that says nothing for ``_SILENCE_S`` is HostLost; the
node's key goes nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from urllib.parse import quote

import aiohttp
import msgspec

from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.host.wire import KEY_HEADER
from venusrl.sandboxes.protocol import RuntimeUnavailable, SandboxError, TemplateNotFound
from venusrl.sandboxes.templates.fetch import OfferedImage

_CONNECT_S = 5.0
_SILENCE_S = 60.0


class ServiceTemplates:
    """``url`` is the service's, ``name`` and ``key`` the node's."""

    def __init__(self, url: str, name: str, key: str) -> None:
        self._base = f"{url.rstrip('/')}/nodes/{quote(name, safe='')}"
        self._key = key

    async def describe(self, template: str, tenant: str) -> OfferedImage:
        query = {"template": template, "tenant": tenant}
        what = f"template {template!r}"
        with self._named(what):
            async with self._session() as client, client.get(f"{self._base}/template", params=query) as answer:
                await self._check(answer, what)
                return msgspec.json.decode(await answer.read(), type=OfferedImage)

    async def layer(self, digest: str) -> AsyncIterator[bytes]:
        what = f"layer {digest[:12]}"
        with self._named(what):
            async with self._session() as client, client.get(f"{self._base}/layers/{digest}") as answer:
                await self._check(answer, what)
                async for piece in answer.content.iter_any():
                    yield piece

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        return aiohttp.ClientSession(timeout=timeout, headers={KEY_HEADER: self._key}, auto_decompress=False)

    async def _check(self, answer: aiohttp.ClientResponse, what: str) -> None:
        if answer.status == 200:
            return
        text = (await answer.text())[:500]
        with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
            text = str(msgspec.json.decode(text)["message"])
        if answer.status == 404:
            raise TemplateNotFound(text)
        if answer.status == 403:
            raise RuntimeUnavailable(f"{self._base} gives this node no templates: {text}")
        raise SandboxError(f"the {what} was answered with {answer.status}: {text}")

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise HostLost(f"the {what} cannot be had of {self._base}: {why}") from error
