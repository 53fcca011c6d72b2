"""What a longer window is worth: KL by L at each N, beside the number of stores it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from quantlab.analysis.curves import Curve, estimate, mean, ratio, to_curves
from quantlab.analysis.theory import predicted_fall

WINDOW_SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string()),
        pa.field("window", pa.int32()),
        pa.field("n", pa.int32()),
        pa.field("streams", pa.int32()),
        pa.field("diverged", pa.int32()),
        pa.field("writes", pa.int32()),
        *(pa.field(f"kl{end}", pa.float64()) for end in ("", "_low", "_high")),
        pa.field("base_window", pa.int32()),
        *(pa.field(f"fall{end}", pa.float64()) for end in ("", "_low", "_high")),
        pa.field("predicted_low", pa.float64()),
        pa.field("predicted_high", pa.float64()),
    ]
)
"""`policy` is named without its L. `writes` counts the stores up to N, the post-prefill one
included. `fall` is KL at the shortest window over KL here; predicted are the bounds of
`theory.predicted_fall` for one copy, 1 for two: a read copy is one rounding however many stores
went before."""


def window_table(rows: pa.Table, lengths: Sequence[int]) -> pa.Table:
    """Compare windows wherever a study has several of one policy.

    Args:
        rows: of a study; conventional policies count as shared with L = 1.
        lengths: the grid of N.

    Returns:
        A table of `WINDOW_SCHEMA`: by policy, then N, then L.
    """
    curves = to_curves(rows, lengths)
    families: dict[str, dict[int, Curve]] = {}
    for curve in curves.curves:
        one_copy = curve.policy.kind == "conventional"
        family = replace(curve.policy, kind="shared" if one_copy else curve.policy.kind, window=16)
        families.setdefault(family.short, {})[curve.policy.window] = curve
    found: list[dict[str, Any]] = []
    for name, by_window in families.items():
        if len(by_window) < 2:
            continue
        base = by_window[min(by_window)]
        for index, n in enumerate(curves.lengths):
            for length in sorted(by_window):
                curve = by_window[length]
                here, there = curve.kl[:, index].mean(axis=0), base.kl[:, index].mean(axis=0)
                kl, fall = estimate(mean, here), estimate(ratio, there, here)
                low, high = _predicted(curve, length, base.policy.window)
                found.append(
                    {
                        "policy": name,
                        "window": length,
                        "n": n,
                        "streams": curves.streams,
                        "diverged": int(curve.diverged[index]),
                        "writes": n // length + 1,
                        "kl": kl.value,
                        "kl_low": kl.low,
                        "kl_high": kl.high,
                        "base_window": base.policy.window,
                        "fall": fall.value,
                        "fall_low": fall.low,
                        "fall_high": fall.high,
                        "predicted_low": low,
                        "predicted_high": high,
                    }
                )
    return pa.Table.from_pylist(found, schema=WINDOW_SCHEMA)


def _predicted(curve: Curve, window: int, base: int) -> tuple[float, float]:
    if curve.policy.kind == "separate":
        return 1.0, 1.0
    biased = curve.policy.recur.rounding == "rtn"
    return predicted_fall(window, base=base, biased=biased)
