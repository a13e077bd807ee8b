"""The trained groups of a run on disk, for commands that learn from or replay them. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from venusrl.types import Group


def trained_groups(run_dir: Path) -> Iterator[Group]:
    """Batch by batch; those whose contents were pruned are passed over. Raises StoreError."""
    from venusrl.coordinator.errors import StorePruned
    from venusrl.coordinator.store.store import RunStore

    with RunStore.read(run_dir) as store:
        for version in range(store.current_version() + 1):
            try:
                batch = store.batch_for(version)
            except StorePruned:
                continue
            if batch is not None:
                yield from batch.groups
