"""The benchmarks' own checks, under the interpreter: each must catch a wrong operation.

Sizes are tiny and no figure means anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quantlab.bench.casts import cast_row, decoder_row, differing
from quantlab.bench.engine import TINY as TINY_MODEL
from quantlab.bench.engine import bench_engine, build_model, engine_row
from quantlab.bench.measure import Bench
from quantlab.bench.scan import PROMPT, fla_row, layer_inputs, scan_row
from quantlab.bench.scan import TINY as TINY_LAYER
from quantlab.bench.suite import kind_of
from quantlab.formats import parse_format
from quantlab.replay import WindowedScan, parse_policy
from tests.kernels.device import DEVICE, MARKS

from quantlab_kernels.casts import encode  # isort: skip

pytestmark = MARKS
BENCH = Bench(DEVICE, repeats=1, warmup=0)


@pytest.fixture(scope="module")
def states() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(1, 1, 128, 128, generator=torch.Generator().manual_seed(1))
    return x.to(DEVICE), torch.tensor([4], device=DEVICE)


@pytest.mark.parametrize("name", ["fp16", "fp8-sr", "nvfp4"])
def test_a_right_cast_has_a_speed(name: str, states: tuple[torch.Tensor, torch.Tensor]) -> None:
    row = cast_row(BENCH, *states, parse_format(name), 4.2e12)
    assert row.status == "ok", row.reason
    assert row.values["of_copy"] > 0


def test_a_cast_with_one_wrong_code_is_refused(states: tuple[torch.Tensor, torch.Tensor]) -> None:
    def mutant(x: torch.Tensor, *args: Any, **keys: Any) -> Any:
        stored = encode(x, *args, **keys)
        stored.codes.view(-1)[777] ^= 1
        return stored

    row = cast_row(BENCH, *states, parse_format("fp8-sr"), 4.2e12, cast=mutant)
    assert row.status == "refused" and not row.values
    assert row.reason.startswith("1 codes differ")


def test_a_cast_with_another_seed_is_refused(states: tuple[torch.Tensor, torch.Tensor]) -> None:
    def mutant(*args: Any, **keys: Any) -> Any:
        return encode(*args, **(keys | {"flush": keys["flush"] + 1}))

    row = cast_row(BENCH, *states, parse_format("fp16-sr"), 4.2e12, cast=mutant)
    assert row.status == "refused"


def test_decoders(states: tuple[torch.Tensor, torch.Tensor]) -> None:
    row = decoder_row(BENCH, *states, parse_format("nvfp4"), 4.2e12)
    assert row.status == "ok", row.reason


def test_differing_bits_are_counted() -> None:
    a = torch.tensor([1.0, float("nan"), -0.0, 2.0])
    assert differing(a, torch.tensor([1.0, float("nan"), 0.0, 3.0])) == 2
    assert differing(torch.tensor([1, 255]).to(torch.uint8), torch.tensor([1, 254]).byte()) == 1


@pytest.mark.parametrize("text", ["shared:nvfp4-sr", "conventional:fp8-sr"])
def test_a_right_scan_has_a_speed(text: str) -> None:
    inputs = [layer_inputs(TINY_LAYER, 1, 16, torch.device(DEVICE), seed=s) for s in (0, 1)]
    row = scan_row(BENCH, TINY_LAYER, inputs, 3, parse_policy(text))
    assert row.status == "ok", row.reason
    assert row.values["tokens_per_s"] > 0


class WrongScan(WindowedScan):
    """Gives outputs 1 % too large."""

    def __call__(self, inputs: Any) -> torch.Tensor:
        out = super().__call__(inputs)
        return out * 1.01


def test_kernels_by_what_they_are_for() -> None:
    names = {
        "windowed_scan_kernel": "scan",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "matmul",
        "pytorch_flash::flash_fwd_kernel<...>": "attention",
        "void at::native::vectorized_elementwise_kernel<4, ...>": "elementwise",
        "Memcpy DtoD (Device -> Device)": "copy",
        "something_new": "other",
    }
    assert {name: kind_of(name) for name in names} == names


def test_a_wrong_scan_is_refused() -> None:
    inputs = [layer_inputs(TINY_LAYER, 1, 16, torch.device(DEVICE), seed=0)]
    policy = parse_policy("shared:nvfp4-sr")
    right = scan_row(BENCH, TINY_LAYER, inputs, 1, policy, scan=WindowedScan)
    wrong = scan_row(BENCH, TINY_LAYER, inputs, 1, policy, scan=WrongScan)
    assert right.status == "ok", right.reason
    assert wrong.status == "refused" and "first window off" in wrong.reason


def test_shapes_of_the_layers() -> None:
    x = layer_inputs(replace(TINY_LAYER, delta=False), 2, 16, torch.device(DEVICE), seed=0)
    assert x.dt is not None and x.beta is None and x.steps == PROMPT + 16
    assert fla_row(BENCH, TINY_LAYER, [x], 1).status in ("absent", "ok")


def test_the_engine_bench_end_to_end_and_a_wrong_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantlab.bench.engine.PROMPT", 32)
    monkeypatch.setattr("quantlab.bench.engine.scan_class", lambda *_: WindowedScan)
    policies = [parse_policy("shared:fp8-sr")]
    rows = list(
        bench_engine(
            BENCH, shape=TINY_MODEL, streams=2, tokens=20, decode_steps=4, policies=policies
        )
    )
    assert [row.status for row in rows] == ["ok"] * 4, [row.reason for row in rows]
    engine, prefill, decode, ratios = (row.values for row in rows)
    assert engine["rows"] == 4 and engine["scan_s"] > 0 and engine["rest_s"] > 0
    assert ratios["of_prefill"] == pytest.approx(engine["tokens_per_s"] / prefill["tokens_per_s"])
    assert ratios["of_decode"] == pytest.approx(engine["tokens_per_s"] / decode["tokens_per_s"])

    assert 0 < engine["reference_error"] < 1e-4 and engine["control_error"] < 1e-4

    (suite,) = bench_engine(
        BENCH, shape=TINY_MODEL, streams=2, tokens=20, policies=policies, part="suite"
    )
    assert suite.status == "ok", suite.reason
    assert suite.values["rows"] == 4 and suite.values["parquet_s"] > 0

    class Silent(WindowedScan):
        def __call__(self, inputs: Any) -> torch.Tensor:
            return super().__call__(inputs) * 0

    m = build_model(TINY_MODEL, torch.device(DEVICE))
    ids = torch.randint(3, 90, (1, 32 + 21))
    wrong = engine_row(BENCH, m, ids, "tiny", 20, policies, scan=Silent)
    assert wrong.status == "refused" and "reference logits off" in wrong.reason
