"""Results on disk, and what `verify` says of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from quantlab.bench.measure import Row
from quantlab.bench.result import (
    Result,
    document_fault,
    new_result,
    read_result,
    write_result,
)
from quantlab.bench.targets import Target, read_targets, verify
from quantlab.errors import RunError

ROOT = Path(__file__).parents[2]
GOOD = Row(name="encode fp8", values={"ms": 1.25, "of_copy": 0.97})


def result(*rows: Row, time: str = "2026-01-02T00:00:00+00:00") -> Result:
    made = new_result("casts", rows, device="cpu", command="quantlab bench casts", sizes={})
    return replace(made, measurement=True, time=time)


def test_a_result_survives_the_disk(tmp_path: Path) -> None:
    refused = Row(name="encode fp16", status="refused", reason="3 codes differ")
    made = result(GOOD, refused, Row(name="odd", values={"ms": math.nan}))
    write_result(made, tmp_path / "deep" / "casts.json")
    read = read_result(tmp_path / "deep" / "casts.json")
    assert read.rows[:2] == made.rows[:2] and math.isnan(read.rows[2].values["ms"])
    assert (read.bench, read.measurement, read.where["versions"]) == (
        "casts",
        True,
        made.where["versions"],
    )
    assert read.where["git"] is None or len(read.where["git"]["commit"]) == 40
    assert "driver" in read.where and read.where["device"] == "cpu"


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"schema": 0}, "schema"),
        ({"bench": "other"}, "bench must be one of"),
        ({"measurement": 1}, "measurement must be of type bool"),
        ({"rows": [{"name": "a"}]}, "a row has"),
        (
            {"rows": [{"name": "a", "status": "refused", "reason": "r", "values": {"ms": 1.0}}]},
            "and yet it has figures",
        ),
        (
            {"rows": [{"name": "a", "status": "ok", "reason": "", "values": {"ms": "1"}}]},
            "numbers",
        ),
    ],
)
def test_what_is_not_a_result_is_refused(change: dict[str, object], fault: str) -> None:
    assert document_fault(result(GOOD).document()) is None
    assert fault in str(document_fault(result(GOOD).document() | change))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(RunError, match=r"x\.json is not a benchmark result"):
        verify([], tmp_path)


FLOOR = Target(bench="casts", row="encode fp8", value="of_copy", at_least=0.95)


def test_verdicts(tmp_path: Path) -> None:
    assert verify([FLOOR], tmp_path)[0].found == "no result"
    write_result(result(GOOD), tmp_path / "a.json")
    (verdict,) = verify([FLOOR], tmp_path)
    assert verdict.met and verdict.figure == 0.97 and verdict.found == "a.json"
    other = replace(FLOOR, row="encode bf16")
    assert not verify([other], tmp_path)[0].met
    # the latest measured one counts, better or worse
    worse = result(
        Row(name="encode fp8", values={"of_copy": 0.5}), time="2026-02-01T00:00:00+00:00"
    )
    write_result(worse, tmp_path / "0.json")
    (verdict,) = verify([FLOOR], tmp_path)
    assert not verdict.met and verdict.figure == 0.5
    # a self-test does not count
    fake = replace(result(GOOD, time="2026-03-01T00:00:00+00:00"), measurement=False)
    write_result(fake, tmp_path / "b.json")
    assert verify([FLOOR], tmp_path)[0].figure == 0.5
    refused = Row(name="encode fp8", status="refused", reason="9 codes differ")
    write_result(result(refused, time="2026-04-01T00:00:00+00:00"), tmp_path / "c.json")
    (verdict,) = verify([FLOOR], tmp_path)
    assert verdict.figure is None and "9 codes differ" in verdict.found


@pytest.mark.parametrize(
    "target, figure, met",
    [
        (FLOOR, 0.95, True),
        (FLOOR, 0.9499, False),
        (FLOOR, math.nan, False),
        (Target(bench="scan", row="a", value="of_fla", at_most=3.0), 3.0, True),
        (Target(bench="scan", row="a", value="of_fla", at_most=3.0), 3.01, False),
    ],
)
def test_bounds(target: Target, figure: float, met: bool) -> None:
    assert target.met_by(figure) is met


def test_the_committed_targets_name_rows_that_exist() -> None:
    from quantlab.bench.casts import FORMATS
    from quantlab.bench.decode import cases
    from quantlab.bench.decode_model import BATCHES
    from quantlab.bench.decode_model import POLICIES as DECODED
    from quantlab.bench.engine import QWEN
    from quantlab.bench.scan import POLICIES, SHAPES

    targets = read_targets(ROOT / "reports/performance/targets.toml")
    names = {f"encode {f}{sr}" for f in FORMATS for sr in ("", "-sr")}
    names |= {f"decode {f}" for f in FORMATS}
    names |= {f"{shape.name} {policy}" for shape in SHAPES for policy in POLICIES}
    names |= {f"{QWEN.name} engine against the rest"}
    names |= {case.name for case in cases()}
    names |= {
        f"{name} model B={batch} {policy.short}"
        for name in ("tiny-gdn", QWEN.name)
        for batch in BATCHES
        for policy in DECODED
    }
    assert {t.row for t in targets} <= names
    # issue 3: all formats to nearest, stochastically and back; windowed policies; the engine
    assert len([t for t in targets if t.bench == "casts"]) == 3 * len(FORMATS)
    assert len([t for t in targets if t.bench == "scan"]) == 2 * len(SHAPES)
    # issue 5: four shapes; FP32 by three figures and at B = 32, three reads by two; two models
    assert len([t for t in targets if t.bench == "decode"]) == 4 * (4 + 3 * 2) + 2


def test_wrong_targets_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "targets.toml"
    for text in (
        "[[target]]\nbench='casts'\nrow='a'\nvalue='b'\n",
        "[[target]]\nbench='cast'\nrow='a'\nvalue='b'\nat_least=1\n",
        "[[target]]\nbench='casts'\nrow='a'\nvalue='b'\nat_lest=1\n",
        "target = 3",
    ):
        path.write_text(text)
        with pytest.raises(RunError, match="does not hold targets"):
            read_targets(path)


def test_the_document_is_json() -> None:
    text = json.dumps(result(GOOD).document(), allow_nan=False)
    assert document_fault(json.loads(text)) is None
