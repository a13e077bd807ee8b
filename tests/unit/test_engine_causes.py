"""The cause of a dead vLLM, found in its log."""

from __future__ import annotations

from pathlib import Path

from venusrl.rollout.engines.causes import first_failure

BEGIN = "--- worker-0, start 1, 2026-12-01 04:20:17\n"
HARMLESS = '(APIServer pid=7) WARNING 12-01 04:20:39 [base.py:380] ValueError: Tokenizer not available when "x"\n'
FAILED = """\
(Worker pid=9) ERROR 12-01 04:20:54 [multiproc_executor.py:1063] Traceback (most recent call last):
(Worker pid=9) ERROR 12-01 04:20:54 [multiproc_executor.py:1063]     return self._op(*args, **kwargs)
(Worker pid=9) ERROR 12-01 04:20:54 [multiproc_executor.py:1063] RuntimeError: Unsupported head_dim=16 isa=2
(EngineCore pid=8) ERROR 12-01 04:20:54 [core.py:1512] RuntimeError: Worker failed with error 'Unsupported'
(APIServer pid=7) ERROR 12-01 04:20:54 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore
nanobind: leaked 2 functions!
 - leaked function "get_type"
"""
REFUSED = "(APIServer pid=7) ValueError: User-specified max_model_len (9) is greater than the derived (4)\n"


def cause(path: Path, text: str) -> str | None:
    path.write_text(text)
    return first_failure(path)


def test_the_process_that_failed_first_tells_why(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    assert cause(log, BEGIN + HARMLESS + FAILED) == "RuntimeError: Unsupported head_dim=16 isa=2"
    assert cause(log, BEGIN + HARMLESS + REFUSED) == REFUSED.partition(") ")[2].strip()


def test_an_earlier_start_and_warnings_are_not_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    assert cause(log, BEGIN + FAILED + BEGIN + HARMLESS) is None
    assert cause(log, BEGIN + FAILED + BEGIN + REFUSED) == REFUSED.partition(") ")[2].strip()
    assert first_failure(tmp_path / "gone.log") is None
