"""The programs of sandboxes are compiled for the other kind of machine too. They are not run: there is none here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from venusrl.sandboxes.agent import build
from venusrl.sandboxes.runtimes.namespace import making

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="no C compiler: pip install 'venusrl[env]'"
)
AARCH64, ELF_STATIC = 183, 2


@pytest.mark.parametrize("folder", [build.AGENT, Path(making.__file__).parent], ids=["agent", "maker"])
async def test_it_compiles_for_aarch64(folder: Path) -> None:
    program = await build.program(machine="aarch64", folder=folder)
    header = program.read_bytes()[:64]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[16:18], "little") == ELF_STATIC
    assert int.from_bytes(header[18:20], "little") == AARCH64
