"""Keeping what a command printed within a limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from venusrl.sandboxes.runtimes.namespace.output import Capture


def test_short_output_passes_whole() -> None:
    capture = Capture(16)
    capture.feed(b"hello ")
    capture.feed(b"world")
    assert (capture.text(), capture.dropped, capture.over) == ("hello world", 0, False)


def test_head_and_tail_are_kept_and_the_cut_is_marked() -> None:
    capture = Capture(8)
    capture.feed(b"abcdefghijklmnop")
    assert capture.dropped == 8
    assert capture.text() == "abcd\n[... 8 bytes cut ...]\nmnop"


def test_bad_bytes_are_replaced() -> None:
    capture = Capture(100)
    capture.feed(b"ok \xff\xfe")
    assert capture.text() == "ok \ufffd\ufffd"


@given(st.integers(1, 64), st.lists(st.binary(max_size=50)))
def test_any_feeding_keeps_the_same_bytes(limit: int, pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    capture = Capture(limit)
    for piece in pieces:
        capture.feed(piece)
    assert capture.dropped == max(0, len(whole) - limit)
    if not capture.over:
        assert capture.text() == whole.decode(errors="replace")
    else:
        head, tail = limit - limit // 2, limit // 2
        assert capture.text().startswith(whole[:head].decode(errors="replace"))
        assert capture.text().endswith(whole[len(whole) - tail :].decode(errors="replace"))


def test_a_flood_takes_no_memory() -> None:
    capture = Capture(1000)
    for _ in range(100):
        capture.feed(b"x" * 65536)
    assert capture.dropped == 100 * 65536 - 1000
    assert len(capture.text()) < 1100
