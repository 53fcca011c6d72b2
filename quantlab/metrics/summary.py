"""From rows to curves: KL at N with its distribution, an interval over streams and the floor.

The interval is a percentile bootstrap over streams: whole streams are drawn with replacement, since
positions of one stream are far from independent. With the paper's four streams it says how far the
books disagree, and is too narrow as a confidence interval; more streams make it one. All policies
and all N share the draws, so ratios between them see the same resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quantlab.metrics.positions import window

Array = npt.NDArray[np.float64]

RESAMPLES = 10_000
BOOTSTRAP_SEED = 0x5EED
CONFIDENCE = 0.95
QUANTILES = {"kl_median": 0.5, "kl_p90": 0.9, "kl_p99": 0.99, "kl_p999": 0.999, "kl_max": 1.0}

SUMMARY_SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string()),
        pa.field("n", pa.int32()),
        pa.field("streams", pa.int32()),
        pa.field("diverged", pa.int32()),
        pa.field("kl", pa.float64()),
        pa.field("kl_low", pa.float64()),
        pa.field("kl_high", pa.float64()),
        *(pa.field(name, pa.float64()) for name in QUANTILES),
        pa.field("excess_nll", pa.float64()),
        pa.field("top1_agreement", pa.float64()),
        pa.field("floor", pa.float64()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cube:
    """Rows as dense arrays.

    Attributes:
        policies: names, in order of appearance.
        streams: stream ids, ascending.
        positions: [n] ascending.
        present: [policies, streams, n] bool; False where a run has not got to.
        values: name → [policies, streams, n] FP64 (NaN where absent).
    """

    policies: list[str]
    streams: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    present: npt.NDArray[np.bool_]
    values: dict[str, Array]


def to_cube(rows: pa.Table) -> Cube:
    """Pivot rows (see `quantlab.study.rows`) into dense arrays."""
    encoded = rows["policy"].combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    codes = np.asarray(encoded.indices)
    names = encoded.dictionary.to_pylist()
    used, first = np.unique(codes, return_index=True)
    order = used[np.argsort(first)]
    policy = np.argsort(order)[np.searchsorted(np.sort(order), codes)]
    streams, stream = np.unique(rows["stream"].to_numpy().astype(np.int64), return_inverse=True)
    positions, position = np.unique(
        rows["position"].to_numpy().astype(np.int64), return_inverse=True
    )
    shape = (len(order), len(streams), len(positions))
    present = np.zeros(shape, dtype=bool)
    present[policy, stream, position] = True
    values: dict[str, Array] = {}
    # runs of the first version of the schema have no kl_of_mean
    measured = ("kl", "nll", "nll_reference", "top1_agrees", "diverged", "kl_of_mean")
    for column in (name for name in measured if name in rows.schema.names):
        array = np.full(shape, np.nan)
        array[policy, stream, position] = rows[column].to_numpy().astype(np.float64)
        values[column] = array
    return Cube(
        policies=[names[i] for i in order],
        streams=streams,
        positions=positions,
        present=present,
        values=values,
    )


def summarise(rows: pa.Table, lengths: Sequence[int], *, floor: str | None = None) -> pa.Table:
    """KL at N and its companions, one row a policy and N.

    Args:
        rows: the rows of a run, possibly unfinished: streams whose window is incomplete are left
            out of that N, and an N without any is left out.
        lengths: the grid of N.
        floor: name of the policy that is an FP32 replay, whose KL is the noise floor.

    Returns:
        A table of `SUMMARY_SCHEMA`, policies in the rows' order. `kl` and its companions are NaN
        where a stream diverged (`diverged` counts them): a mean over the others would flatter.
        The interval is NaN with one stream, `floor` without a floor policy.
    """
    if rows.num_rows == 0:
        return SUMMARY_SCHEMA.empty_table()
    cube = to_cube(rows)
    columns: dict[str, list[npt.NDArray[np.generic]]] = {n: [] for n in SUMMARY_SCHEMA.names}
    names = np.asarray(cube.policies, dtype=object)
    for n in lengths:
        inside = np.isin(cube.positions, np.arange(window(n).start, window(n).stop))
        whole = np.asarray(cube.present[:, :, inside].all(axis=(0, 2)))
        if inside.sum() != len(window(n)) or not whole.any():
            continue
        point = _point(cube, inside, whole, floor)
        point["policy"] = names
        point["n"] = np.full(len(names), n)
        for name, values in point.items():
            columns[name].append(values)
    if not columns["n"]:
        return SUMMARY_SCHEMA.empty_table()
    by_policy = np.argsort(
        np.tile(np.arange(len(names)), len(columns["n"])), kind="stable"
    )  # N varied slowest above
    arrays = [
        pa.array(np.concatenate(columns[field.name])[by_policy], type=field.type)
        for field in SUMMARY_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SUMMARY_SCHEMA)


def _point(
    cube: Cube, inside: npt.NDArray[np.bool_], whole: npt.NDArray[np.bool_], floor: str | None
) -> dict[str, npt.NDArray[np.generic]]:
    def cut(name: str) -> Array:
        return cube.values[name][:, whole][:, :, inside]

    kl = cut("kl")
    policies, streams, _ = kl.shape
    diverged = (cut("diverged") > 0).any(axis=2).sum(axis=1)
    with np.errstate(invalid="ignore"):
        per_stream = kl.mean(axis=2)
        mean = per_stream.mean(axis=1)
        flat = kl.reshape(policies, -1)
        spread = np.quantile(flat, list(QUANTILES.values()), axis=1, method="linear")
        low, high = bootstrap(per_stream)
        excess = (cut("nll") - cut("nll_reference")).mean(axis=(1, 2))
    agreement = cut("top1_agrees").mean(axis=(1, 2))
    point: dict[str, npt.NDArray[np.generic]] = {
        "streams": np.full(policies, streams),
        "diverged": diverged,
        "kl": mean,
        "kl_low": low,
        "kl_high": high,
        **dict(zip(QUANTILES, spread, strict=True)),
        "excess_nll": excess,
        "top1_agreement": agreement,
    }
    for name, values in point.items():
        if name not in ("streams", "diverged"):
            point[name] = np.where(diverged > 0, np.nan, values)
    has_floor = floor in cube.policies if floor is not None else False
    level = mean[cube.policies.index(str(floor))] if has_floor else np.nan
    point["floor"] = np.full(policies, level)
    return point


def bootstrap(
    per_stream: Array, *, resamples: int = RESAMPLES, seed: int = BOOTSTRAP_SEED
) -> tuple[Array, Array]:
    """Percentile interval of the mean over streams, resampling streams.

    Args:
        per_stream: [policies, streams] means over the window.
        resamples: draws of all streams with replacement.
        seed: of the generator; the same draws for every policy.

    Returns:
        (low, high), each [policies], the 2.5 % and 97.5 % points; NaN with a single stream.
    """
    policies, streams = per_stream.shape
    if streams < 2:
        return np.full(policies, np.nan), np.full(policies, np.nan)
    means = resampled(per_stream, resamples=resamples, seed=seed)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=1, method="linear")
    return low, high


def resampled(
    per_stream: Array, *, resamples: int = RESAMPLES, seed: int = BOOTSTRAP_SEED
) -> Array:
    """Means over streams drawn with replacement.

    Args:
        per_stream: [k, streams].
        resamples: draws of all streams.
        seed: of the generator; the same draws for every row, so that functions of several rows
            see the same streams.

    Returns:
        [k, resamples].
    """
    means: Array = per_stream @ _weights(per_stream.shape[1], resamples, seed)
    return means


@cache
def _weights(streams: int, resamples: int, seed: int) -> Array:
    """Weights of streams in every resample, [streams, resamples]: how often each was drawn.

    A product with them replaces a [policies, resamples, streams] gather.
    """
    draws = np.random.Generator(np.random.Philox(seed)).integers(streams, size=(resamples, streams))
    return np.stack([(draws == s).sum(axis=1) for s in range(streams)]) / streams
