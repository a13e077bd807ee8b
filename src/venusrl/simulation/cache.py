"""The KV of one engine worker: what running requests pin, what idles in the prefix cache, what is evicted first.

Owns: residency and the order of eviction. Must not know: time, steps, queues. Sizes of running sequences beyond the
group's shared prefix are the engine's business; here they count only once they idle.

The model: a two-level radix tree. A group's shared prefix is a node; each trajectory's own tokens hang below it. A
node is evicted from its tail and only when nothing resident hangs below it, so own tokens are never resident without
their prefix. A prefix counts as resident from the moment the first request that computes it is admitted (engines
let a later request of the same or the next step hit it). Idle nodes are evicted least recently used first, after
those of lower rank.

Guarantees: ``idle`` and ``pinned`` are exact; nothing pinned is ever evicted; a prefix is counted once.
"""

from __future__ import annotations

import math
from collections import OrderedDict

RELEASED, PLAIN, RETAINED = 0, 1, 2
"""Ranks of eviction: lower goes first."""


class Node:
    """Resident tokens of a trajectory (``prefix``: what it hangs below, if anything) or of a shared prefix."""

    __slots__ = ("children", "epoch", "key", "prefix", "rank", "running", "tokens")

    def __init__(self, key: str, tokens: int, prefix: Node | None, epoch: int) -> None:
        self.key = key
        self.tokens = tokens
        self.prefix = prefix
        self.epoch = epoch
        self.rank = PLAIN
        self.children = 0
        """Of a prefix: trajectories, running or idle, that hang below it."""
        self.running = 0
        """Of a prefix: how many of them run."""


class Cache:
    """See the module. ``whole``: evict whole nodes instead of tails. ``control``: obey ``rank``."""

    def __init__(self, *, whole: bool = False, control: bool = False) -> None:
        self.idle = 0
        """Tokens that may be evicted, sooner or later."""
        self.pinned = 0
        """Tokens of prefixes that running requests use."""
        self.epoch = 0
        """Grows when what is cached becomes unusable for later requests."""
        self._whole = whole
        self._control = control
        self._owns: dict[str, Node] = {}
        self._prefixes: dict[str, Node] = {}
        self._order: tuple[OrderedDict[Node, None], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        self._ranks: dict[str, int] = {}

    def own(self, trajectory: str) -> int:
        """The trajectory's own idle tokens."""
        node = self._owns.get(trajectory)
        return 0 if node is None else node.tokens

    def newly_pinned(self, group: str, shared: int) -> int:
        """By how much ``pinned`` would grow if a request of the group started."""
        prefix = self._prefixes.get(group)
        return 0 if prefix is not None and prefix.running else shared

    def lacking(self, group: str, shared: int) -> int:
        """How many tokens of the group's prefix are not there."""
        prefix = self._prefixes.get(group)
        return shared if prefix is None else max(0, shared - prefix.tokens)

    def occupy(self, trajectory: str, group: str, shared: int) -> tuple[Node | None, int, int]:
        """A request starts: its tokens are no longer idle, the whole prefix is pinned.

        Answers the prefix (to be handed to ``vacate``) and how many tokens of it and of the trajectory's own it found.
        """
        own = self._owns.pop(trajectory, None)
        self._ranks.pop(trajectory, None)
        found_own = 0
        if own is not None:
            del self._order[own.rank][own]
            found_own = own.tokens
            self.idle -= found_own
        if not shared:
            return None, 0, found_own
        prefix = self._prefixes.get(group)
        if prefix is None:
            prefix = self._prefixes[group] = Node(group, 0, None, self.epoch)
        found = prefix.tokens
        if not prefix.running:
            self.idle -= found
            self._order[prefix.rank].pop(prefix, None)
            self.pinned += shared
            prefix.tokens = shared
        prefix.running += 1
        prefix.children += own is None
        return prefix, found, found_own

    def vacate(self, trajectory: str, prefix: Node | None, own: int, epoch: int, missing: int = 0) -> None:
        """A request of ``epoch`` ends and leaves ``own`` tokens idle, most recently used (0: nothing stays of it).

        ``missing``: tokens at the end of the prefix that nobody will have computed; the request was its only user.
        """
        stale = epoch != self.epoch
        if prefix is not None:
            prefix.running -= 1
            if not prefix.running:
                self.pinned -= prefix.tokens
                prefix.tokens -= missing
                self.idle += 0 if stale else prefix.tokens
        if stale:
            return
        if own > 0:
            node = self._owns[trajectory] = Node(trajectory, own, prefix, epoch)
            node.rank = self._ranks.get(trajectory, PLAIN)
            self._order[node.rank][node] = None
            self.idle += own
        elif prefix is not None:
            self._lose_child(prefix, PLAIN, soon=False)

    def insert(self, trajectory: str, group: str, shared: int, own: int) -> None:
        """KV arrives from elsewhere: idle, most recently used."""
        prefix, _, _ = self.occupy(trajectory, group, shared)
        self.vacate(trajectory, prefix, own, self.epoch)

    def drop(self, trajectory: str) -> None:
        """The trajectory's own idle tokens are gone (its prefix stays)."""
        own = self._owns.pop(trajectory, None)
        if own is None:
            return
        del self._order[own.rank][own]
        self.idle -= own.tokens
        if own.prefix is not None:
            self._lose_child(own.prefix, own.rank, soon=False)

    def rank(self, trajectory: str, rank: int) -> None:
        """A hint on when to evict what idles of the trajectory (or will, when its request ends); the next request
        that starts ends it."""
        if not self._control:
            return
        self._ranks[trajectory] = rank
        own = self._owns.get(trajectory)
        if own is not None and own.rank != rank:
            del self._order[own.rank][own]
            own.rank = rank
            self._order[rank][own] = None

    def forget(self, trajectory: str) -> None:
        """No more hints about it (the trajectory is over); what idles of it stays until evicted."""
        self._ranks.pop(trajectory, None)

    def evict(self, tokens: float) -> int:
        """Evict at least ``tokens`` idle tokens, or all there are. How many went."""
        gone = 0
        for order in self._order:
            while gone < tokens and order:
                node = next(iter(order))
                part = node.tokens if self._whole else min(node.tokens, math.ceil(tokens - gone))
                node.tokens -= part
                gone += part
                if not node.tokens:
                    del order[node]
                    self._remove(node)
        self.idle -= gone
        return gone

    def flush(self) -> None:
        """What is cached serves no later request: the idle is gone, the rest goes when its requests end."""
        self.epoch += 1
        self.idle = 0
        self._owns.clear()
        self._prefixes.clear()
        for order in self._order:
            order.clear()

    # --- inside -------------------------------------------------------------------------------------------
    def _remove(self, node: Node) -> None:
        """A node without tokens leaves the tree."""
        if self._owns.get(node.key) is not node:
            del self._prefixes[node.key]
            return
        del self._owns[node.key]
        if node.prefix is not None:
            self._lose_child(node.prefix, node.rank, soon=True)

    def _lose_child(self, prefix: Node, rank: int, *, soon: bool) -> None:
        """A prefix without children is a leaf: next to go when its last child was evicted (engines free a sequence
        from its tail), most recently used when that one just ran."""
        prefix.children -= 1
        if prefix.children:
            return
        if not prefix.tokens:
            del self._prefixes[prefix.key]
            return
        prefix.rank = rank
        order = self._order[rank]
        order[prefix] = None
        if soon:
            order.move_to_end(prefix, last=False)
