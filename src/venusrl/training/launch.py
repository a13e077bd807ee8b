"""How the coordinator starts the trainer and the model conversion, without importing torch.

Owns: the command lines of this package's programs. The bearer key travels in the environment
(``VENUSRL_API_KEY``), never on a command line that other users of the machine could read.
"""

from __future__ import annotations

import sys
from pathlib import Path

KEY_VARIABLE = "VENUSRL_API_KEY"


def trainer_command(*, run_dir: Path, url: str, ranks: int = 1) -> list[str]:
    """Command of the trainer. With ``ranks`` > 1 torchrun starts that many processes on this machine (FSDP2)."""
    program = ["-m", "venusrl.training.trainer", "--run-dir", str(run_dir), "--url", url]
    if ranks == 1:
        return [sys.executable, *program]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    return [sys.executable, *launcher, *program]


def convert_command(model_path: str) -> list[str]:
    """Command that prepares ``model.path`` for ``venusrl.models.resolve`` (converts GGUF wheels once; else a no-op)."""
    return [sys.executable, "-m", "venusrl.training.gguf", model_path]
