"""What the operating system says of a disk, as errors of the store.

Owns: the translation, and the sync of directories. Must not know: what is written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from venusrl.coordinator.errors import StoreError, StoreFull

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn an OSError into StoreFull or StoreError; ``path`` is what was being written."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StoreFull(
                f"no room to write {path} ({error.strerror}): free some space, then resume; nothing finished is lost"
            ) from error
        raise StoreError(f"{path} cannot be written: {error.strerror}") from error


def sync_directories(*folders: Path) -> None:
    """A new file survives a power cut only once its directory is on the disk as well."""
    for folder in folders:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
