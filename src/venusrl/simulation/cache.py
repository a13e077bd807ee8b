"""The KV of one engine worker: what running requests pin, what idles in the prefix cache, what is evicted first.

Owns: residency and the order of eviction. Must not know: time, steps, queues. Sizes of running sequences beyond the
path that they share are the engine's business; here they count only once they idle.

The model: a radix tree. A request comes with the path of nodes that its context covers: what it may share with others,
stretch after stretch from its first token on (a group's prefix, most often that alone); a trajectory's other tokens
hang below the last of them. A node is evicted from its tail and only when nothing resident hangs below it, so nothing
is ever resident without what precedes it. A path counts as resident from the moment the first request that computes it
is admitted (engines let a later request of the same or the next step hit it). Idle nodes are evicted least recently
used first, after those of lower rank.

Guarantees: ``idle`` and ``pinned`` are exact; nothing pinned is ever evicted; what is shared is counted once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

RELEASED, PLAIN, RETAINED = 0, 1, 2
"""Ranks of eviction: lower goes first."""

Path = Sequence[tuple[str | int, int]]
"""Names of nodes, each with its tokens, every one below the one before."""


class Node:
    """Resident tokens of a trajectory or of what several share. ``prefix``: what it hangs below, if anything."""

    __slots__ = ("children", "epoch", "key", "prefix", "rank", "running", "tokens")

    def __init__(self, key: str | int, tokens: int, prefix: Node | None, epoch: int) -> None:
        self.key = key
        self.tokens = tokens
        self.prefix = prefix
        self.epoch = epoch
        self.rank = PLAIN
        self.children = 0
        """Of what is shared: nodes that hang below it, and running trajectories that do."""
        self.running = 0
        """Of what is shared: how many requests run whose path it is on."""

    def up(self) -> Iterator[Node]:
        """It, and all that it hangs below."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.prefix


class Found(NamedTuple):
    """What a request found as it started. ``node``: the last of its path, to be handed to ``vacate``; ``path`` and
    ``own``: tokens that were there; ``lacking``: nodes of which some were not, and how many."""

    node: Node | None
    path: int
    own: int
    lacking: list[tuple[Node, int]]


