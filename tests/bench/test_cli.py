"""`quantlab bench` on the command line; the benchmarks themselves are faked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantlab.bench.measure import Row
from quantlab.bench.result import read_result
from quantlab_cli.main import main

ROOT = Path(__file__).parents[2]


def test_a_quick_run_is_marked_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row(name="copy", values={"tb_per_s": 1.0})]
    monkeypatch.setattr("quantlab.bench.casts.bench_casts", lambda *_, **__: iter(rows))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = tmp_path / "casts.json"
    assert main(["bench", "casts", "--quick", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-2] == "self-test of the harness: not a measurement"
    document = json.loads(lines[-1])
    assert document["measurement"] is False
    assert document["command"] == f"quantlab bench casts --quick --out {out}"
    assert read_result(out).rows == tuple(rows)


def test_a_refused_row_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(name="encode fp8", status="refused", reason="3 codes differ")]
    monkeypatch.setattr("quantlab.bench.casts.bench_casts", lambda *_, **__: iter(rows))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["bench", "casts", "--quick", "--out", str(tmp_path / "c.json")]) == 1


def test_an_interrupted_run_keeps_its_rows_beside_the_last_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row(name="copy", values={"tb_per_s": 1.0})
    out, unfinished = tmp_path / "casts.json", tmp_path / "casts.json.unfinished"

    def killed(*_: object, **__: object) -> Iterator[Row]:
        yield row
        # as if by SIGKILL: what is there by now is all that stays
        assert read_result(unfinished).rows == (row,)
        raise KeyboardInterrupt

    monkeypatch.setattr("quantlab.bench.casts.bench_casts", killed)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out.write_text("before")
    assert main(["bench", "casts", "--quick", "--out", str(out)]) == 130
    assert read_result(unfinished).sizes["stopped"] is True
    assert out.read_text() == "before"

    monkeypatch.setattr("quantlab.bench.casts.bench_casts", lambda *_, **__: iter([row]))
    assert main(["bench", "casts", "--quick", "--out", str(out)]) == 0
    assert "stopped" not in read_result(out).sizes and not unfinished.exists()


def test_a_cpu_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scan", "--device", "cpu"]) == 2
    assert "measures nothing" in capsys.readouterr().err


def test_verify_names_what_has_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = ROOT / "reports/performance/targets.toml"
    assert main(["bench", "verify", str(tmp_path), "--targets", str(targets), "--json"]) == 1
    captured = capsys.readouterr()
    assert "falls short: casts: encode fp16: of_copy ≥ 0.95: no result" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["met"] == 0


def test_verify_without_targets_is_wrong_usage(tmp_path: Path) -> None:
    assert main(["bench", "verify", str(tmp_path)]) == 2
