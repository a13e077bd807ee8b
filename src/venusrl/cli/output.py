"""Where the command line prints.

Owns: the two consoles and the exit codes. Results go to stdout (one JSON document with ``--json``, nothing
else); progress, hints and errors go to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """A command cannot do what was asked; the message says why and names the mend."""


def stdout() -> Console:
    # Made at each use: a console keeps the stream it was made with, and streams get redirected.
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def stderr() -> Console:
    return Console(file=sys.stderr, highlight=False)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=str, allow_nan=False) + "\n")
    sys.stdout.flush()


def write_json(value: Any, file: Path | None) -> None:
    """Into ``file``; ``-`` is stdout, None nowhere. Raises CommandError."""
    if file is None:
        return
    if file == Path("-"):
        print_json(value)
        return
    try:
        file.write_text(json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise CommandError(f"cannot write {file}: {error.strerror}") from error


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """A plain table; the columns named in ``right`` hold numbers."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def warn(message: str) -> None:
    stderr().print(Text.assemble(("warning: ", "yellow"), message), soft_wrap=True)
