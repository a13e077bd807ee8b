"""The messages of E2B's process and filesystem services.

Owns: what requests look like, and the two enumerations' names.

Must not know: agents, HTTP.

Guarantees: fields spelt as proto3 JSON spells them; a field that is absent has proto3's default.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

import msgspec

from venusrl.sandboxes.envd.connect import Fault

UInt32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9}
EVENT_TYPES = {
    "create": "EVENT_TYPE_CREATE",
    "write": "EVENT_TYPE_WRITE",
    "remove": "EVENT_TYPE_REMOVE",
    "rename": "EVENT_TYPE_RENAME",
    "chmod": "EVENT_TYPE_CHMOD",
}


class Message(msgspec.Struct, frozen=True, rename="camel"):
    """A request, or a part of one."""


class PtySize(Message, frozen=True):
    cols: UInt32 = 0
    rows: UInt32 = 0


class Pty(Message, frozen=True):
    size: PtySize | None = None


class ProcessConfig(Message, frozen=True):
    cmd: str = ""
    args: list[str] | None = None
    envs: dict[str, str] | None = None
    cwd: str | None = None


class StartRequest(Message, frozen=True):
    process: ProcessConfig = ProcessConfig()
    pty: Pty | None = None
    tag: str | None = None
    stdin: bool = True
    """Older clients do not send it and expect a pipe."""


class Selector(Message, frozen=True):
    pid: UInt32 | None = None
    tag: str | None = None


class ProcessInput(Message, frozen=True):
    """Base64 in either alphabet, as proto3 JSON allows."""

    stdin: str | None = None
    pty: str | None = None

    def data(self) -> bytes:
        """Raises Fault."""
        text = self.stdin if self.stdin is not None else self.pty
        if text is None:
            raise Fault("invalid_argument", "the input has neither stdin nor pty")
        try:
            plain = text.replace("-", "+").replace("_", "/").rstrip("=")
            return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise Fault("invalid_argument", "the input is not base64") from None


class ListRequest(Message, frozen=True):
    pass


class Since(Message, frozen=True):
    """Ours: a stream that began on another host goes on. As ``following.Part``."""

    pid: int = 0
    position: int | None = None
    ends: bool = False


class ConnectRequest(Message, frozen=True):
    process: Selector = Selector()
    since: Since | None = None


class UpdateRequest(Message, frozen=True):
    process: Selector = Selector()
    pty: Pty | None = None


class SendInputRequest(Message, frozen=True):
    process: Selector = Selector()
    input: ProcessInput = ProcessInput()


class StreamStart(Message, frozen=True):
    process: Selector = Selector()


class StreamData(Message, frozen=True):
    input: ProcessInput = ProcessInput()


class StreamInputRequest(Message, frozen=True):
    start: StreamStart | None = None
    data: StreamData | None = None


class SendSignalRequest(Message, frozen=True):
    process: Selector = Selector()
    signal: int | str = 0

    def number(self) -> int:
        """Raises Fault."""
        number = SIGNALS.get(self.signal) if isinstance(self.signal, str) else self.signal
        if number not in SIGNALS.values():
            raise Fault("invalid_argument", f"unknown signal {self.signal}: SIGNAL_SIGTERM or SIGNAL_SIGKILL")
        assert number is not None
        return number


class CloseStdinRequest(Message, frozen=True):
    process: Selector = Selector()


class PathRequest(Message, frozen=True):
    """Stat, MakeDir, Remove."""

    path: str = ""


class MoveRequest(Message, frozen=True):
    source: str = ""
    destination: str = ""


class ListDirRequest(Message, frozen=True):
    path: str = ""
    depth: UInt32 = 0


class WatchRequest(Message, frozen=True):
    """WatchDir, CreateWatcher. Network mounts are no special case: a sandbox has none."""

    path: str = ""
    recursive: bool = False
    include_entry: bool = False
    allow_network_mounts: bool = False


class WatcherRequest(Message, frozen=True):
    """GetWatcherEvents, RemoveWatcher."""

    watcher_id: str = ""
