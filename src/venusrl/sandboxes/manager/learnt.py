"""What admission has learned of templates outlives the process that learned it.

Owns: one file of the state directory, when it is written, what happens to one that cannot be read.

Must not know: what a footprint is made of, hosts.

Guarantees: the file is replaced whole, never half; what a kill takes with it is at most the last ``EVERY_S`` seconds'.
A file that is damaged, or of another version, is a warning: learning begins anew and the file is written over.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Literal

import msgspec

from venusrl.clock import Clock
from venusrl.sandboxes.admission.footprint import FootprintAdmission, KeptLearning
from venusrl.sandboxes.host.background import Background
from venusrl.sandboxes.templates.store import put

_log = logging.getLogger(__name__)
EVERY_S = 60.0


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    learning: KeptLearning


class KeptFootprints:
    """``start`` before the first sandbox is measured; ``close`` writes a last time."""

    def __init__(self, path: Path, admission: FootprintAdmission, clock: Clock) -> None:
        self._path = path
        self._admission = admission
        self._clock = clock
        self._background = Background(clock)
        self._written = b""

    def start(self) -> None:
        """Take up what an earlier process wrote, and write from now on."""
        self._read()
        self._background.loop("keep learned footprints", self._step)

    async def close(self) -> None:
        await self._background.close()
        await asyncio.to_thread(self._write, self._encoded())

    def _read(self) -> None:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("learned footprints cannot be read: %s; learning begins anew", error)
            return
        try:
            self._admission.take_up(msgspec.json.decode(content, type=_File).learning)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            _log.warning("learned footprints in %s are damaged: %s; learning begins anew", self._path, error)

    async def _step(self) -> None:
        await self._clock.sleep(EVERY_S)
        await asyncio.to_thread(self._write, self._encoded())

    def _encoded(self) -> bytes:
        return msgspec.json.encode(_File(1, self._admission.kept()))

    def _write(self, content: bytes) -> None:
        if content == self._written:
            return
        try:
            put(self._path, content)
            self._written = content
        except OSError as error:
            _log.warning("learned footprints cannot be kept in %s: %s", self._path, error)
