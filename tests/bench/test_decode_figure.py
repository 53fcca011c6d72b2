"""Figures of a decode benchmark show what was measured and nothing without a speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantlab.bench.decode import CONVENTIONAL, Case, cases
from quantlab.bench.decode_figure import decode_figures
from quantlab.bench.measure import Row
from quantlab.bench.result import Result, write_result
from quantlab_cli.main import main


def row(case: Case) -> Row:
    us = 10.0 + case.batch * (2.0 if case.policy == CONVENTIONAL else 1.0)
    if case.name == "Qwen3.5-4B B=64 shared fp32":
        return Row(name=case.name, status="refused", reason="wrong")
    values = {"window_us": us, "over_conventional": (10.0 + 2.0 * case.batch) / us}
    if case.policy.window > 1:
        values |= {"step_of_read": 0.9, "states_of_read": 0.8}
    return Row(name=case.name, values=values)


def result(bench: str = "decode") -> Result:
    others = [Row(name="ceiling"), Row(name="Qwen3.5-4B B=256 rival fla", status="absent")]
    others.append(Row(name="tiny-gdn model B=256 shared fp32", values={"ms": 1.0}))
    return Result(
        bench=bench, measurement=True, command="", time="2026-01-01T00:00:00+00:00", sizes={},
        where={}, rows=(*others, *(row(case) for case in cases())),
    )  # fmt: skip


def drawn(chart: object) -> list[dict[str, object]]:
    layers = chart.to_dict()  # type: ignore[attr-defined]
    parts = layers.get("layer", [layers])
    found = {str(d): d for part in parts for d in part["data"]["values"] if "one" not in d}
    return list(found.values())


def test_batches_and_windows_are_those_measured() -> None:
    figures = decode_figures(result())
    batches = drawn(figures["decode-batches"])
    one = [d for d in batches if d["shape"] == "Qwen3.5-4B" and d["policy"] == "shared fp32"]
    assert sorted(d["batch"] for d in one) == [1, 2, 4, 8, 16, 32, 128, 256, 512]  # type: ignore[type-var]
    windows = drawn(figures["decode-windows"])
    assert {d["window"] for d in windows} == {2, 4, 8, 16, 32, 64}
    (bound,) = (
        d["value"] for d in windows
        if d["window"] == 16 and d["policy"] == "shared fp32" and d["what"] != "measured"
    )  # fmt: skip
    assert bound == pytest.approx(1.78, abs=0.01)  # reports/decisions/0001-decode-kernels.md
    assert len(drawn(figures["decode-bandwidth"])) == 2 * (4 * 4 + 2)


def test_they_are_written_beside_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decode.json"
    write_result(result(), path)
    assert main(["bench", "figures", str(path)]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert names[:2] == ["decode-batches.png", "decode-batches.svg"] and len(names) == 6
    assert (tmp_path / "decode-windows.svg").read_text("utf-8").startswith("<svg")
    write_result(result("scan"), path)
    assert main(["bench", "figures", str(path)]) == 2
    assert "is of bench scan" in capsys.readouterr().err
