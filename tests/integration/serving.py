"""``venusrl env serve`` as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

COMMAND = [sys.executable, "-m", "venusrl.cli.main", "env"]


class Serving:
    """``venusrl env serve`` on one state directory, and what it printed."""

    def __init__(self, state: Path, *options: str) -> None:
        self.state = state
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--state", str(state), "--listen", "127.0.0.1:0", "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("\n}\n"):
            line = self.process.stdout.readline()
            if not line:
                assert self.process.stderr is not None
                raise AssertionError(self.process.stderr.read())
            text += line
        self.told: dict[str, Any] = json.loads(text)
        environment = self.told["environment"]
        self.options = {
            "api_key": environment["E2B_API_KEY"],
            "api_url": environment["E2B_API_URL"],
            "sandbox_url": environment["E2B_SANDBOX_URL"],
        }

    def end(self, number: int) -> str:
        """What it said on stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return errors
