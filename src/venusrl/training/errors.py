"""What stops a trainer. Each error's message is the cause the user reads; there is no other channel.

``EXIT_FAILED`` is the process's exit code for all of them: the trainer stated its cause, and starting it again would
change nothing. 0 means that the run is over; any other code is a crash.
"""

from __future__ import annotations

EXIT_FAILED = 3


class TrainingError(Exception):
    """The trainer cannot go on."""


class BatchError(TrainingError):
    """A batch breaks the data contract (masks, log-probabilities, spans); training on it would be wrong."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or read."""


class DiskFull(CheckpointError):
    """No space for a checkpoint. Earlier checkpoints are intact."""


class OutOfMemory(TrainingError):
    """A step did not fit in memory; the message names the option to lower."""


class ApiError(TrainingError):
    """The coordinator refused a call; the message carries its text."""


class CoordinatorLost(TrainingError):
    """The coordinator did not answer within the patience of the client."""
