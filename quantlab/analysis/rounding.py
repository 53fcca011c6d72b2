"""Nearest against stochastic rounding of a shared copy: ratio of KL, and bias against spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from quantlab.analysis.curves import Array, Curve, Curves, estimate, mean, ratio, to_curves
from quantlab.formats import Format

ROUNDING_SCHEMA = pa.schema(
    [
        pa.field("format", pa.string()),
        pa.field("window", pa.int32()),
        pa.field("n", pa.int32()),
        pa.field("streams", pa.int32()),
        pa.field("seeds", pa.int32()),
        pa.field("rtn", pa.float64()),
        pa.field("rtn_diverged", pa.int32()),
        pa.field("sr", pa.float64()),
        pa.field("sr_diverged", pa.int32()),
        pa.field("sr_seed_min", pa.float64()),
        pa.field("sr_seed_max", pa.float64()),
        *(pa.field(f"ratio{end}", pa.float64()) for end in ("", "_low", "_high")),
        *(pa.field(f"bias{end}", pa.float64()) for end in ("", "_low", "_high")),
        *(pa.field(f"spread{end}", pa.float64()) for end in ("", "_low", "_high")),
    ]
)
"""`ratio` is RTN KL ÷ mean SR KL. `bias` + `spread` = `sr`: the KL of the mean logits over ever
more seeds, and what single seeds have on top; from K seeds to leading order in 1/K, so that `bias`
can come out slightly below 0. Diverged columns count streams; intervals are over streams."""


def rounding_table(rows: pa.Table, lengths: Sequence[int]) -> pa.Table:
    """Compare RTN and SR wherever a study has both of a shared format and window.

    Args:
        rows: of a study (`quantlab.study.rows`).
        lengths: the grid of N.

    Returns:
        A table of `ROUNDING_SCHEMA`, in the study's order of formats, N ascending.
    """
    curves = to_curves(rows, lengths)
    found = [
        _point(curves, nearest, stochastic, index)
        for nearest, stochastic in _pairs(curves)
        for index in range(len(curves.lengths))
    ]
    return pa.Table.from_pylist(found, schema=ROUNDING_SCHEMA)


def _pairs(curves: Curves) -> Iterator[tuple[Curve, Curve]]:
    one_copy = [c for c in curves.curves if c.policy.kind != "separate"]
    for first in one_copy:
        partner = [c for c in one_copy if _without_rounding(c) == _without_rounding(first)]
        if len(partner) == 2 and partner[0] is first:
            by_rounding = {c.policy.recur.rounding: c for c in partner}
            yield by_rounding["rtn"], by_rounding["sr"]


def _without_rounding(curve: Curve) -> str:
    fmt: Format = replace(curve.policy.recur, rounding="rtn")
    return str(replace(curve.policy, read=fmt, recur=fmt))


def _point(curves: Curves, nearest: Curve, stochastic: Curve, index: int) -> dict[str, Any]:
    rtn, seeds = nearest.kl[0, index], stochastic.kl[:, index]
    sr, of_mean = seeds.mean(axis=0), stochastic.of_mean[index]
    count = stochastic.seeds
    factor = count / (count - 1) if count > 1 else np.nan

    def spread(total: Array, common: Array) -> Array:
        return factor * (total - common)

    def bias(total: Array, common: Array) -> Array:
        return total - factor * (total - common)

    point: dict[str, Any] = {
        "format": nearest.policy.recur.short,
        "window": nearest.policy.window,
        "n": curves.lengths[index],
        "streams": curves.streams,
        "seeds": count,
        "rtn": estimate(mean, rtn).value,
        "rtn_diverged": int(nearest.diverged[index]),
        "sr": estimate(mean, sr).value,
        "sr_diverged": int(stochastic.diverged[index]),
        "sr_seed_min": float(seeds.mean(axis=1).min()),
        "sr_seed_max": float(seeds.mean(axis=1).max()),
    }
    for name, found in (
        ("ratio", estimate(ratio, rtn, sr)),
        ("bias", estimate(bias, sr, of_mean)),
        ("spread", estimate(spread, sr, of_mean)),
    ):
        point |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    return point
