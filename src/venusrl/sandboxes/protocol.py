"""The five-method door between a run and its sandboxes.

Owns: the ``Sandboxes`` protocol, its data and its errors. Two implementations exist: the embedded node
(``venusrl.sandboxes.node``) and, later, any E2B endpoint. A run knows nothing else about isolation.

Guarantees asked of every implementation: a command's whole process tree is gone when ``run`` returns, is
cancelled or times out; output is capped; ids are never reused; ``kill`` is idempotent; a cancelled
``create`` leaves nothing behind; every failure is a ``SandboxError`` subclass.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class SandboxError(Exception):
    """A sandbox could not do what was asked. ``reason`` is a stable code for failure histograms."""

    reason = "sandbox_error"


class TemplateNotFound(SandboxError):
    """The template does not exist or is unusable; the message names the mend."""

    reason = "template_not_found"


class SandboxGone(SandboxError):
    """The sandbox is not (or no longer) alive on this node."""

    reason = "sandbox_gone"


class SandboxMoving(SandboxGone):
    """It goes on on another node, where what it says is kept for whoever connects again."""


class SandboxPaused(SandboxError):
    """The sandbox is paused: resume it first."""

    reason = "sandbox_paused"


class SandboxDenied(SandboxError):
    """The node will not admit another sandbox now."""

    reason = "sandbox_denied"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RuntimeUnavailable(SandboxError):
    """This machine cannot isolate (no bubblewrap, no user namespaces...); the message names the mend."""

    reason = "runtime_unavailable"


class Unsupported(SandboxError):
    """What the sandbox's runtime cannot do; the message names what can."""

    reason = "unsupported"


class HostDiskFull(SandboxError):
    """The machine itself has no space left for another sandbox; the message says where."""

    reason = "host_disk_full"


class DiskFull(SandboxError):
    """A file did not fit into the sandbox's own disk limit."""

    reason = "out_of_disk"


class BadPath(SandboxError):
    """A path that cannot be read, written or mounted: not a regular file, outside what is writable, a loop of links."""

    reason = "bad_path"


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hard limits of one sandbox. Memory and disk in MiB, output in bytes a stream, time in seconds.

    The embedded node keeps a sandbox's files in memory: what a command writes counts as its memory too.
    """

    memory_mib: int = 512
    pids: int = 64
    cpus: float = 1.0
    disk_mib: int = 256
    output_bytes: int = 65536
    command_timeout_s: float = 60.0


class CommandResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``exit_code`` is 128 + signal for a killed command; at most one of the flags is the cause.

    ``output`` interleaves stdout and stderr as they came (UTF-8, replacement for bad bytes), cut to
    the limit; ``truncated_bytes`` says how much was dropped.
    """

    exit_code: int
    output: str
    truncated_bytes: int
    wall_s: float
    timed_out: bool = False
    out_of_memory: bool = False
    out_of_disk: bool = False


class Mount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host directory bound read-only at ``target`` for one command (the verifier's hidden tests)."""

    source: str
    target: str


class Sandboxes(Protocol):
    """Create, run, write, read, kill."""

    async def create(self, template: str, limits: Limits, metadata: dict[str, str]) -> str:
        """Make a sandbox from ``template`` ("host" or a directory path) and return its id.

        The working directory is ``/work`` (empty). Writable: ``/work``, ``/tmp``, and ``/logs`` (a verifier's
        output); with a directory template, all of it. Raises TemplateNotFound, SandboxDenied,
        RuntimeUnavailable.
        """
        ...

    async def run(
        self,
        sandbox: str,
        command: str,
        *,
        timeout_s: float | None = None,
        env: dict[str, str] | None = None,
        mounts: tuple[Mount, ...] = (),
        cwd: str = "/work",
    ) -> CommandResult:
        """Run ``command`` with ``/bin/sh -c``; a fresh process tree, files persist. Raises SandboxGone."""
        ...

    async def write(self, sandbox: str, files: dict[str, bytes]) -> None:
        """Write files (absolute paths or relative to /work), making parents. Never follows links out.

        Raises SandboxGone, DiskFull, BadPath.
        """
        ...

    async def read(self, sandbox: str, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Read one regular file. Raises FileNotFoundError, SandboxGone, BadPath."""
        ...

    async def kill(self, sandbox: str) -> None:
        """Remove the sandbox, its processes and files. Idempotent."""
        ...
