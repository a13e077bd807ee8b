"""What a sandbox may reach outside itself.

Owns: nothing yet beyond refusing.
"""

from __future__ import annotations

from venusrl.sandboxes.protocol import SandboxError
from venusrl.sandboxes.runtimes.base import Network


class Egress:
    """No way out."""

    lacks: str | None = "not built in"

    async def connect(self, sandbox: str, pid: int, network: Network) -> None:
        if network.internet or network.allow:
            raise SandboxError(f"sandboxes cannot reach a network here: {self.lacks}")

    async def disconnect(self, sandbox: str) -> None:
        return None
