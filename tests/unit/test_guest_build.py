"""The agent's program is compiled once, kept by what it was made of, and in place whole or not at all."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from venusrl.sandboxes.agent import build
from venusrl.sandboxes.protocol import RuntimeUnavailable

COMPILES = 'echo once >> "$(dirname "$0")/ran"; while [ "$1" != -o ]; do shift; done; echo program > "$2"'


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Stands for Python, which would run Zig's compiler."""
    fake = folder / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.test")


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache" / "agent").iterdir())


async def test_many_who_ask_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, COMPILES)
    asked = (build.program(tmp_path / "cache", "x86_64") for _ in range(5))
    places = set(await asyncio.gather(*asked))
    (place,) = places
    assert kept(tmp_path) == [place.name]
    assert place.read_text() == "program\n"
    assert os.access(place, os.X_OK)
    assert (tmp_path / "ran").read_text() == "once\n"
    assert await build.program(tmp_path / "cache", "aarch64") != place


async def test_what_the_compiler_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, "echo agent.c:1: no such thing >&2; exit 1")
    with pytest.raises(RuntimeUnavailable, match=r"agent.c:1: no such thing"):
        await build.program(tmp_path / "cache", "x86_64")
    assert kept(tmp_path) == []


async def test_a_compilation_that_is_given_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 60")
    task = asyncio.create_task(build.program(tmp_path / "cache", "x86_64"))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():  # noqa: ASYNC110 - a file's
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert kept(tmp_path) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_what_was_left_long_ago_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, COMPILES)
    left = tmp_path / "cache" / "agent" / "compiling-left"
    left.mkdir(parents=True)
    os.utime(left, (1, 1))
    place = await build.program(tmp_path / "cache", "x86_64")
    assert kept(tmp_path) == [place.name]


def test_the_place_depends_on_what_it_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    one = build.place(tmp_path, "x86_64")
    assert build.place(tmp_path, "x86_64") == one
    assert build.place(tmp_path, "aarch64") != one
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2")
    assert build.place(tmp_path, "x86_64") != one
    with pytest.raises(RuntimeUnavailable, match="x86_64 or aarch64"):
        build.place(tmp_path, "riscv64")


def test_without_a_compiler_the_mend_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(RuntimeUnavailable, match=r"pip install 'venusrl\[env\]'"):
        build.place(tmp_path, "x86_64")
