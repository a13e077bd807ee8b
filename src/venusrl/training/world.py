"""This process among the trainer's ranks.

Owns: joining and leaving the process group, the device, CPU threads and pinning, and sharing rank 0's answers.

Must not know: what is shared. Guarantees: alone, nothing here touches ``torch.distributed``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from venusrl.recipe import TrainingSection
from venusrl.training.errors import TrainingError

_T = TypeVar("_T")
COLLECTIVE_TIMEOUT = timedelta(minutes=60)
"""A rank may wait for another's step or checkpoint this long; a rank that died is noticed by the launcher at once."""


def _cpu() -> torch.device:
    return torch.device("cpu")


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=_cpu)

    @property
    def sharded(self) -> bool:
        return self.size > 1

    @property
    def leads(self) -> bool:
        """Rank 0 alone talks to the coordinator and writes."""
        return self.rank == 0

    def share(self, make: Callable[[], _T]) -> _T:
        """Rank 0's ``make()``, on every rank."""
        if not self.sharded:
            return make()
        box: list[_T | None] = [make() if self.leads else None]
        dist.broadcast_object_list(box, src=0, device=self.device)
        value: _T = box[0]  # type: ignore[assignment]
        return value

    def barrier(self) -> None:
        if self.sharded:
            dist.barrier()


@contextmanager
def join_world(options: TrainingSection) -> Iterator[World]:
    """Set this process up as the recipe says and join the ranks that torchrun started, if it did."""
    _pin(options.cpus)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=device)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield World(rank, size, device)
    finally:
        dist.destroy_process_group()


def _pin(cpus: tuple[int, ...]) -> None:
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        allowed = sorted(os.sched_getaffinity(0))
        raise TrainingError(f"training.cpus = {list(cpus)} cannot be used here (allowed: {allowed})") from error
