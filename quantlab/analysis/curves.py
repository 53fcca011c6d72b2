"""KL at N per stream, for tables that compare policies; intervals over streams, as in summaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quantlab.metrics.positions import window
from quantlab.metrics.summary import CONFIDENCE, resampled, to_cube
from quantlab.replay.policy import Policy, parse_policy

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number and its 95 % interval over resampled streams; NaN ends with a single stream.

    Attributes:
        value: of the streams at hand.
        low: lower end.
        high: upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One policy, with its repetitions under other seeds.

    Attributes:
        policy: without a seed.
        seeds: how many repetitions.
        kl: [seeds, lengths, streams] mean KL over the window of N, NaN from divergence on.
        of_mean: [lengths, streams] KL of the mean logits over the seeds, NaN with one.
        diverged: [lengths] streams of which some seed's state has diverged by N.
    """

    policy: Policy
    seeds: int
    kl: Array
    of_mean: Array
    diverged: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """All policies of a study.

    Attributes:
        lengths: N, those whose windows are complete.
        streams: how many are complete.
        curves: by policy without its seed, in the study's order.
    """

    lengths: tuple[int, ...]
    streams: int
    curves: tuple[Curve, ...]


def to_curves(rows: pa.Table, lengths: Sequence[int]) -> Curves:
    """Average rows over the windows of N; streams that are not complete are left out."""
    if rows.num_rows == 0:
        return Curves(lengths=(), streams=0, curves=())
    cube = to_cube(rows)
    whole = cube.present.all(axis=(0, 2))
    if not whole.any():
        return Curves(lengths=(), streams=0, curves=())
    held = set(cube.positions.tolist())
    kept = tuple(n for n in lengths if held.issuperset(window(n)))
    inside = [np.isin(cube.positions, np.asarray(window(n))) for n in kept]

    def averaged(name: str) -> Array:
        values = cube.values[name][:, whole]
        return np.stack([values[:, :, where].mean(axis=2) for where in inside], axis=1)

    kl, diverged = averaged("kl"), averaged("diverged") > 0
    of_mean = averaged("kl_of_mean") if "kl_of_mean" in cube.values else np.full_like(kl, np.nan)
    groups: dict[str, list[int]] = {}
    parsed = [parse_policy(text) for text in cube.policies]
    for index, policy in enumerate(parsed):
        groups.setdefault(str(replace(policy, seed=None)), []).append(index)
    return Curves(
        lengths=kept,
        streams=int(whole.sum()),
        curves=tuple(
            Curve(
                policy=replace(parsed[group[0]], seed=None),
                seeds=len(group),
                kl=kl[group],
                of_mean=of_mean[group[0]],
                diverged=diverged[group].any(axis=0).sum(axis=1),
            )
            for group in groups.values()
        ),
    )


def estimate(function: Callable[..., Array], *per_stream: Array) -> Estimate:
    """Evaluate a function of means over streams, with its interval.

    Args:
        function: of one array of means for each argument, elementwise.
        per_stream: [streams] each; all see the same resampled streams.
    """
    stacked = np.stack(per_stream)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(function(*stacked.mean(axis=1)))
        if stacked.shape[1] < 2 or not np.isfinite(stacked).all():
            return Estimate(value=value, low=np.nan, high=np.nan)
        draws = np.asarray(function(*resampled(stacked)))
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(draws, [tail, 1 - tail])
    return Estimate(value=value, low=float(low), high=float(high))


def mean(x: Array) -> Array:
    """Return a mean as it is, for `estimate`."""
    return x


def ratio(x: Array, y: Array) -> Array:
    """Divide the first by the second."""
    return np.divide(x, y)
