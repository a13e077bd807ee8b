"""Which page of the KV pool holds which tokens.

Owns: page ids, their reference counts, and the prefix index (full pages, found by content and by the whole
chain before them, within a salt).

Must not know: tensors, sequences, time.

Guarantees:
- A page is free, cached (found by content; evicted when space is needed), or held; never two of them.
- Lookups compare tokens, not hashes: a hit is the same tokens after the same tokens under the same salt.
- Least recently released pages go first, a chain's tail before its head, so that no cached page is ever
  reachable only through an evicted one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Key = tuple[int | str, tuple[int, ...]]
"""The page before (or the salt), and the tokens of the page."""


class Pages:
    """``count`` pages of ``size`` tokens."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count
        self._index: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that ``take`` could hand out: free or cached without a holder."""
        return len(self._free) + len(self._evictable)

    @property
    def held(self) -> int:
        return self.count - self.available

    def idle(self, page: int) -> bool:
        """Whether a cached page has no holder."""
        return page in self._evictable

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
        self._free.extend(self._evictable)
        self._evictable.clear()

    def _hold(self, page: int) -> None:
        self._evictable.pop(page, None)
        self._references[page] += 1

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            if page in self._keys:
                self._evictable[page] = None
            else:
                self._free.append(page)

    def _empty(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._evictable.popitem(last=False)
            del self._index[self._keys.pop(page)]
        self._references[page] = 1
        return page
