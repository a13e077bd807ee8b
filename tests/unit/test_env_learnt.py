"""What admission learned, over a restart."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from tests.waiting import until

from venusrl.sandboxes.admission.api import Admit, Deny, HostView, Request
from venusrl.sandboxes.admission.footprint import FootprintAdmission
from venusrl.sandboxes.manager.learnt import EVERY_S, KeptFootprints
from venusrl.testing.clock import VirtualClock

MIB = 1 << 20
HOST = HostView("local", capacity=600 * MIB, available=600 * MIB, cpus=8.0, shared={"t": 0})
REQUEST = Request(template="t", group="", declared=512 * MIB, cpus=0.1)


def taught() -> FootprintAdmission:
    made = FootprintAdmission()
    for number in range(200):
        for moment in range(0, 600, 5):
            made.observe("t", "", f"s{number}", float(moment), 20 * MIB)
        made.ended(f"s{number}")
    made.calibration.factor = 1.5
    return made


def believes_it_small(admission: FootprintAdmission) -> bool:
    """Whether a second one of a template that declares most of the host is admitted."""
    answer = admission.place((HOST,), msgspec.structs.replace(REQUEST, declared=700 * MIB))
    assert isinstance(answer, Admit | Deny)
    return isinstance(answer, Admit)


async def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    before = KeptFootprints(path, taught(), VirtualClock())
    before.start()
    await before.close()
    assert not believes_it_small(FootprintAdmission())
    admission = FootprintAdmission()
    after = KeptFootprints(path, admission, VirtualClock())
    after.start()
    assert believes_it_small(admission)
    assert admission.calibration.factor == 1.5
    await after.close()


async def test_a_killed_process_loses_the_last_minute_at_most(tmp_path: Path) -> None:
    clock = VirtualClock()
    path = tmp_path / "learned.json"
    kept = KeptFootprints(path, taught(), clock)
    kept.start()
    await clock.run_for(EVERY_S + 1.0)
    await until(path.exists, "the file, which a thread writes")
    await kept.close()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b'{"version": 2}', b'{"version":1,"learning":{}}'])
async def test_a_damaged_file_is_a_warning(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(content)
    admission = FootprintAdmission()
    kept = KeptFootprints(path, admission, VirtualClock())
    with caplog.at_level(logging.WARNING):
        kept.start()
    assert "learning begins anew" in caplog.text
    assert admission.learned.kept(10) == {}
    await kept.close()
    assert msgspec.json.decode(path.read_bytes())["version"] == 1
