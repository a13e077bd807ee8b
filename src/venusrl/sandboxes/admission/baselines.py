"""The policies beside ours, for comparison on the same traces.

Owns: ``E2b``, ``Declared`` (with an overcommit factor), ``Usage`` and ``Oracle``. None of them pauses anything.

Must not know: what ours learns. Guarantees: deterministic, but for the draws that ``E2b`` is given.
"""

from __future__ import annotations

from collections.abc import Callable

from venusrl.sandboxes.admission.api import Admit, Deny, HostView, Pause, Request

_RETRY_S = 5.0


class _Plain:
    """What the baselines have in common: they learn nothing and relieve nothing."""

    def observe(self, template: str, group: str, sandbox: str, age_s: float, private: int) -> None:
        """Footprints do not interest it."""

    def ended(self, sandbox: str) -> None:
        """Nor do lives."""

    def relieve(self, host: HostView) -> tuple[Pause, ...]:
        return ()


class E2b(_Plain):
    """Best of K by processors, as E2B's infrastructure does it: at most ``cap`` sandboxes a host, memory ignored.

    ``draw`` gives numbers in [0, 1). A host's score is (requested + reserved + alpha * used) / (R * processors).
    """

    def __init__(
        self, draw: Callable[[], float], k: int = 3, overcommit: float = 4.0, alpha: float = 0.5, cap: int = 200
    ) -> None:
        self._draw = draw
        self._k, self._overcommit, self._alpha, self._cap = k, overcommit, alpha, cap

    def place(self, hosts: tuple[HostView, ...], request: Request) -> Admit | Deny:
        able = [host for host in hosts if not host.draining]
        sample = [able.pop(int(self._draw() * len(able))) for _ in range(min(self._k, len(able)))]
        open_hosts = [host for host in sample if _running(host) < self._cap]
        if not open_hosts:
            return Deny("count", f"each host asked has {self._cap} sandboxes already", _RETRY_S)
        return Admit(min(open_hosts, key=lambda host: (self._score(host, request), host.name)).name)

    def _score(self, host: HostView, request: Request) -> float:
        reserved = sum(view.cpus for view in host.sandboxes if not view.paused)
        return (request.cpus + reserved + self._alpha * host.cpu_used) / (self._overcommit * host.cpus)


class Declared(_Plain):
    """The sum of declared sizes stays below ``overcommit`` times the capacity; the fullest host that fits."""

    def __init__(self, overcommit: float = 1.0) -> None:
        self._overcommit = overcommit

    def place(self, hosts: tuple[HostView, ...], request: Request) -> Admit | Deny:
        return _fullest(hosts, lambda host: self._left(host) - request.declared)

    def _left(self, host: HostView) -> float:
        return host.capacity * self._overcommit - sum(view.declared for view in host.sandboxes if not view.paused)


class Usage(_Plain):
    """What is used now, and one more of the average, fits. Growth that has not happened yet is not seen."""

    def place(self, hosts: tuple[HostView, ...], request: Request) -> Admit | Deny:
        return _fullest(hosts, self._left)

    def _left(self, host: HostView) -> float:
        used = [view.private for view in host.sandboxes]
        average = sum(used) / len(used) if used else 0.0
        return host.capacity - sum(host.shared.values()) - sum(used) - average


class Oracle(_Plain):
    """Knows the future: ``room`` gives the bytes left on a host at the worst moment to come, the newcomer included."""

    def __init__(self, room: Callable[[HostView, Request], float]) -> None:
        self._room = room

    def place(self, hosts: tuple[HostView, ...], request: Request) -> Admit | Deny:
        return _fullest(hosts, lambda host: self._room(host, request))


def _running(host: HostView) -> int:
    return sum(1 for view in host.sandboxes if not view.paused)


def _fullest(hosts: tuple[HostView, ...], left: Callable[[HostView], float]) -> Admit | Deny:
    """The host with the least left of those where something is."""
    able = [(left(host), host.name) for host in hosts if not host.draining]
    fitting = [one for one in able if one[0] >= 0.0]
    if fitting:
        return Admit(min(fitting)[1])
    if not able:
        return Deny("no_host", "no host takes new sandboxes (none there, or all draining)", _RETRY_S)
    room, name = max(able)
    return Deny("memory", f"{-room / 2**20:.0f} MiB short on {name}", _RETRY_S)
