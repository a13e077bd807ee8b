"""What a command printed, kept within a limit.

Owns: ``Capture``, which keeps the head and the tail of a stream and counts what fell out between.

Must not know: pipes, processes.

Guarantees: memory is bounded by the limit whatever is fed. Pure.
"""

from __future__ import annotations


class Capture:
    """Keeps the first and the last half of ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.seen = 0

    def feed(self, data: bytes) -> None:
        """Add what came next."""
        self.seen += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            # Cut rarely: a buffer of twice the size makes many small writes cheap.
            if len(self._tail) > 2 * self._tail_limit + 65536:
                del self._tail[: len(self._tail) - self._tail_limit]

    @property
    def over(self) -> bool:
        """Whether something was dropped: from here on the stream is only skimmed."""
        return self.seen > self._head_limit + self._tail_limit

    @property
    def dropped(self) -> int:
        """Bytes that are not in ``text``."""
        return max(0, self.seen - self._head_limit - self._tail_limit)

    def text(self) -> str:
        """The output; a cut is marked where it is."""
        if not self.over:
            return (self._head + self._tail).decode(errors="replace")
        tail = self._tail[len(self._tail) - self._tail_limit :]
        head_text, tail_text = self._head.decode(errors="replace"), tail.decode(errors="replace")
        return f"{head_text}\n[... {self.dropped} bytes cut ...]\n{tail_text}"
