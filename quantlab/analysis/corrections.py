"""Corrections folded as they were cached, against derived again from the recurrence copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from quantlab.analysis.curves import Array, Curve, estimate, mean, ratio, to_curves
from quantlab.metrics.summary import to_cube
from quantlab.replay.policy import Policy, parse_policy

CORRECTION_SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string()),
        pa.field("n", pa.int32()),
        pa.field("streams", pa.int32()),
        pa.field("rederive", pa.float64()),
        pa.field("rederive_diverged", pa.int32()),
        pa.field("fold", pa.float64()),
        pa.field("fold_diverged", pa.int32()),
        *(pa.field(f"ratio{end}", pa.float64()) for end in ("", "_low", "_high")),
        pa.field("identical", pa.bool_()),
        pa.field("first_difference", pa.int32()),
    ]
)
"""`ratio` is folded KL ÷ re-derived KL. `identical`: every measured KL and NLL up to N is the same
bit for bit; `first_difference` is the first measured position where one is not, −1 for none. Where
the two are computed by different routes (exact records), additions in another order differ from the
first position on; where nothing is folded they do not."""


def correction_table(rows: pa.Table, lengths: Sequence[int]) -> pa.Table:
    """Compare corrections wherever a study has both of one policy.

    Returns:
        A table of `CORRECTION_SCHEMA`, in the study's order of policies, N ascending.
    """
    curves = to_curves(rows, lengths)
    if not curves.lengths:
        return CORRECTION_SCHEMA.empty_table()
    cube = to_cube(rows)
    by_name = {str(c.policy): c for c in curves.curves}
    found: list[dict[str, Any]] = []
    for curve in curves.curves:
        folded = by_name.get(str(replace(curve.policy, corrections="fold")))
        if curve.policy.corrections != "rederive" or folded is None:
            continue
        first = _first_difference(cube.policies, cube.values, cube.positions, curve, folded)
        for index, n in enumerate(curves.lengths):
            a, b = curve.kl[:, index].mean(axis=0), folded.kl[:, index].mean(axis=0)
            times = estimate(ratio, b, a)
            found.append(
                {
                    "policy": curve.policy.short,
                    "n": n,
                    "streams": curves.streams,
                    "rederive": estimate(mean, a).value,
                    "rederive_diverged": int(curve.diverged[index]),
                    "fold": estimate(mean, b).value,
                    "fold_diverged": int(folded.diverged[index]),
                    "ratio": times.value,
                    "ratio_low": times.low,
                    "ratio_high": times.high,
                    "identical": not 0 <= first <= n,
                    "first_difference": first,
                }
            )
    return pa.Table.from_pylist(found, schema=CORRECTION_SCHEMA)


def _places(names: list[str], policy: Policy) -> list[int]:
    """Return indices of a policy under all its seeds."""
    return [i for i, name in enumerate(names) if replace(parse_policy(name), seed=None) == policy]


def _first_difference(
    names: list[str], values: dict[str, Array], positions: Any, curve: Curve, folded: Curve
) -> int:
    a, b = _places(names, curve.policy), _places(names, folded.policy)
    differs = np.zeros(len(positions), dtype=bool)
    for column in ("kl", "nll"):
        x, y = values[column][a], values[column][b]
        differs |= ((x != y) & ~(np.isnan(x) & np.isnan(y))).any(axis=(0, 1))
    return int(positions[differs.argmax()]) if differs.any() else -1
