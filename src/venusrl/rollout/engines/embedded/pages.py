"""Which page of the KV pool holds which tokens.

Owns: page ids, their reference counts, the prefix index (full pages, found by content and by the whole chain before
them, within a salt), and which session's pages go first or last.

Must not know: tensors, sequences, time.

Guarantees:
- A page is free, cached (found by content; evicted when space is needed), or held; never two of them.
- Lookups compare tokens, not hashes: a hit is the same tokens after the same tokens under the same salt.
- Least recently released pages go first, a chain's tail before its head, so that no cached page is ever
  reachable only through an evicted one. Before them goes what only a dismissed session used; after them what a
  retained session uses, which is still taken when nothing else is left: a wish never keeps a request from running.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Key = tuple[int | str, tuple[int, ...]]
"""The page before (or the salt), and the tokens of the page."""
_Place = tuple[int, Key]
"""A page and what it held when it was noted: it may have been given away since."""


class Pages:
    """``count`` pages of ``size`` tokens."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count
        self._index: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._children = [0] * count
        """Indexed pages that follow each page."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Evictable too, after the others: pages of retained sessions."""
        self._retainers = [0] * count
        self._tails: OrderedDict[str, _Place] = OrderedDict()
        """Where each session's cached chain ends."""
        self._retained: dict[str, list[_Place]] = {}

    @property
    def available(self) -> int:
        """Pages that ``take`` could hand out: free or cached without a holder."""
        return len(self._free) + len(self._evictable) + len(self._kept)

    @property
    def held(self) -> int:
        return self.count - self.available

    def idle(self, page: int) -> bool:
        """Whether a cached page has no holder."""
        return page in self._evictable or page in self._kept

    def match(self, salt: str, tokens: Sequence[int], limit: int) -> tuple[list[int], Key | None]:
        """Cached pages of the longest prefix of ``tokens[:limit]``, and the key of the page after them (if full)."""
        found: list[int] = []
        parent: int | str = salt
        for start in range(0, limit - self.size + 1, self.size):
            key = (parent, tuple(tokens[start : start + self.size]))
            page = self._index.get(key)
            if page is None:
                return found, key
            found.append(page)
            parent = page
        return found, None

    def take(self, shared: Sequence[int], fresh: int) -> list[int] | None:
        """Hold the ``shared`` pages and ``fresh`` empty ones; None, and nothing held, when there is no room."""
        idle = sum(self.idle(page) for page in shared)
        if self.available - idle < fresh:
            return None
        for page in shared:
            self._hold(page)
        return [*shared, *(self._empty() for _ in range(fresh))]

    def publish(self, salt: str, tokens: Sequence[int], table: list[int], first: int, last: int) -> list[int]:
        """Make pages ``first:last`` of a held ``table`` findable; those before must be published already.

        Where the same content is cached already, the table's page is exchanged for it. Returns the positions
        whose pages are new to the index: their content has to be written.
        """
        written = []
        for position in range(first, last):
            parent = table[position - 1] if position else salt
            key = (parent, tuple(tokens[position * self.size : (position + 1) * self.size]))
            known = self._index.get(key)
            if known is None:
                self._index[key] = table[position]
                self._keys[table[position]] = key
                self._follow(key, 1)
                written.append(position)
            elif known != table[position]:
                self._hold(known)
                self._drop(table[position])
                table[position] = known
        return written

    def release(self, table: Sequence[int]) -> None:
        """Let go of a table; cached pages stay findable until their space is needed."""
        for page in reversed(table):
            self._drop(page)

    def reset(self) -> None:
        """Forget all content: nothing is found any more. Held pages stay held, and must be published from the start."""
        self._index.clear()
        self._keys.clear()
        for idle in (self._evictable, self._kept):
            self._free.extend(idle)
            idle.clear()
        self._children, self._retainers = [0] * self.count, [0] * self.count
        self._tails.clear()
        self._retained.clear()

    # --- sessions -----------------------------------------------------------------------------------------
    def note(self, session: str, table: Sequence[int], published: int) -> None:
        """A turn of the session ends and leaves the first ``published`` pages of its table cached. What was wished of
        the session before is over."""
        self._unretain(session)
        self._tails.pop(session, None)
        if published:
            page = table[published - 1]
            self._tails[session] = (page, self._keys[page])
            if len(self._tails) > self.count:
                self._unretain(self._tails.popitem(last=False)[0])

    def retain(self, session: str) -> None:
        """Evict what the session has cached after that of others. Unknown sessions are ignored."""
        self._unretain(session)
        chain = self._chain(session)
        for page, _ in chain:
            self._retainers[page] += 1
            if page in self._evictable:
                del self._evictable[page]
                self._kept[page] = None
        if chain:
            self._retained[session] = chain

    def dismiss(self, session: str) -> None:
        """Evict first what the session has cached and no other chain goes through. Unknown sessions are ignored."""
        self._unretain(session)
        going: list[int] = []
        for page, _ in self._chain(session):
            if page not in self._evictable or self._children[page] > (1 if going else 0):
                break
            going.append(page)
        for page in reversed(going):
            self._evictable.move_to_end(page, last=False)
        self._tails.pop(session, None)

    def _chain(self, session: str) -> list[_Place]:
        """The session's cached pages, from the last to the first; nothing if the last is gone."""
        chain: list[_Place] = []
        place = self._tails.get(session)
        while place is not None and self._keys.get(place[0]) is place[1]:
            chain.append(place)
            before = place[1][0]
            place = None if isinstance(before, str) else (before, self._keys[before])
        return chain

    def _unretain(self, session: str) -> None:
        for page, key in self._retained.pop(session, ()):
            if self._keys.get(page) is key:
                self._retainers[page] -= 1
                if not self._retainers[page] and page in self._kept:
                    del self._kept[page]
                    self._evictable[page] = None

    # --- pages ----------------------------------------------------------------------------------------------
    def _follow(self, key: Key, count: int) -> None:
        if not isinstance(key[0], str):
            self._children[key[0]] += count

    def _hold(self, page: int) -> None:
        self._evictable.pop(page, None)
        self._kept.pop(page, None)
        self._references[page] += 1

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            if page in self._keys:
                (self._kept if self._retainers[page] else self._evictable)[page] = None
            else:
                self._free.append(page)

    def _empty(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = (self._evictable or self._kept).popitem(last=False)
            key = self._keys.pop(page)
            del self._index[key]
            self._follow(key, -1)
            self._retainers[page] = 0
        self._references[page] = 1
        return page
