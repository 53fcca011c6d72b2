"""Which layers or heads a policy's KL comes from: each alone, and all but each.

A study for it holds the policy on the whole model, on every unit alone (`only=`) and on all but
every unit (`except=`). If KL is quadratic in errors that units make independently, units alone add
up to the whole, and so do the falls from leaving one out; what is missing or left over is how far
they interact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa

from quantlab.analysis.curves import (
    Array,
    Curve,
    Curves,
    Estimate,
    estimate,
    mean,
    ratio,
    to_curves,
)
from quantlab.metrics.positions import window
from quantlab.metrics.summary import to_cube
from quantlab.replay.part import Unit
from quantlab.replay.policy import parse_policy

WHOLE_LAYER = -1
QUARTER = 0.25


def _interval(name: str, meaning: str) -> list[pa.Field]:
    return [
        pa.field(f"{name}{end}", pa.float64(), metadata={"meaning": meaning})
        for end in ("", "_low", "_high")
    ]


ATTRIBUTION_SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string()),
        pa.field("layer", pa.int32()),
        pa.field("head", pa.int32(), metadata={"meaning": "-1 for the whole layer"}),
        pa.field("n", pa.int32()),
        pa.field("streams", pa.int32()),
        pa.field("diverged", pa.int32(), metadata={"meaning": "streams, of any of the three"}),
        *_interval("whole", "nats, KL at N with the policy on all heads"),
        *_interval("only", "nats, on this unit alone"),
        *_interval("without", "nats, on all but this unit"),
        *_interval("share", "only ÷ whole"),
        *_interval("saved", "(whole − without) ÷ whole"),
    ]
)
"""One row a unit and N; intervals are over streams, 95 %."""

ADDITIVITY_SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string()),
        pa.field("n", pa.int32()),
        pa.field("streams", pa.int32()),
        pa.field("units", pa.int32()),
        *_interval("whole", "nats, KL at N with the policy on all heads"),
        *_interval("sum_only", "Σ only ÷ whole: 1 if units add up"),
        *_interval("sum_saved", "Σ (whole − without) ÷ whole: likewise"),
        *_interval("top_quarter", "share of Σ only in the largest quarter of units"),
        pa.field("half", pa.int32(), metadata={"meaning": "fewest units with half of Σ only"}),
        *(
            pa.field(name, pa.float64(), metadata={"meaning": meaning})
            for name, meaning in {
                "streams_spearman": "of `only` between two streams, mean over pairs",
                "streams_spearman_least": "the least of these",
                "halves_spearman": "between halves of the streams, mean over the ways to halve",
                "positions_spearman": "between the first and second half of the window of N",
                "ways_spearman": "between `only` and `saved`",
            }.items()
        ),
    ]
)
"""One row an N; NaN where there are too few streams or units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Curves of one policy: whole, and by unit alone and left out."""

    name: str
    whole: Curve
    only: dict[Unit, Curve]
    without: dict[Unit, Curve]

    def of(self, curves: dict[Unit, Curve], index: int) -> Array:
        """KL at one N, [units, streams], in the order of `only`; seeds averaged."""
        return np.stack([curves[unit].kl[:, index].mean(axis=0) for unit in self.only])


def attribution_tables(rows: pa.Table, lengths: Sequence[int]) -> tuple[pa.Table, pa.Table]:
    """Compare parts wherever a study has a policy whole, on single units and without them.

    Args:
        rows: of a study (`quantlab.study.rows`).
        lengths: the grid of N.

    Returns:
        Tables of `ATTRIBUTION_SCHEMA` (by policy, N, then unit) and `ADDITIVITY_SCHEMA`.
    """
    curves = to_curves(rows, lengths)
    units, sums = [], []
    for parts in _parts(curves):
        halves = _half_windows(rows, curves, parts)
        for index, n in enumerate(curves.lengths):
            whole = parts.whole.kl[:, index].mean(axis=0)
            only, without = parts.of(parts.only, index), parts.of(parts.without, index)
            key = {"policy": parts.name, "n": n, "streams": curves.streams}
            for u, (layer, head) in enumerate(parts.only):
                place = {"layer": layer, "head": WHOLE_LAYER if head is None else head}
                held = (parts.whole, parts.only[layer, head], parts.without[layer, head])
                diverged = {"diverged": int(max(curve.diverged[index] for curve in held))}
                units.append(key | place | diverged | _unit(whole, only[u], without[u]))
            sums.append(key | _sums(whole, only, without, halves[index]))
    return (
        pa.Table.from_pylist(units, schema=ATTRIBUTION_SCHEMA),
        pa.Table.from_pylist(sums, schema=ADDITIVITY_SCHEMA),
    )


def _parts(curves: Curves) -> list[_Parts]:
    found: list[_Parts] = []
    for whole in (c for c in curves.curves if c.policy.part is None):
        mine = [c for c in curves.curves if replace(c.policy, part=None) == whole.policy]
        by_way: dict[bool, dict[Unit, Curve]] = {False: {}, True: {}}
        for curve in mine:
            part = curve.policy.part
            if part is not None and len(part.units) == 1:
                by_way[part.excluded][part.units[0]] = curve
        both = {unit: c for unit, c in by_way[False].items() if unit in by_way[True]}
        if both:
            name = whole.policy.short
            found.append(_Parts(name=name, whole=whole, only=both, without=by_way[True]))
    return found


def _unit(whole: Array, only: Array, without: Array) -> dict[str, float]:
    return (
        _named("whole", estimate(mean, whole))
        | _named("only", estimate(mean, only))
        | _named("without", estimate(mean, without))
        | _named("share", estimate(ratio, only, whole))
        | _named("saved", estimate(ratio, whole - without, whole))
    )


def _sums(whole: Array, only: Array, without: Array, halves: tuple[Array, Array]) -> dict[str, Any]:
    count = int(np.ceil(QUARTER * len(only)))
    per_unit = only.mean(axis=1)
    order = np.argsort(-per_unit, kind="stable")
    total = only.sum(axis=0)
    shares = np.cumsum(per_unit[order]) / per_unit.sum()
    streams = only.shape[1]
    pairs = [rank_correlation(only[:, a], only[:, b]) for a, b in combinations(range(streams), 2)]
    return (
        {"units": len(only), "half": int(np.searchsorted(shares, 0.5) + 1)}
        | _named("whole", estimate(mean, whole))
        | _named("sum_only", estimate(ratio, total, whole))
        | _named("sum_saved", estimate(ratio, (whole - without).sum(axis=0), whole))
        | _named("top_quarter", estimate(ratio, only[order[:count]].sum(axis=0), total))
        | {
            "streams_spearman": float(np.mean(pairs)) if pairs else np.nan,
            "streams_spearman_least": float(np.min(pairs)) if pairs else np.nan,
            "halves_spearman": _split_half(only),
            "positions_spearman": rank_correlation(*halves),
            "ways_spearman": rank_correlation(per_unit, (whole - without).mean(axis=1)),
        }
    )


def _split_half(only: Array) -> float:
    """Mean Spearman over the ways to cut the streams into two halves (one left over if odd)."""
    streams = range(only.shape[1])
    size = len(streams) // 2
    found = [
        rank_correlation(only[:, list(a)].mean(axis=1), only[:, list(b)].mean(axis=1))
        for a in (combinations(streams, size) if size else ())
        for b in combinations([s for s in streams if s not in a], size)
        if a < b
    ]
    return float(np.mean(found)) if found else np.nan


def _half_windows(rows: pa.Table, curves: Curves, parts: _Parts) -> list[tuple[Array, Array]]:
    """KL of every unit alone over the two halves of the window of each N, streams averaged."""
    cube = to_cube(rows)
    whole = cube.present.all(axis=(0, 2))
    named = {str(replace(curve.policy, seed=None)): unit for unit, curve in parts.only.items()}
    by_unit: dict[Unit, list[int]] = {}
    for index, text in enumerate(cube.policies):
        unit = named.get(str(replace(parse_policy(text), seed=None)))
        if unit is not None:
            by_unit.setdefault(unit, []).append(index)
    found = []
    for n in curves.lengths:
        span = window(n)
        middle = span.start + len(span) // 2
        halves = []
        for half in (range(span.start, middle), range(middle, span.stop)):
            inside = np.isin(cube.positions, np.asarray(half))
            kl = cube.values["kl"][:, whole][:, :, inside]
            halves.append(np.array([kl[by_unit[unit]].mean() for unit in parts.only]))
        found.append((halves[0], halves[1]))
    return found


def rank_correlation(x: Array, y: Array) -> float:
    """Spearman's; NaN with fewer than three units, a constant, or a unit that diverged."""
    from scipy import stats

    if len(x) < 3 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return float("nan")
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(stats.spearmanr(x, y).statistic)


def _named(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
