"""The traffic model against the paper's closed form and sums by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from quantlab.analysis.traffic import (
    PAPER_SHAPES,
    LayerShape,
    conventional_bytes,
    flush_bytes,
    paper_ratio,
    record_bytes,
    step_bytes,
    traffic_speedup,
    window_bytes,
)
from quantlab.formats import parse_format

FP32, FP16, FP8, NVFP4 = (parse_format(n) for n in ("fp32", "fp16", "fp8", "nvfp4"))


def test_the_papers_ratio() -> None:
    """Source: arXiv 2610.13778, appendix C.3: 0.58 at dv = 64, dk = 128, L = 16."""
    assert round(float(paper_ratio(dv=64, dk=128, window=16)), 2) == 0.58


def test_the_papers_form_is_ours_without_sharing_and_token() -> None:
    """One head with its own key, Mamba-2's record without the step size: the paper's bytes."""
    shape = LayerShape(name="one", heads=1, key_heads=1, dv=64, dk=128, delta=False)
    window, record = 16, record_bytes(shape)
    ours = window_bytes(shape, FP32, None, record, window=window) - window * shape.token_bytes
    paper = paper_ratio(dv=64, dk=128, window=window) * 8 * window * 64 * 128
    # (L-1)(L+2)/2 counts a record read and written each step but the last, where L-1 are read:
    # the same 15 writes and 120 reads, each with 4 bytes of dt that the paper's record has not
    assert ours - paper == Fraction(15 * 18, 2) * 4


def test_states_of_the_formats() -> None:
    shape = PAPER_SHAPES[2]
    assert shape.state_bytes(FP32) == 32 * 128 * 128 * 4
    assert shape.state_bytes(FP16) * 2 == shape.state_bytes(FP32)
    assert shape.state_bytes(FP8) == 32 * 128 * (128 + 4)
    assert shape.state_bytes(NVFP4) == 32 * (128 * (64 + 8) + 4)


def test_one_step_by_hand() -> None:
    shape = LayerShape(name="gdn", heads=4, key_heads=2, dv=8, dk=16, delta=True, query_bytes=4)
    record = record_bytes(shape)
    assert record.read == 2 * 16 * 2 + 4 * 4 + 4 * 8 * 2
    assert record.folded == 2 * 16 * 2 + 4 * 4 + 4 * 8 * 2 + 4 * 4
    assert record.written == record.read + 4 * 8 * 2 + 4 * 4
    step = step_bytes(shape, FP16, record, count=3)
    assert step.state == 4 * 8 * 16 * 2
    assert step.records == 3 * record.read + record.written
    assert step.token == 2 * 2 * 16 * 4 + 4 * 8 * (2 + 4) + 4 * 4 + 4 * 4
    flush = flush_bytes(shape, FP32, FP16, record, window=5)
    assert flush.state == 2 * 4 * 8 * 16 * 4 + 4 * 8 * 16 * 2
    assert flush.records == 4 * record.folded
    assert conventional_bytes(shape, FP32).state == 2 * 4 * 8 * 16 * 4


@pytest.mark.parametrize("shape", PAPER_SHAPES, ids=lambda s: s.name)
def test_bounds_of_the_papers_shapes(shape: LayerShape) -> None:
    """FP32, L = 16: about 1.7 to 1.8; a window of one step gains nothing."""
    record = record_bytes(shape, rederive=False)
    assert 1.65 < traffic_speedup(shape, FP32, None, record, window=16) < 1.85
    assert traffic_speedup(shape, FP32, None, record, window=1) == 1


def test_fewer_bytes_from_narrower_reads() -> None:
    shape = PAPER_SHAPES[2]
    record = record_bytes(shape)
    totals = [step_bytes(shape, f, record, count=7).total for f in (FP32, FP16, FP8, NVFP4)]
    assert sorted(totals, reverse=True) == totals


def test_refusals() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        LayerShape(name="x", heads=3, key_heads=2, dv=1, dk=16, delta=False)
    shape = PAPER_SHAPES[0]
    record = record_bytes(shape)
    with pytest.raises(ValueError, match="from 0"):
        step_bytes(shape, FP32, record, count=-1)
    with pytest.raises(ValueError, match="at least one step"):
        window_bytes(shape, FP32, None, record, window=0)
