"""What can go wrong with a run, typed by where it happened.

Owns: the errors of the coordinator, its store and its child processes. Must not know: how they are shown.

Guarantees: ``str(error)`` is one message a user can act on; the original cause is chained.
"""

from __future__ import annotations


class CoordinatorError(Exception):
    """Base of all of them."""


class RunFailed(CoordinatorError):
    """The run cannot go on. ``reason`` is a stable code; the message and ``__cause__`` say why."""

    def __init__(self, message: str, reason: str = "run_failed") -> None:
        super().__init__(message)
        self.reason = reason


class ShutdownTimeout(CoordinatorError):
    """Something did not stop in its time and was left behind; the message names it."""


class StoreError(CoordinatorError):
    """The run store could not do what was asked."""


class StoreFull(StoreError):
    """No room to write. Nothing that was acknowledged is lost; free space and resume."""


class StoreLocked(StoreError):
    """Another process runs on this directory."""


class StoreExists(StoreError):
    """A run is already there and it was not asked to resume."""


class StoreMissing(StoreError):
    """There is no run to resume or show."""


class StoreVersionError(StoreError):
    """The store was written by another release of VenusRL, or is not a store."""


class StoreCorrupt(StoreError):
    """The store or a blob does not read back as it was written."""


class StoreConflict(StoreError):
    """The request contradicts what is recorded (a programming error, or a peer that lost its place)."""


class StorePruned(StoreError):
    """The trajectories asked for were deleted, as the recipe wants it."""


class RecipeChanged(StoreError):
    """A resumed run was given another recipe in a key that may not change."""


class TasksChanged(StoreError):
    """A resumed run was given another set of tasks."""


class ProcessError(CoordinatorError):
    """A child process could not be started, or died once too often; carries its last log lines."""
