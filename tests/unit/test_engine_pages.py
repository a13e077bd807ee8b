"""What the order of eviction is worth: conversations on a pool that does not hold them all."""

from __future__ import annotations

import random

import pytest

from venusrl.rollout.engines.embedded.pages import Pages

SIZE, TURNS = 16, 8


def hit_rate(pages: int, *, dismiss: bool, live: int = 24, conversations: int = 600) -> float:
    """Of prompt tokens. ``live`` conversations at any time, of eight turns and a few hundred tokens each."""
    rng, pool = random.Random(0), Pages(pages, SIZE)
    talks: dict[str, list[int]] = {}
    turns: dict[str, int] = {}
    found_tokens = prompt_tokens = ended = 0

    def words(least: int, most: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(rng.randrange(least, most))]

    while ended < conversations:
        if len(talks) < live:
            talks[f"t{ended + len(talks)}"] = words(60, 200)
            continue
        name = rng.choice(list(talks))
        tokens = talks[name]
        found, _ = pool.match("", tokens, len(tokens) - 1)
        found_tokens += len(found) * SIZE
        prompt_tokens += len(tokens)
        tokens += words(10, 60)
        table = pool.take(found, -(-len(tokens) // SIZE) - len(found))
        assert table is not None
        full = len(tokens) // SIZE
        pool.publish("", tokens, table, len(found), full)
        pool.note(name, table, full)
        pool.release(table)
        tokens += words(10, 80)
        turns[name] = turns.get(name, 0) + 1
        if turns[name] == TURNS:
            ended += 1
            del talks[name]
            if dismiss:
                pool.dismiss(name)
    return found_tokens / prompt_tokens


@pytest.mark.parametrize("pages", [400, 500, 600])
def test_conversations_that_are_over_make_room_for_live_ones(pages: int) -> None:
    """Least recently used alone keeps the last words of the dead: they were used after what waits for its tool."""
    assert hit_rate(pages, dismiss=True) > hit_rate(pages, dismiss=False) + 0.1
