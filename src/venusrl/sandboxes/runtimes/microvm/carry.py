"""A sealed template goes with a sandbox that needs it to a host that has another or none.

Owns: ``Control``, the conversation of two hosts over one stream, a line of JSON each way and step; the files of a
template on their way over it.

Must not know: machines, who moves and why.

Guarantees: a template that arrives is the one that was announced (every file's hash, and the memory's own digest), and
appears whole or not at all; several sandboxes that need the same bring it once.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from venusrl.sandboxes.protocol import HostDiskFull, SandboxError
from venusrl.sandboxes.runtimes.microvm import template
from venusrl.sandboxes.runtimes.microvm.template import Made
from venusrl.sandboxes.runtimes.moving import Streams
from venusrl.sandboxes.templates.api import Image

if TYPE_CHECKING:
    from venusrl.sandboxes.runtimes.microvm.runtime import MicroVmRuntime

STEP_S = 60.0
_TEMPLATE_S = 900.0
"""Another sandbox may be bringing the same template just now."""
_PIECE = 1 << 20
_LARGEST = 1 << 44
_DIGEST = re.compile(r"[0-9a-f]{64}")
FILES = (*template.FILES, "template.json")


class Control:
    """One side of the conversation."""

    def __init__(self, streams: Streams) -> None:
        self.reader, self.writer = streams

    async def say(self, **words: Any) -> None:
        self.writer.write(json.dumps(words).encode() + b"\n")
        await self.writer.drain()

    async def hear(self, wanted: str, timeout_s: float = STEP_S) -> Any:
        """The value said under ``wanted``. Raises SandboxError when the other side failed or says something else."""
        try:
            line = await asyncio.wait_for(self.reader.readline(), timeout_s)
            words = json.loads(line) if line else {}
        except (TimeoutError, ValueError, OSError) as error:
            raise SandboxError(f"the other host said nothing of {wanted!r}: {error!r}") from error
        if not isinstance(words, dict) or wanted not in words:
            said = words.get("error", "it hung up") if isinstance(words, dict) else words
            raise SandboxError(f"the other host gave up: {str(said)[:500]}")
        return words[wanted]


async def offer(control: Control, made: Made) -> None:
    """Say which template a sandbox is of; send it when it is wanted."""
    await control.say(template=made.digest)
    if await control.hear("want", _TEMPLATE_S):
        for name in FILES:
            await _send_file(control, made.directory / name)
    await control.hear("have", _TEMPLATE_S)


async def accept(runtime: MicroVmRuntime, image: Image, control: Control) -> Made:
    """The template that the other side says, from there if it is not here."""
    wanted = str(await control.hear("template"))
    if not _DIGEST.fullmatch(wanted):
        raise SandboxError("the other host names a template by something that is no digest")
    async with runtime.making(f"{image.id}.{wanted[:16]}"):
        made = await asyncio.to_thread(template.with_digest, runtime.templates, image, wanted)
        await control.say(want=made is None)
        if made is None:
            await _receive(runtime.templates, image, control, wanted)
            made = await runtime.of_digest(image, wanted)
    await control.say(have=True)
    return made


async def _receive(root: Path, image: Image, control: Control, wanted: str) -> None:
    work = root / f".making-{secrets.token_hex(6)}"
    try:
        await asyncio.to_thread(work.mkdir, parents=True)
        for name in FILES:
            if await control.hear("file") != name:
                raise SandboxError("the other host sends something else than a template")
            await _receive_file(control, work / name)
        await settle(root, image, work, wanted)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostDiskFull(f"no space left in {root} for the template {image.name!r}: free some") from None
        raise
    finally:
        await asyncio.to_thread(shutil.rmtree, work, True)


async def settle(root: Path, image: Image, work: Path, wanted: str) -> None:
    """Take the files in ``work`` as the template of ``image`` that has this digest. Raises SandboxError."""
    if await asyncio.to_thread(template.seal, work) != wanted:
        raise SandboxError("the template was damaged on its way")
    found = template.load(work)
    if found is None or found.digest != wanted:
        raise SandboxError("the template's description was damaged on its way")
    target = root / f"{image.id}.{wanted[:16]}"
    await asyncio.to_thread(root.mkdir, mode=0o700, parents=True, exist_ok=True)
    await asyncio.to_thread(shutil.rmtree, target, True)
    await asyncio.to_thread(work.rename, target)


async def _send_file(control: Control, path: Path) -> None:
    """Its data, not its holes; then a hash of what was sent and where it belongs."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        await control.say(file=path.name)
        await control.say(size=size)
        at = 0
        while at < size:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break  # only a hole is left
            length = min(_PIECE, os.lseek(file.fileno(), at, os.SEEK_HOLE) - at)
            data = await asyncio.to_thread(os.pread, file.fileno(), length, at)
            await control.say(at=at, length=len(data))
            control.writer.write(data)
            await control.writer.drain()
            hashed.update(at.to_bytes(8, "little") + data)
            at += len(data)
    await control.say(at=-1, length=0)
    await control.say(sha256=hashed.hexdigest())


async def _receive_file(control: Control, path: Path) -> None:
    size = int(await control.hear("size"))
    if not 0 <= size <= _LARGEST:
        raise SandboxError("a template's file has no bounds")
    hashed = hashlib.sha256()
    with path.open("xb") as file:
        os.ftruncate(file.fileno(), size)
        while (piece := await _piece(control))[0] >= 0:
            data = await _exactly(control, piece[1])
            if piece[0] + len(data) > size:
                raise SandboxError("a piece of a template has no bounds")
            hashed.update(piece[0].to_bytes(8, "little") + data)
            await asyncio.to_thread(os.pwrite, file.fileno(), data, piece[0])
    if await control.hear("sha256") != hashed.hexdigest():
        raise SandboxError(f"the template's {path.name} was damaged on its way")


async def _exactly(control: Control, length: int) -> bytes:
    try:
        return await asyncio.wait_for(control.reader.readexactly(length), STEP_S)
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
        raise SandboxError(f"the other host broke off a template: {error!r}") from None


async def _piece(control: Control) -> tuple[int, int]:
    try:
        line = await asyncio.wait_for(control.reader.readline(), STEP_S)
        words = msgspec.json.decode(line, type=dict[str, int])
        at, length = words["at"], words["length"]
    except (TimeoutError, OSError, KeyError, msgspec.MsgspecError) as error:
        raise SandboxError(f"the other host broke off a template: {error!r}") from None
    if not 0 <= length <= _PIECE or at >= _LARGEST:
        raise SandboxError("a piece of a template has no bounds")
    return at, length
