"""Predicted against measured KL: size, policy by policy, and order, length by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from quantlab.analysis.curves import Array, estimate, mean, ratio, to_curves
from quantlab.metrics.summary import CONFIDENCE, resampled
from quantlab.replay.policy import Policy

# A policy takes part in orders and ratios where its KL is this many times the noise floor.
ABOVE_FLOOR = 10.0
# Resampled orders that an interval of a rank correlation is formed of.
SAMPLES = 500

PREDICTION_SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string()),
        pa.field("n", pa.int32()),
        pa.field("predicted", pa.float64(), metadata={"meaning": "KL at N, nats"}),
        pa.field("kept", pa.float64(), metadata={"meaning": "share of it that the state carries"}),
        pa.field("fresh", pa.float64(), metadata={"meaning": "share of the read copy's own cast"}),
    ]
)

COMPARED_SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string()),
        pa.field("n", pa.int32()),
        pa.field("streams", pa.int32()),
        pa.field("diverged", pa.int32()),
        *(pa.field(f"{x}", pa.float64()) for x in ("predicted", "kept", "fresh", "measured")),
        *(pa.field(f"ratio{end}", pa.float64()) for end in ("", "_low", "_high")),
        pa.field("counts", pa.bool_()),
    ]
)
"""`ratio` is predicted ÷ measured with its 95 % interval over resampled streams of the measurement.
`counts`: measured KL is finite and ten times the noise floor or more."""

AGREEMENT_SCHEMA = pa.schema(
    [
        pa.field("n", pa.int32()),
        pa.field("policies", pa.int32()),
        *(
            pa.field(f"{name}{end}", pa.float64())
            for name in ("spearman", "kendall")
            for end in ("", "_low", "_high")
        ),
        pa.field("kendall_of_writes", pa.float64()),
        *(pa.field(f"ratio_{x}", pa.float64()) for x in ("median", "least", "most")),
        pa.field("within_2", pa.float64()),
    ]
)
"""Order and size over the policies that count at N. Intervals resample streams: the order that was
measured is uncertain, the predicted one is given. `kendall_of_writes` is that of an order by the
error of a single write of what most steps read alone: what the dynamics add is the difference.
`within_2`: share of policies whose size is right within a factor of two."""


def compare_prediction(
    predicted: pa.Table, writes: Mapping[str, float], rows: pa.Table, lengths: Sequence[int]
) -> tuple[pa.Table, pa.Table]:
    """Hold a prediction against the rows of a KL study.

    Args:
        predicted: of `PREDICTION_SCHEMA`.
        writes: by policy, relative error of one write.
        rows: of the study, complete or not; policies that are not predicted are left out.
        lengths: N.

    Returns:
        Tables of `COMPARED_SCHEMA` and `AGREEMENT_SCHEMA`.
    """
    curves = to_curves(rows, lengths)
    of = {(r["policy"], r["n"]): r for r in predicted.to_pylist()}
    floors = [c for c in curves.curves if _is_exact(c.policy)]
    floor = floors[0].kl.mean(axis=(0, 2)) if floors else np.zeros(len(curves.lengths))
    compared: list[dict[str, Any]] = []
    by_length: dict[int, list[tuple[dict[str, Any], Array]]] = {n: [] for n in curves.lengths}
    for curve in curves.curves:
        for index, n in enumerate(curves.lengths):
            row = of.get((str(curve.policy), n))
            if row is None or _is_exact(curve.policy):
                continue
            per_stream = curve.kl[:, index].mean(axis=0)
            measured = estimate(mean, per_stream).value
            times = estimate(ratio, np.full_like(per_stream, row["predicted"]), per_stream)
            found = {
                **row,
                "streams": curves.streams,
                "diverged": int(curve.diverged[index]),
                "measured": measured,
                "ratio": times.value,
                "ratio_low": times.low,
                "ratio_high": times.high,
                "counts": bool(np.isfinite(measured) and measured > ABOVE_FLOOR * floor[index]),
            }
            compared.append(found)
            if found["counts"]:
                by_length[n].append((found, per_stream))
    agreement = [
        _agreement(n, [r for r, _ in found], np.stack([x for _, x in found]), writes)
        for n, found in by_length.items()
        if len(found) > 1
    ]
    return (
        pa.Table.from_pylist(compared, schema=COMPARED_SCHEMA),
        pa.Table.from_pylist(agreement, schema=AGREEMENT_SCHEMA),
    )


def _is_exact(policy: Policy) -> bool:
    return policy.recur.is_exact and policy.read.is_exact


def _agreement(
    n: int, taken: list[dict[str, Any]], streams: Array, writes: Mapping[str, float]
) -> dict[str, Any]:
    predicted = np.array([r["predicted"] for r in taken])
    measured, ratios = streams.mean(axis=1), np.array([r["ratio"] for r in taken])
    out: dict[str, Any] = {"n": n, "policies": len(taken)}
    draws = resampled(streams, resamples=SAMPLES)
    for name, rank in (("spearman", spearman), ("kendall", kendall)):
        out[name] = float(rank(predicted, measured))
        tail = (1 - CONFIDENCE) / 2
        ends = np.quantile(rank(predicted[:, None], draws), [tail, 1 - tail])
        several = streams.shape[1] > 1
        out[f"{name}_low"], out[f"{name}_high"] = ends.tolist() if several else (np.nan, np.nan)
    single = np.array([writes[r["policy"]] for r in taken])
    out["kendall_of_writes"] = float(kendall(single, measured))
    out["ratio_median"] = float(np.median(ratios))
    out["ratio_least"], out["ratio_most"] = float(ratios.min()), float(ratios.max())
    out["within_2"] = float(np.mean(np.abs(np.log2(ratios)) <= 1))
    return out


def kendall(x: Array, y: Array) -> Array:
    """Kendall's τ-b along the first axis: agreement of signs of differences, ties taken out."""
    a, b = _signs(x), _signs(y)
    size = np.square(a).sum((0, 1)) * np.square(b).sum((0, 1))
    return np.asarray((a * b).sum((0, 1)) / np.sqrt(size))


def spearman(x: Array, y: Array) -> Array:
    """Spearman's ρ along the first axis; the sum of an entry's signs is twice its centred rank."""
    a, b = _signs(x).sum(1), _signs(y).sum(1)
    size = np.square(a).sum(0) * np.square(b).sum(0)
    return np.asarray((a * b).sum(0) / np.sqrt(size))


def _signs(x: Array) -> Array:
    return np.asarray(np.sign(x[:, None] - x[None]))