class Cache:
    """See the module. ``whole``: evict whole nodes instead of tails. ``control``: obey ``rank``."""

    def __init__(self, *, whole: bool = False, control: bool = False) -> None:
        self.idle = 0
        """Tokens that may be evicted, sooner or later."""
        self.pinned = 0
        """Tokens of the paths of running requests."""
        self.epoch = 0
        """Grows when what is cached becomes unusable for later requests."""
        self._whole = whole
        self._control = control
        self._owns: dict[str | int, Node] = {}
        self._shared: dict[str | int, Node] = {}
        self._order: tuple[OrderedDict[Node, None], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        self._ranks: dict[str, int] = {}

    def own(self, trajectory: str) -> int:
        """The trajectory's own idle tokens."""
        node = self._owns.get(trajectory)
        return 0 if node is None else node.tokens

    def newly_pinned(self, path: Path) -> int:
        """By how much ``pinned`` would grow if a request with that path started."""
        growth, shared = 0, self._shared
        for key, tokens in path:
            node = shared.get(key)
            if node is None or not node.running:
                growth += tokens
        return growth

    def lacking(self, path: Path) -> int:
        """How many tokens of the path are not there."""
        nodes = ((self._shared.get(key), tokens) for key, tokens in path)
        return sum(tokens if node is None else max(0, tokens - node.tokens) for node, tokens in nodes)

    def occupy(self, trajectory: str, path: Path) -> Found:
        """A request starts: its tokens are no longer idle, its whole path is pinned."""
        own = self._owns.pop(trajectory, None)
        self._ranks.pop(trajectory, None)
        carried = 0
        above: Node | None = None
        if own is not None:
            del self._order[own.rank][own]
            carried, above = own.tokens, own.prefix
            self.idle -= carried
        found, node, lacking = 0, None, []
        passed = own is not None and above is None
        for key, tokens in path:
            node = self._shared.get(key) or self._new(key, node)
            there = node.tokens
            if passed and carried:
                # Its own tokens are those of this stretch, which others share.
                there = max(there, min(carried, tokens))
                carried = max(0, carried - tokens)
            if not node.running:
                self.idle -= node.tokens
                self._order[node.rank].pop(node, None)
                self.pinned += tokens
                node.tokens = tokens
            node.running += 1
            found += there
            if there < tokens:
                lacking.append((node, tokens - there))
            passed = passed or node is above
        if node is not None and (own is None or node is not above):
            self._hang(node, above)
        return Found(node, found, carried, lacking)

    def vacate(
        self,
        trajectory: str,
        node: Node | None,
        own: int,
        epoch: int,
        uncomputed: Sequence[tuple[Node, int]] = (),
        onwards: Path = (),
    ) -> None:
        """A request of ``epoch`` ends and leaves ``own`` tokens idle, most recently used (0: nothing stays of it).

        ``uncomputed``: tokens at the end of nodes that nobody will have computed; the request was their only user.
        ``onwards``: the path goes on so far within its own tokens.
        """
        for cut, tokens in uncomputed:
            cut.tokens -= tokens
            self.pinned -= tokens
        stale = epoch != self.epoch
        used = node
        while used is not None:
            used.running -= 1
            if not used.running:
                self.pinned -= used.tokens
                self.idle += 0 if stale else used.tokens
            used = used.prefix
        if stale:
            return
        for key, tokens in onwards:
            below = self._shared.get(key) or self._new(key, node)
            if not below.running:
                # Something hangs below it from now on: it is no leaf.
                self._order[below.rank].pop(below, None)
                self.idle += tokens - below.tokens
                below.tokens = tokens
            self._hang(below, node)
            node, own = below, own - tokens
        if own > 0:
            kept = self._owns[trajectory] = Node(trajectory, own, node, epoch)
            kept.rank = self._ranks.get(trajectory, PLAIN)
            self._order[kept.rank][kept] = None
            self.idle += own
        elif node is not None:
            self._lose_child(node, PLAIN, soon=False)

    def insert(self, trajectory: str, path: Path, own: int) -> None:
        """KV arrives from elsewhere: idle, most recently used."""
        self.vacate(trajectory, self.occupy(trajectory, path).node, own, self.epoch)

    def drop(self, trajectory: str) -> None:
        """The trajectory's own idle tokens are gone (its path stays)."""
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
        self._shared.clear()
        for order in self._order:
            order.clear()

    # --- inside -------------------------------------------------------------------------------------------
    def _new(self, key: str | int, prefix: Node | None) -> Node:
        """A shared node with nothing in it yet."""
        node = self._shared[key] = Node(key, 0, prefix, self.epoch)
        if prefix is not None:
            prefix.children += 1
        return node

    def _hang(self, node: Node, before: Node | None) -> None:
        """A trajectory hangs below a node of its path, further on than ``before``. Nothing becomes a leaf by that."""
        if before is not None:
            before.children -= 1
        node.children += 1

    def _remove(self, node: Node) -> None:
        """A node without tokens leaves the tree."""
        table = self._owns if self._owns.get(node.key) is node else self._shared
        del table[node.key]
        if node.prefix is not None:
            self._lose_child(node.prefix, node.rank, soon=True)

    def _lose_child(self, node: Node, rank: int, *, soon: bool) -> None:
        """A shared node without children is a leaf: next to go when its last child was evicted (engines free a sequence
        from its tail), most recently used when that one just ran."""
        node.children -= 1
        if node.children:
            return
        if not node.tokens:
            del self._shared[node.key]
            if node.prefix is not None:
                self._lose_child(node.prefix, rank, soon=soon)
            return
        node.rank = rank
        order = self._order[rank]
        order[node] = None
        if soon:
            order.move_to_end(node, last=False)
