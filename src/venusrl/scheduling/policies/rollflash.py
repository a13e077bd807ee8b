"""ROLL Flash: queue scheduling, and its agentic variant with one queue an environment group.

Owns: the order of waiting turns and the choice of a worker as ROLL does them. Must not know: remaining lengths, KV.
How many groups are outstanding and which a batch takes is the window's business (``registry`` sets its mode): ROLL's
cumulative budget, ceil(alpha * B) and B more at each step, is the window; both of its ways to consume are modes.

``RollFlash`` (RLVR): every trajectory is a request stream of its own and goes out as soon as the window lets it. It
stays on one worker: ``affinity`` "episode" (ROLL's ``enable_sample_level_affinity``, the better choice for episodes of
many turns) gives each trajectory the worker with most room, "prompt" all members of a group the same one. The router's
"best fit" is read as most room. A worker has at most ``max_running`` requests in flight, and what exceeds that waits in
the order it came.

``RollFlashAgentic``: an environment plays one episode at a time, and there are G of them in each of ``env_groups``
queues (by default B), whatever alpha is. The task of ordinal o belongs to queue o mod ``env_groups``; a free
environment takes a trajectory of the oldest task of its queue. Each environment always uses the same worker, and
there is no limit on requests. More queues than B would open groups that can only expire: that is refused.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from venusrl.scheduling.actions import Dispatch
from venusrl.scheduling.fleet import Worker
from venusrl.scheduling.policies import Decision, PendingTurn, Policy, View
from venusrl.scheduling.policies.holds import Holds

Placed = tuple[Worker | None, str]
"""A worker, or the reason why there is none."""


class RollFlash(Policy):
    """See the module."""

    name = "rollflash"

    def __init__(self, *, max_running: int = 128, affinity: Literal["episode", "prompt"] = "episode") -> None:
        if max_running < 1:
            raise ValueError(f"max_running is at least 1, not {max_running}")
        if affinity not in ("episode", "prompt"):
            raise ValueError(f"there is no affinity {affinity!r}; there are episode and prompt")
        self._by_prompt = affinity == "prompt"
        self._limit = max_running
        self._waiting: dict[str, PendingTurn] = {}
        self._fresh: dict[str, None] = {}
        self._holds = Holds()
        self._queues: defaultdict[str, deque[str]] = defaultdict(deque)
        """Waiting trajectories by worker, in the order they came."""
        self._group_worker: dict[str, str] = {}
        self._changes = -1

    def add(self, turn: PendingTurn) -> None:
        self._waiting[turn.trajectory] = turn
        self._fresh[turn.trajectory] = None
        self._holds.forget(turn.trajectory)

    def remove(self, trajectory: str) -> None:
        self._waiting.pop(trajectory, None)
        self._fresh.pop(trajectory, None)
        self._holds.forget(trajectory)

    def decide(self, view: View) -> Iterator[Decision]:
        fresh = list(self._fresh)
        self._fresh.clear()
        if view.changes != self._changes:
            # Workers, weights or the quota changed: everybody finds a worker again.
            self._changes = view.changes
            self._queues.clear()
            self._forget_groups(view)
            fresh = list(self._waiting)
        for trajectory in fresh:
            worker, reason = self._place(self._waiting[trajectory], view)
            if worker is None:
                yield from self._holds.say(self._waiting[trajectory], reason)
            else:
                self._queues[worker.name].append(trajectory)
        for name, queue in list(self._queues.items()):
            yield from self._serve(view.workers[name], queue, view)
        for trajectory in fresh:
            if trajectory in self._waiting and trajectory not in self._holds:
                yield from self._holds.say(self._waiting[trajectory], "running_limit")

    def _serve(self, worker: Worker, queue: deque[str], view: View) -> Iterator[Decision]:
        while queue and len(worker.running) < self._limit:
            turn = self._waiting.get(queue.popleft())
            if turn is None:
                continue
            reason = view.held(turn) or view.refusal(turn, worker)
            if reason is not None:
                # It finds a worker again when something changes.
                yield from self._holds.say(turn, reason)
                continue
            self.remove(turn.trajectory)
            yield Dispatch(self.name, turn.trajectory, turn.turn, worker.name, view.urgency(turn))
        if not queue:
            del self._queues[worker.name]

    def _place(self, turn: PendingTurn, view: View) -> Placed:
        home = view.home(turn.trajectory)
        if home is not None:
            return home, ""
        if not view.workers:
            return None, "no_worker"
        name = self._group_worker.get(turn.group) if self._by_prompt else None
        if name is None:
            name = min(view.workers.values(), key=lambda w: (self._load(w), w.chosen, w.name)).name
            self._group_worker[turn.group] = name
        return view.workers[name], ""

    def _load(self, worker: Worker) -> int:
        return max(len(worker.sessions), len(worker.running) + len(self._queues.get(worker.name, ())))

    def _forget_groups(self, view: View) -> None:
        self._group_worker = {
            group: name
            for group, name in self._group_worker.items()
            if name in view.workers and group in view.window.open
        }


@dataclass(slots=True)
class _Queue:
    """The environments of one group. ``free``: idle ones; ``playing``: trajectory -> environment."""

    free: list[int]
    playing: dict[str, int] = field(default_factory=dict)
    waiting: list[tuple[int, int, str]] = field(default_factory=list)
    """Heap of (ordinal, arrival, trajectory)."""


class RollFlashAgentic(Policy):
    """See the module."""

    name = "rollflash-agentic"

    def __init__(self, *, env_groups: int | None = None) -> None:
        if env_groups is not None and env_groups < 1:
            raise ValueError(f"env_groups is at least 1, not {env_groups}")
        self._env_groups = env_groups
        self._queues: dict[int, _Queue] = {}
        self._queue_of: dict[str, int] = {}
        self._waiting: dict[str, PendingTurn] = {}
        self._fresh: dict[str, None] = {}
        self._holds = Holds()
        self._dirty: dict[int, None] = {}
        """Queues in which an environment became free."""
        self._worker_of: dict[int, str] = {}
        """By environment."""
        self._environments: Counter[str] = Counter()
        """How many use each worker."""
        self._arrivals = 0
        self._changes = -1

    def add(self, turn: PendingTurn) -> None:
        self._waiting[turn.trajectory] = turn
        self._fresh[turn.trajectory] = None
        self._holds.forget(turn.trajectory)

    def remove(self, trajectory: str) -> None:
        self._waiting.pop(trajectory, None)
        self._fresh.pop(trajectory, None)
        self._holds.forget(trajectory)
        number = self._queue_of.pop(trajectory, None)
        if number is not None:
            environment = self._queues[number].playing.pop(trajectory, None)
            if environment is not None:
                heapq.heappush(self._queues[number].free, environment)
                self._dirty[number] = None

    def decide(self, view: View) -> Iterator[Decision]:
        fresh: Iterable[str] = list(self._fresh)
        for trajectory in fresh:
            self._enter(trajectory, view)
        if view.changes != self._changes:
            self._changes = view.changes
            self._worker_of = {e: name for e, name in self._worker_of.items() if name in view.workers}
            self._environments = Counter(self._worker_of.values())
            self._dirty = dict.fromkeys(self._queues)
            fresh = list(self._waiting)
        for trajectory in fresh:
            queue = self._queues[self._queue_of[trajectory]]
            if trajectory in queue.playing:
                yield from self._send(self._waiting[trajectory], queue.playing[trajectory], view)
        dirty, self._dirty = self._dirty, {}
        for number in dirty:
            yield from self._play(self._queues[number], view)
        for trajectory in fresh:
            turn = self._waiting.get(trajectory)
            if turn is not None and trajectory not in self._holds:
                yield from self._holds.say(turn, "environments")
        self._fresh.clear()

    def _enter(self, trajectory: str, view: View) -> None:
        """A new trajectory joins its queue."""
        if trajectory in self._queue_of:
            return
        group = view.group(trajectory)
        ordinal = group.ordinal if group is not None else 0
        number = ordinal % self._groups(view)
        size = view.config.group_size
        queue = self._queues.setdefault(number, _Queue(list(range(number * size, (number + 1) * size))))
        self._queue_of[trajectory] = number
        self._arrivals += 1
        heapq.heappush(queue.waiting, (ordinal, self._arrivals, trajectory))
        self._dirty[number] = None

    def _groups(self, view: View) -> int:
        batch = view.config.batch_groups
        if self._env_groups is not None and self._env_groups > batch:
            raise ValueError(f"{self._env_groups} environment groups for batches of {batch}: the surplus would expire")
        return self._env_groups or batch

    def _play(self, queue: _Queue, view: View) -> Iterator[Decision]:
        """Idle environments take trajectories, those of the oldest task first."""
        later = []
        while queue.free and queue.waiting:
            entry = heapq.heappop(queue.waiting)
            turn = self._waiting.get(entry[2])
            if turn is None or entry[2] in queue.playing:
                continue
            reason, environment = view.held(turn), None
            if reason is None:
                environment, reason = self._willing(turn, queue, view)
            if environment is None:
                later.append(entry)
                yield from self._holds.say(turn, reason or "environments")
                continue
            queue.free.remove(environment)
            heapq.heapify(queue.free)
            queue.playing[entry[2]] = environment
            yield from self._send(turn, environment, view)
        for entry in later:
            heapq.heappush(queue.waiting, entry)

    def _willing(self, turn: PendingTurn, queue: _Queue, view: View) -> tuple[int | None, str | None]:
        """The first idle environment whose worker takes the turn, or why there is none."""
        reason = None
        for environment in sorted(queue.free):
            worker, reason = self._worker(environment, view)
            if worker is not None:
                reason = view.refusal(turn, worker)
                if reason is None:
                    return environment, None
        return None, reason

    def _send(self, turn: PendingTurn, environment: int, view: View) -> Iterator[Decision]:
        worker, reason = self._worker(environment, view)
        refusal = view.refusal(turn, worker) if worker is not None else reason
        if worker is None or refusal is not None:
            yield from self._holds.say(turn, refusal or reason)
            return
        self._waiting.pop(turn.trajectory)
        self._holds.forget(turn.trajectory)
        yield Dispatch(self.name, turn.trajectory, turn.turn, worker.name, view.urgency(turn))

    def _worker(self, environment: int, view: View) -> Placed:
        name = self._worker_of.get(environment)
        if name is None:
            if not view.workers:
                return None, "no_worker"
            name = min(view.workers, key=lambda w: (self._environments[w] / view.workers[w].slots, w))
            self._worker_of[environment] = name
            self._environments[name] += 1
        return view.workers[name], ""
