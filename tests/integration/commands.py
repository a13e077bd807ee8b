"""Owns: running the command line within the test's own process, which is left as it was. Knows no subcommand."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from venusrl.cli.main import main


class Left(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


Command = Callable[..., Left]


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *first: str) -> Command:
    """``venusrl`` with ``first`` before the arguments of each call."""
    monkeypatch.delenv("VENUSRL_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv: object) -> Left:
        monkeypatch.setattr(sys, "argv", ["venusrl", *first, *map(str, argv)])
        ending = signal.getsignal(signal.SIGTERM)
        loggers = [(each, each.handlers[:], each.level) for each in map(logging.getLogger, (None, "venusrl"))]
        try:
            with pytest.raises(SystemExit) as left:
                main()
        finally:
            signal.signal(signal.SIGTERM, ending)
            for logger, handlers, level in loggers:
                logger.handlers[:] = handlers
                logger.setLevel(level)
        out, err = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return Left(left.value.code, out, err)

    return run
