"""Costs of models on GPUs against the published rows they stand for."""

from __future__ import annotations

import pytest

from venusrl.simulation import models
from venusrl.simulation.models import H100, H200, QWEN3_4B, QWEN3_8B, QWEN3_32B, Gpu, Model

LEADERBOARD = [
    (QWEN3_8B, 1, 400, {8: 8.2, 64: 14.0, 128: 20.7, 256: 31.4}),
    (QWEN3_32B, 2, 400, {8: 15.1, 64: 22.4, 128: 29.7, 256: 44.5}),
    (QWEN3_8B, 1, 4000, {64: 26.6}),
    (QWEN3_32B, 2, 4000, {64: 32.3}),
]
"""ML.ENERGY, H100, vLLM, bf16: milliseconds between tokens by batch; chat outputs of about 630 tokens (so some 400 of
context on average), and long outputs of 7 to 8 thousand."""


@pytest.mark.parametrize(("model", "width", "context", "rows"), LEADERBOARD)
def test_decoding_is_as_fast_as_the_leaderboard_says(
    model: Model, width: int, context: int, rows: dict[int, float]
) -> None:
    costs = models.engine_costs(model, H100, width)
    for batch, milliseconds in rows.items():
        assert costs.step_s(batch, batch * context) * 1e3 == pytest.approx(milliseconds, rel=0.10)


@pytest.mark.parametrize(
    ("model", "seconds"), [(QWEN3_4B, [0.16, 0.40, 1.12, 3.5]), (QWEN3_32B, [1.18, 2.6, 6.4, 17.4])]
)
def test_prefill_is_half_of_the_peak(model: Model, seconds: list[float]) -> None:
    costs = models.engine_costs(model, H100)
    for tokens, expected in zip((8192, 16384, 32768, 65536), seconds, strict=True):
        assert costs.prefill_s(tokens) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("model", "gpu", "width", "thousands"),
    [
        (QWEN3_4B, H100, 1, 407),
        (QWEN3_4B, H100, 2, 868),
        (QWEN3_4B, H200, 1, 779),
        (QWEN3_32B, H100, 2, 269),
        (QWEN3_32B, H100, 4, 788),
        (QWEN3_32B, H200, 1, 219),
    ],
)
def test_kv_is_what_the_weights_leave(model: Model, gpu: Gpu, width: int, thousands: int) -> None:
    assert models.kv_capacity(model, gpu, width) == pytest.approx(1000 * thousands, rel=0.003)


def test_synchronisation_takes_what_was_measured() -> None:
    moe = Model("qwen3-30b-a3b", 30.5e9, 30.2e9, 48, 32, 4, 128)
    assert models.sync_s(QWEN3_4B) == pytest.approx(5.0, abs=0.1)
    assert models.sync_s(moe) == pytest.approx(7.0, abs=0.1)


def test_a_trainer_step_is_its_flops_over_what_the_gpus_give() -> None:
    lengths = [40_000] * 128
    spec = models.trainer(QWEN3_32B, H100, 16)
    flops = 6 * 32.76e9 * sum(lengths) + sum(6 * 64 * 64 * 128 * n**2 for n in lengths)
    assert spec.step_s(lengths) - spec.fixed_s == pytest.approx(flops / (16 * 989e12 * 0.4))
    slow = models.trainer(QWEN3_32B, H100, 16, scale=2.0, sync_scale=0.5)
    assert slow.step_s(lengths) - slow.fixed_s == pytest.approx(2 * (spec.step_s(lengths) - spec.fixed_s))
    assert slow.fixed_s == pytest.approx(spec.fixed_s / 2)


def test_the_papers_clusters() -> None:
    small, _ = models.cluster(QWEN3_4B)
    large, _ = models.cluster(QWEN3_32B, link="rdma400", kv_control=True)
    assert (len(small.engines), len(large.engines)) == (16, 8)
    assert small.engines[0].costs.transfer_s(1) == float("inf")
    # 32k tokens of 32B over 400 Gbit/s.
    assert large.engines[0].costs.transfer_s(32768) == pytest.approx(0.19 + 0.03, abs=0.01)
    with pytest.raises(ValueError, match="cannot be split"):
        models.cluster(QWEN3_32B, gpus=2, trainer_gpus=1)
    with pytest.raises(ValueError, match="does not fit"):
        models.kv_capacity(Model("big", 70e9, 69e9, 80, 64, 8, 128), H100)
