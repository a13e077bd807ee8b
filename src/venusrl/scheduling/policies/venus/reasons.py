"""Why the ``venus`` policy decided what it decided.

Owns: the codes, stable for dashboards and records; one meaning each.

| code | on | meaning |
|---|---|---|
| ``resident`` | Dispatch | its KV is there: it goes on |
| ``deadline`` | Dispatch | enters; the quota forces its group into the next batch |
| ``frontier`` | Dispatch | enters; its group is of the best admissible batch |
| ``aged`` | Dispatch | enters; it waited so long that it counts as frontier |
| ``background`` | Dispatch | enters; room was left behind the frontier |
| ``moved`` | Dispatch | leaves its KV behind for a worker where it finishes sooner |
| ``no_worker`` | Hold | none is up |
| ``staleness_quota`` | Hold | one more group may not start at this version |
| ``weights``, ``draining`` | Hold | no worker that it may go to has the weights, or takes turns now |
| ``slots`` | Hold | all sequences of the workers that it may go to are taken |
| ``kv`` | Hold | its KV, or the growth of it, fits nowhere now |
| ``pacing`` | Hold | it would fit now, but not as the working set grows |
| ``interference`` | Hold | it would slow the frontier too much |
| ``sandbox_paused`` | Hold | its sandbox gave its memory to the frontier |
| ``transfer`` | Hold | its KV is on the way to another worker |
| ``gap`` | ReleaseKV | its tool call takes longer than its KV is worth |
| ``displaced`` | ReleaseKV | a more urgent turn needs the room |
| ``moved`` | ReleaseKV | its trajectory goes on elsewhere (crowded, or waiting for weights for long) |
| ``preempted`` | Preempt | a frontier turn waits for the room of this background one |
| ``migrated`` | Migrate | copying its KV is cheaper than waiting or computing it anew |
| ``opened``, ``needed``, ``resumed`` | CreateSandbox | ahead of need; its priority changed; wanted back after a pause |
| ``yields`` | PauseSandbox | a frontier trajectory is without a sandbox |
"""

from __future__ import annotations

RESIDENT = "resident"
DEADLINE = "deadline"
FRONTIER = "frontier"
AGED = "aged"
BACKGROUND = "background"
MOVED = "moved"
NO_WORKER = "no_worker"
SLOTS = "slots"
KV = "kv"
PACING = "pacing"
INTERFERENCE = "interference"
SANDBOX_PAUSED = "sandbox_paused"
TRANSFER = "transfer"
GAP = "gap"
DISPLACED = "displaced"
PREEMPTED = "preempted"
MIGRATED = "migrated"
OPENED = "opened"
NEEDED = "needed"
RESUMED = "resumed"
YIELDS = "yields"
