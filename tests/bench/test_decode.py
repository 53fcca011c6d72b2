"""The decode benchmarks' own checks, under the interpreter: each must catch a wrong operation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quantlab.bench.decode import (
    CONVENTIONAL,
    FP32,
    READS,
    Case,
    bench_decode,
    case_row,
    cases,
    tiny_cases,
)
from quantlab.bench.decode_model import bench_model
from quantlab.bench.decode_rivals import rival_rows
from quantlab.bench.engine import TINY, build_model
from quantlab.bench.measure import Bench
from quantlab.engine.decoder import Decoder
from quantlab.replay import parse_policy
from tests.kernels.device import DEVICE, MARKS

from quantlab_kernels.decode import LayerCache  # isort: skip
from quantlab_kernels.decode_trial import Trial  # isort: skip

pytestmark = MARKS
BENCH = Bench(DEVICE, repeats=1, warmup=0)
GDN, MAMBA2 = (case.shape for case in tiny_cases()[::3])
SEPARATE = parse_policy("nvfp4 / fp16-sr L=3")


def test_rows_are_compared_with_those_before_them() -> None:
    wanted = [
        Case(shape=MAMBA2, policy=p, batch=2) for p in (CONVENTIONAL, replace(FP32, window=2))
    ]
    ceiling, first, second = bench_decode(BENCH, wanted, ceiling_elements=1 << 12)
    assert ceiling.values["read_tb_per_s"] > 0
    assert second.name == "mamba2 B=2 shared fp32 L=2" and second.status == "ok"
    ratio = first.values["window_us"] / second.values["window_us"]
    assert second.values["over_conventional"] == pytest.approx(ratio)
    # (2 · 2 states of the conventional steps) over (1 + 2), but for records and tokens
    assert 1.1 < second.values["bound_over_conventional"] < 4 / 3


class OtherSeed(Trial):
    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.cache.seed += 1


class OtherDecays(Trial):
    def _reference(self, row: int) -> Any:
        held = super()._reference(row)
        held.buffer = [replace(r, log_decay=0.5 * r.log_decay) for r in held.buffer]
        return held


def flip_code(cache: LayerCache) -> None:
    """Move row 1's largest FP16 code by a place: what a boundary between two sums may do."""
    codes = cache.recur.codes[1].view(torch.int16).view(-1)
    codes[codes.view(torch.float16).float().abs().argmax()] += 1


def spoil_record(cache: LayerCache) -> None:
    """Move row 0's recorded corrections by two places."""
    cache.written[0, 1].view(torch.int16).add_(2)


@pytest.mark.parametrize(
    "policy, rewrite, fault",
    [
        ("shared:fp16-sr L=3", flip_code, None),
        ("shared:fp32 L=3", spoil_record, "step 1, row 0: the recorded correction is off"),
    ],
)
def test_what_a_step_stored_is_what_the_next_is_compared_from(
    policy: str, rewrite: Any, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, taken = LayerCache.step, []

    def step(cache: LayerCache, *args: Any) -> None:
        steps(cache, *args)
        if not taken:
            # row 0 has recorded its second token, row 1 has flushed and recorded none
            taken.append(True)
            rewrite(cache)

    monkeypatch.setattr(LayerCache, "step", step)
    found = Trial(GDN, parse_policy(policy), 2, device=DEVICE, settle=1).fault()
    assert found is None if fault is None else found is not None and found.startswith(fault)


@pytest.mark.parametrize(
    "mutant, reason",
    [(OtherSeed, "of the recur copy's values differ"), (OtherDecays, "outputs are off by")],
)
def test_a_wrong_kernel_has_no_speed(mutant: type[Trial], reason: str) -> None:
    case = Case(shape=MAMBA2, policy=SEPARATE, batch=2)
    row = case_row(BENCH, case, copy=1.0, read=1.0, done={}, trial=mutant)
    assert row.status == "refused" and not row.values
    assert reason in row.reason


def test_what_is_measured() -> None:
    wanted = cases()
    names = [case.name for case in wanted]
    assert len(set(names)) == len(names)
    order = {name: i for i, name in enumerate(names)}
    for batch in (1, 32, 256):
        for policy in (FP32, *READS):
            name = f"Qwen3.5-4B B={batch} {policy.short}"
            assert order[f"Qwen3.5-4B B={batch} conventional fp32"] < order[name]
    assert "Nemotron-3-Nano-4B B=256 shared fp32 corrections=fold" not in names
    assert {"Qwen3.5-4B B=512 shared fp32", "Qwen3.5-4B B=256 shared fp32 L=64"} <= set(names)


def test_packages_that_are_not_here_are_absent() -> None:
    rows = list(rival_rows(BENCH, [GDN, MAMBA2], 2))
    assert {row.status for row in rows} <= {"absent", "ok"}
    assert rows[0].name == "gdn B=2 rival fla"


class Louder(Decoder):
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().step(tokens) * 1.2


def test_a_decoder_with_wrong_logits_has_no_speed() -> None:
    m = build_model(TINY, torch.device(DEVICE))
    keys: dict[str, Any] = {"batches": [2], "policies": [CONVENTIONAL], "implementation": "torch"}
    (row,) = bench_model(BENCH, m, "tiny", **keys)
    assert row.name == "tiny model B=2 conventional fp32"
    assert row.status == "ok" and row.values["logits_apart"] < 1e-4
    (row,) = bench_model(BENCH, m, "tiny", build=Louder, **keys)
    assert row.status == "refused" and "off by 2.0e-01" in row.reason
