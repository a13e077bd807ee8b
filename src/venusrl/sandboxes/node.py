"""The embedded node: sandboxes of this machine for the process that owns it.

Owns: ``EmbeddedNode``, the ``Sandboxes`` implementation a run uses. Admission by count, a bound on
concurrent commands, ownership on disk, reaping of orphans, supervision of the launcher process.

Must not know: agents, engines, tasks; how a sandbox is isolated (``runtimes/namespace``).

Guarantees: those of ``sandboxes/protocol.py``. A killed owner's sandboxes stop by themselves (the launcher
ends with its owner) and whatever is left on disk is reaped by the next ``start`` on the same root.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import CommandResult, Limits, Mount


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What this node admits and how it isolates."""

    max_sandboxes: int = 256
    concurrent_commands: int = 8
    uid_base: int | None = None
    """First host uid and gid given to sandboxes when started by root; None = a range nobody else uses."""
    require_cgroup: bool = False
    """Refuse to start where memory and process limits cannot be set by cgroup (else rlimits stand in)."""
    lease_s: float = 60.0


class EmbeddedNode:
    """Sandboxes on this machine. ``await start()`` first, ``await close()`` last (kills every sandbox).

    ``root`` is the node's own directory (records of ownership; created if absent). Several nodes, of several
    processes, may share it. ``owner`` is a human name for the records (the run's name).
    """

    def __init__(self, root: Path, owner: str, config: NodeConfig | None = None) -> None:
        self._root = root
        self._owner = owner
        self._config = config or NodeConfig()

    async def start(self) -> int:
        """Check the machine, reap orphans of dead owners, start serving. Returns how many orphans were reaped.

        Raises RuntimeUnavailable with the mend.
        """
        raise SystemExit("the embedded node is being built")

    async def close(self) -> None:
        """Kill every sandbox of this node and stop. Idempotent."""

    async def create(self, template: str, limits: Limits, metadata: dict[str, str]) -> str:
        raise SystemExit("the embedded node is being built")

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
        raise SystemExit("the embedded node is being built")

    async def write(self, sandbox: str, files: dict[str, bytes]) -> None:
        raise SystemExit("the embedded node is being built")

    async def read(self, sandbox: str, path: str, max_bytes: int = 1 << 20) -> bytes:
        raise SystemExit("the embedded node is being built")

    async def kill(self, sandbox: str) -> None:
        raise SystemExit("the embedded node is being built")
