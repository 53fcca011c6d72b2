"""The comparison of a device with the CPU, the CPU standing in for the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch

from quantlab.bench.agreement import curve_rows, op_inputs, windows_row
from quantlab.bench.measure import Bench
from quantlab.recurrence import OpInputs
from quantlab.replay import WindowedScan, parse_policy
from quantlab.study.spec import KlSpec

BENCH = Bench("cpu", repeats=1, warmup=0)


@pytest.fixture(scope="module")
def calls() -> list[OpInputs]:
    return op_inputs("tiny-mamba2", "fp32", 8 + 32)[:1]


class WrongKeys(WindowedScan):
    """Keys an FP16 rounding away."""

    def __call__(self, inputs: OpInputs) -> torch.Tensor:
        return super().__call__(replace(inputs, k=inputs.k.half().float()))


class OtherSeed(WindowedScan):
    def __init__(self, *args: Any, layer: int, seed: int) -> None:
        super().__init__(*args, layer=layer, seed=seed + 1)


@pytest.mark.parametrize("policy", ["shared:nvfp4-sr", "nvfp4 / fp16-sr"])
def test_windows_of_the_same_scan_agree(calls: list[OpInputs], policy: str) -> None:
    row = windows_row(BENCH, "m", calls, parse_policy(policy), 8, scan=WindowedScan)
    assert row.status == "ok", row.reason
    copies = 2 if "/" in policy else 1
    assert row.values["codes"] == 2 * copies * calls[0].heads * calls[0].dv * calls[0].dk
    assert row.values["flips"] == 0 and row.values["outputs"] == 0


@pytest.mark.parametrize(
    "scan, reason",
    [(OtherSeed, "of the first store differ"), (WrongKeys, "of the codes differ")],
)
def test_what_does_not_agree_is_refused(
    calls: list[OpInputs], scan: type[WindowedScan], reason: str
) -> None:
    row = windows_row(BENCH, "m", calls, parse_policy("nvfp4 / fp16-sr"), 8, scan=scan)
    assert row.status == "refused" and reason in row.reason


@pytest.mark.parametrize(
    "policy, there, status",
    [
        ("shared:nvfp4-sr", 1.1, "ok"),
        ("shared:nvfp4-sr", 1.3, "refused"),
        ("shared:fp32", 1.3, "ok"),  # the noise of additions: another on each device
    ],
)
def test_curves_within_the_interval(
    monkeypatch: pytest.MonkeyPatch, policy: str, there: float, status: str
) -> None:
    parsed = parse_policy(policy)

    def run_kl(spec: KlSpec, folder: Path) -> SimpleNamespace:
        kl = 1.0 if spec.device == "cpu" else there
        point = {"policy": str(parsed), "kl": kl, "kl_low": 0.8 * kl, "kl_high": 1.2 * kl}
        points = [point | {"n": 16}, point | {"n": 64, "kl": 1.0}]
        return SimpleNamespace(summary=pa.Table.from_pylist(points))

    monkeypatch.setattr("quantlab.study.run.run_kl", run_kl)
    device = Bench("cpu", repeats=1, warmup=0)
    device.device = torch.device("meta")
    monkeypatch.setattr("quantlab.study.spec.check_device_name", lambda name: None)
    (row,) = curve_rows(device, "tiny-gdn", [parsed], 64, 4)
    assert row.status == status
    if status == "ok":
        assert row.values["points"] == 2 and row.values["largest_ratio"] == there
    else:
        assert row.reason == "outside of the interval at N = 16"
