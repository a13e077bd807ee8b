"""The arithmetic of admissible batches, on plain numbers.

Owns: how many groups of each age a batch must hold so that no group is ever forced to be dropped, the choice
of a batch under that rule, and what stands in the way of one. Must not know: trajectories, workers, events.

Throughout, ``n`` is the version that the next batch trains, B the groups of a batch, S the staleness bound, and
a group that started at version s has the *last admissible version* s + S. N_j is the number of untrained started
groups with last admissible version <= n + j. A batch is admissible iff for every j in 0..S it holds at least
r_j = N_j - j*B of them.

**Theorem.** If at most floor((1 + alpha) * B) groups are outstanding (untrained, or in a batch whose product is not
published), alpha <= S, groups start at the published version, and only admissible batches form, then
N_j <= (j + 1) * B for every j >= 0 and N_j = 0 for j < 0: no group ever outlives its bound, and r_j <= B, so that B
complete groups that include the forced ones always make a batch. By induction over what can happen:

- *A group starts* at the published version c = n - k: the k batches n-k..n-1 are formed and not published, so their
  k*B groups are outstanding and at most (1 + S - k) * B are untrained. (That leaves no room when k > S.) The newcomer
  counts in N_j for j >= S - k only, where N_j <= untrained <= (S - k + 1) * B <= (j + 1) * B.
- *Trajectories start later than their group*, as replacements or because they waited: c never decreases, so the
  group's start, the smallest among members still eligible, stays. A group that was opened long ago and not started
  has no start and counts nowhere until it starts as above.
- *The start of a group rises* (its oldest member failed), *its last started member fails*, or *it closes*: some N_j
  decrease, none increases.
- *A batch forms*, n becomes n' = n + 1: N'_j = N_{j+1} - (its groups with last <= n + j + 1) <= N_{j+1} - r_{j+1}
  <= (j + 1) * B for j < S; nothing started is left with last < n' because r_0 = N_0; and N'_j for j >= S is at most the
  number untrained, which is at most (1 + S) * B.
- *A version is published*: n stays, and so does every N_j.

A dropped group only lowers counts. On-policy (alpha = 0) the window is B, so a batch needs all that is open, and
nothing opens until its product is published: every start is n, whatever S.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Rank = tuple[float, ...]


class Candidate(NamedTuple):
    """A group as the quota sees it. ``last``: last admissible version, None if not started. Lower ranks go first."""

    group: str
    last: int | None
    rank: Rank


class Selection(NamedTuple):
    """A batch in rank order. ``mandatory``: those the quota forced in; ``at_deadline``: those forced by j = 0."""

    groups: tuple[str, ...]
    mandatory: frozenset[str]
    at_deadline: frozenset[str]


def cumulative(lasts: Mapping[int, int], n: int, staleness: int) -> list[int]:
    """N_j for j in -1..S (index j + 1), from the number of started groups by last admissible version."""
    counts = [0] * (staleness + 2)
    for last, number in lasts.items():
        counts[max(0, min(last - n + 1, staleness + 1))] += number
    for level in range(1, len(counts)):
        counts[level] += counts[level - 1]
    return counts


def required(lasts: Mapping[int, int], n: int, batch_groups: int, staleness: int) -> list[int]:
    """r_j for j in 0..S: how many groups with last admissible version <= n + j the batch of n must hold."""
    return [max(0, count - j * batch_groups) for j, count in enumerate(cumulative(lasts, n, staleness)[1:])]


def is_admissible(batch: Iterable[int | None], lasts: Mapping[int, int], n: int, batch_groups: int, s: int) -> bool:
    """Whether a batch with these last admissible versions keeps every other group trainable and is itself in time."""
    batch = list(batch)
    if any(last is not None and last < n for last in batch):
        return False
    needs = required(lasts, n, batch_groups, s)
    return all(sum(1 for last in batch if last is not None and last <= n + j) >= r for j, r in enumerate(needs))


def select(candidates: Iterable[Candidate], needs: Sequence[int], n: int, batch_groups: int) -> Selection | None:
    """The admissible batch of lowest ranks, or None when these candidates cannot make one.

    Level by level the quota takes the lowest ranks that satisfy it, then the lowest of all fill up. The levels
    are nested, so this is optimal: a choice of equal size that obeys the quota can be turned into it by exchanges
    that never raise a rank; and it finds a batch iff one exists.
    """
    ordered = sorted((c for c in candidates if c.last is None or c.last >= n), key=lambda c: (c.rank, c.group))
    chosen: dict[str, Candidate] = {}
    at_deadline: frozenset[str] = frozenset()
    for level, need in enumerate(needs):
        for candidate in ordered:
            if len(chosen) >= need:
                break
            if candidate.last is not None and candidate.last <= n + level:
                chosen.setdefault(candidate.group, candidate)
        if len(chosen) < need:
            return None
        if level == 0:
            at_deadline = frozenset(chosen)
    mandatory = frozenset(chosen)
    for candidate in ordered:
        if len(chosen) >= batch_groups:
            break
        chosen.setdefault(candidate.group, candidate)
    if len(chosen) != batch_groups:
        return None
    groups = tuple(c.group for c in sorted(chosen.values(), key=lambda c: (c.rank, c.group)))
    return Selection(groups, mandatory, at_deadline)


def obstacles(
    complete: Mapping[int, int], incomplete: Iterable[Candidate], needs: Sequence[int], n: int
) -> tuple[str, ...]:
    """The fewest incomplete groups without which the complete ones satisfy the quota, highest ranks first.

    ``complete``: how many complete groups have each last admissible version.
    """
    worst_first = sorted(incomplete, key=lambda c: (c.rank, c.group), reverse=True)
    removed: dict[str, None] = {}
    for level, need in enumerate(needs):
        have = sum(number for last, number in complete.items() if last <= n + level)
        for candidate in worst_first:
            if need - len(removed) <= have:
                break
            if candidate.last is not None and candidate.last <= n + level:
                removed.setdefault(candidate.group)
    return tuple(removed)


def excess(started: Iterable[Candidate], n: int, batch_groups: int, staleness: int) -> tuple[str, ...]:
    """The fewest groups to give up so that N_j <= (j + 1) * B holds again for every j >= -1.

    Empty by the theorem; it is asked all the same, because a resumed run may have a smaller window than before and
    a foreign trainer may publish what it likes. Highest ranks are given up first.
    """
    worst_first = sorted(started, key=lambda c: (c.rank, c.group), reverse=True)
    given_up: dict[str, None] = {}
    for level in range(-1, staleness + 1):
        due = [c for c in worst_first if c.last is not None and c.last <= n + level and c.group not in given_up]
        for candidate in due[: max(0, len(due) - (level + 1) * batch_groups)]:
            given_up.setdefault(candidate.group)
    return tuple(given_up)
