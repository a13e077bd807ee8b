"""A process that leaves says all that it had to say, and its exit code."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging, sys
from venusrl.leaving import leave
logging.basicConfig(level="INFO", format="%(message)s")
try:
    sys.stdout.write("said")
    logging.info("logged")
    leave(3)
finally:
    sys.stdout.write(" and torn down")
"""


def test_what_was_written_is_out_and_nothing_is_torn_down() -> None:
    end = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (end.returncode, end.stdout, end.stderr) == (3, "said", "logged\n")
