"""``venusrl env template`` as a newcomer meets it: sizes, options that do not fit, what is freed, places that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integration import microvms
from tests.integration.serving import COMMAND, Serving

from venusrl.sandboxes.host.api import Order
from venusrl.sandboxes.host.records import Record
from venusrl.sandboxes.templates.store import Store


def env(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments, "--state", str(state)], capture_output=True, text=True, timeout=120, check=False
    )


def told(state: Path, *arguments: str) -> Any:
    done = env(state, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    for name in ("bin", "etc", "tmp", "home/user"):
        (made / name).mkdir(parents=True)
    (made / "bin/sh").write_text("#!")
    (made / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n")
    (made / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    return made


def test_sizes_hold_for_what_is_imported(tmp_path: Path, root: Path) -> None:
    state = tmp_path / "state"
    made = told(state, "template", "build", str(root), "mine", "--cpus", "2", "--memory", "300", "--disk", "40")
    image = Store(state / "templates").image(made["image"])
    assert (image.cpus, image.memory_mib, image.disk_mib) == (2, 300, 40)
    too_much = env(state, "template", "build", str(root), "mine", "--memory", "99999999")
    assert (too_much.returncode, "cannot be had: ask for 1 to" in too_much.stderr) == (1, True)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--ref", "x"), "--ref means nothing without --oci"),
        (("--force",), "--force means nothing without --dockerfile"),
        (("--ready", "true"), "--ready means nothing without --start"),
        (("--image", "x"), "name one source"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, root: Path, options: tuple[str, ...], wanted: str) -> None:
    done = env(tmp_path / "state", "template", "build", str(root), "mine", *options)
    assert done.returncode == 1
    assert wanted in done.stderr
    assert not (tmp_path / "state").exists()


def test_gc_frees_what_nobody_needs_and_nothing_else(tmp_path: Path, root: Path) -> None:
    state = tmp_path / "state"
    made = told(state, "template", "build", str(root), "mine")
    assert told(state, "template", "gc")["layers"] == 0
    assert env(state, "template", "rm", "mine").returncode == 0
    image = Store(state / "templates").image(made["image"])
    record = Record(Order("s", "mine", "namespace"), image, "paused", 0, 0.0, 0.0)
    kept = state / "host" / "sandboxes" / "s.json"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(msgspec.json.encode(record))
    assert told(state, "template", "gc", "--cache-days", "0")["layers"] == 0, "a sandbox is of it"
    kept.write_text("{")
    damaged = env(state, "template", "gc")
    assert (damaged.returncode, "cannot be read" in damaged.stderr) == (1, True)
    kept.unlink()
    assert told(state, "template", "gc", "--cache-days", "0")["layers"] == len(image.layers)
    assert told(state, "template", "list") == []


@pytest.mark.parametrize(
    "command",
    [
        ("template", "list"),
        ("template", "build", "base"),
        ("key", "list"),
        ("setup", "microvm"),
        ("serve", "--listen", "127.0.0.1:0"),
        ("node", "--join", "http://127.0.0.1:1", "--key", "k", "--listen", "127.0.0.1:0"),
    ],
)
def test_a_state_directory_that_cannot_be_is_told(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("")
    done = env(tmp_path / "file" / "state", *command)
    assert done.returncode == 1
    assert "choose another --state" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="microVMs confine QEMU as root does: run as root")
def test_gc_frees_what_a_running_service_had_derived(tmp_path: Path) -> None:
    """The sealed memory of a virtual machine's template, once neither it nor a sandbox of it is there."""
    e2b = pytest.importorskip("e2b", reason="the E2B SDK is not installed: install the dev extra")
    state = tmp_path / "service"
    microvms.tiny_template(tmp_path, COMMAND, ["service"])
    derived = state / "runtimes" / "microvm" / "templates"
    serving = Serving(state, "--runtime", "microvm", "--kill-on-exit")
    try:
        box = e2b.Sandbox.create("tiny", timeout=600, **serving.options)
        assert list(derived.iterdir())
        assert env(state, "template", "rm", "tiny").returncode == 0
        assert told(state, "template", "gc", "--cache-days", "0")["layers"] == 0
        box.kill()
        assert told(state, "template", "gc", "--cache-days", "0")["layers"] > 0
        deadline = time.monotonic() + 120
        while list(derived.iterdir()):
            assert time.monotonic() < deadline, "it is still there"
            time.sleep(0.2)
    finally:
        serving.end(signal.SIGINT)
