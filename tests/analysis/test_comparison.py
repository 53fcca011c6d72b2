"""Predicted against measured: sizes, orders and what counts, on made-up rows."""

import math

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from quantlab.analysis.comparison import (
    PREDICTION_SCHEMA,
    compare_prediction,
    kendall,
    spearman,
)
from quantlab.replay.policy import parse_policy

FLOOR, *OTHERS = (
    str(parse_policy(t))
    for t in ("shared:fp32", "shared:fp16-sr", "nvfp4 / fp32", "shared:fp8-sr", "shared:nvfp4-sr")
)
LEVELS = dict(zip([FLOOR, *OTHERS], (1e-9, 5e-9, 1e-4, 1e-3, 1e-2), strict=True))


def rows(factor=lambda policy, stream: 1.0):
    return pa.Table.from_pylist(
        [
            {
                "policy": policy, "stream": stream, "position": t,
                "kl": level * factor(policy, stream), "nll": 1.0, "nll_reference": 1.0,
                "top1_agrees": True, "diverged": False,
            }
            for policy, level in LEVELS.items()
            for stream in range(4)
            for t in range(1, 33)
        ]
    )  # fmt: skip


def prediction(of):
    found = [
        {"policy": policy, "n": n, "predicted": of(policy, n), "kept": 0.0, "fresh": 0.0}
        for policy in LEVELS
        for n in (16, 32)
    ]
    return pa.Table.from_pylist(found, schema=PREDICTION_SCHEMA)


def test_sizes_and_what_counts():
    predicted = prediction(lambda policy, n: LEVELS[policy] * (2 if n == 16 else 3))
    writes = {policy: -level for policy, level in LEVELS.items()}  # the order upside down
    compared, agreement = compare_prediction(predicted, writes, rows(), [16, 32])
    found = compared.to_pylist()
    # by policy, N ascending; the floor is no policy
    assert [(r["policy"], r["n"]) for r in found] == [(p, n) for p in OTHERS for n in (16, 32)]
    assert [r["ratio"] for r in found[2:4]] == pytest.approx([2, 3])
    assert found[2]["ratio_low"] == pytest.approx(2) and found[2]["streams"] == 4
    # five times the floor is not ten times it
    assert [r["counts"] for r in found] == [False, False, *[True] * 6]
    first, second = agreement.to_pylist()
    assert (first["n"], first["policies"], second["n"]) == (16, 3, 32)
    assert first["kendall"] == first["spearman"] == first["kendall_low"] == 1
    assert first["kendall_of_writes"] == -1
    assert first["within_2"] == 1 and second["within_2"] == 0
    assert second["ratio_median"] == pytest.approx(3)


def test_intervals_are_those_of_the_measured_streams():
    """In two of four streams two policies change places: their order is not certain."""
    swap = {OTHERS[1]: 100.0, OTHERS[2]: 0.01}
    measured = rows(lambda policy, s: swap.get(policy, 1.0) if s < 2 else 1.0)
    predicted = prediction(lambda policy, n: LEVELS[policy])
    compared, agreement = compare_prediction(predicted, LEVELS, measured, [32])
    row = next(r for r in compared.to_pylist() if r["policy"] == OTHERS[1])
    assert row["measured"] == pytest.approx(50.5 * 1e-4)
    assert row["ratio_low"] == pytest.approx(0.01, rel=0.01) and row["ratio_high"] > 0.03
    (found,) = agreement.to_pylist()
    assert found["kendall_low"] < found["kendall_high"] == 1


def test_divergence_and_missing_policies():
    table = rows()
    kl = table["kl"].to_numpy().copy()
    gone = np.array([p == OTHERS[3] for p in table["policy"].to_pylist()])
    kl[gone] = math.nan
    table = table.set_column(table.schema.get_field_index("kl"), "kl", pa.array(kl))
    predicted = prediction(lambda policy, n: LEVELS[policy])
    predicted = predicted.filter(
        pa.array([p != OTHERS[1] for p in predicted["policy"].to_pylist()])
    )
    compared, agreement = compare_prediction(predicted, LEVELS, table, [32])
    by_name = {r["policy"]: r for r in compared.to_pylist()}
    assert OTHERS[1] not in by_name and not by_name[OTHERS[3]]["counts"]
    assert agreement.num_rows == 0  # one policy has no order


def test_rank_correlations_are_scipys():
    generator = np.random.default_rng(0)
    x = generator.integers(0, 6, 9).astype(float)  # with ties
    y = generator.normal(size=(9, 5)) + x[:, None] / 3
    y[2] = y[5]
    for ours, theirs in ((kendall, stats.kendalltau), (spearman, stats.spearmanr)):
        expected = [theirs(x, column).statistic for column in y.T]
        assert ours(x[:, None], y) == pytest.approx(expected)
        assert float(ours(x, y[:, 0])) == pytest.approx(expected[0])
