"""From watched scans to tables: what each head accumulated, and what the theory says of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor

from quantlab.analysis.observations import Observations
from quantlab.analysis.observer import ObservedScan
from quantlab.analysis.profile_schemas import (
    GEOMETRY_SCHEMA,
    HEAD_SCHEMA,
    RANGE_SCHEMA,
    SERIES_SCHEMA,
    UNIT_SCHEMA,
)
from quantlab.replay.policy import Policy

Array = npt.NDArray[Any]


def profile(
    scans: Sequence[ObservedScan], policies: Sequence[Policy], stream: int
) -> dict[str, pa.Table]:
    """Tables of one stream's run.

    Args:
        scans: of all layers, with one stream each.
        policies: of the scans, the reference among them.
        stream: index of the stream in the study.

    Returns:
        `series`, `ranges`, `heads`, `units` and `geometry`, of `profile_schemas`.
    """
    found: dict[str, list[pa.Table]] = {}
    names = [str(policy) for policy in policies]
    for layer, scan in enumerate(scans):
        seen = scan.seen
        if seen is None or not seen.positions:
            raise ValueError("nothing was observed: the run is shorter than the stride")
        series = {name: x.tensor().cpu().numpy() for name, x in seen.series.items()}
        keys = (names, stream, layer)
        heads = _heads(seen, series, policies)
        tables = {
            "series": _series(series, seen.positions, keys),
            "ranges": _ranges(seen, policies, keys),
            "heads": _table(HEAD_SCHEMA, heads, keys, ("head",)),
            "units": _units(seen, heads, keys),
            "geometry": _geometry(seen, keys),
        }
        for name, table in tables.items():
            found.setdefault(name, []).append(table)
    return {name: pa.concat_tables(tables) for name, tables in found.items()}


def _series(series: dict[str, Array], positions: list[int], keys: Any) -> pa.Table:
    # [observations, rows, H] to [rows, H, observations]
    values = {name: np.moveaxis(x, 0, -1) for name, x in series.items()}
    table = _table(SERIES_SCHEMA, values, keys, ("head", "position"))
    at = np.asarray(positions, np.int32)[table["position"].to_numpy()]
    index = table.schema.get_field_index("position")
    return table.set_column(index, SERIES_SCHEMA.field("position"), pa.array(at))


def _ranges(seen: Observations, policies: Sequence[Policy], keys: Any) -> pa.Table:
    _, heads, dv, dk = seen.write_sum.shape
    # [observations, rows, copies] to [rows, observations] of each copy
    counts = {name: np.moveaxis(x.tensor().cpu().numpy(), 0, 1) for name, x in seen.ranges.items()}
    tables = []
    for copy, name in enumerate(("recurrence", "read")):
        rows = [p for p, policy in enumerate(policies) if not copy or policy.kind == "separate"]
        if not rows:
            continue
        values = {count: x[rows, :, copy] for count, x in counts.items()}
        shape = values["clipped"].shape
        values["elements"] = np.full(shape, heads * dv * dk)
        values["copy"] = np.full(shape, name, dtype=object)
        names = [keys[0][p] for p in rows]
        tables.append(_table(RANGE_SCHEMA, values, (names, *keys[1:]), ("position",)))
    table = pa.concat_tables(tables)
    at = np.asarray(seen.positions, np.int32)[table["position"].to_numpy()]
    index = table.schema.get_field_index("position")
    return table.set_column(index, RANGE_SCHEMA.field("position"), pa.array(at))


def _geometry(seen: Observations, keys: Any) -> pa.Table:
    tables = []
    for axis, state, deviation in (
        ("key", seen.state_by_key, seen.deviation_by_key),
        ("value", seen.state_by_value, seen.deviation_by_value),
    ):
        values = {
            "state": state.cpu().numpy() / len(seen.positions),
            "deviation": deviation.cpu().numpy() / len(seen.positions),
            "axis": np.full(state.shape, axis, dtype=object),
        }
        tables.append(_table(GEOMETRY_SCHEMA, values, keys, ("head", "index")))
    return pa.concat_tables(tables)


def _heads(
    seen: Observations, series: dict[str, Array], policies: Sequence[Policy]
) -> dict[str, Array]:
    """Columns of `HEAD_SCHEMA`, each [rows, H]."""
    count = len(seen.positions)
    mean_error, variance = _moments(seen.write_sum, seen.write_square, count)
    bias = (mean_error.square() - variance / count).mean((-2, -1)).cpu().numpy()
    mean = seen.deviation_sum.double() / count
    deviation_mean = mean.square().mean((-2, -1)).cpu().numpy()
    write, deviation = series["write"].mean(0), series["deviation"].mean(0)
    log_decay = (seen.log_decay / seen.steps).cpu().numpy()
    per_head = log_decay if log_decay.ndim == 2 else log_decay.mean(-1)
    kept = np.exp(np.array([p.window for p in policies])[:, None] * per_head)  # α^L
    first = seen.first_error.cpu().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "half_life": _half_life(per_head),
            "state": series["state"].mean(0),
            "deviation": deviation,
            "relative": (series["deviation"] / series["state"]).mean(0),
            "read_deviation": series["read_deviation"].mean(0),
            "read_relative": (series["read_deviation"] / series["state"]).mean(0),
            "from_reference": series["from_reference"].mean(0),
            "output_relative": series["output_error"].sum(0) / series["output"].sum(0),
            "step_relative": series["step_error"].sum(0) / series["step_output"].sum(0),
            "write": write,
            "bias": bias,
            "independent": series["independent"].mean(0),
            "contracted": series["contracted"].mean(0),
            "biased": bias * np.square(series["bias_gain"]).mean(0),
            "closed_form": write / (1 - kept**2),
            "bias_limit": np.maximum(bias, 0) / (1 - kept) ** 2,
            "variance_limit": (write - np.maximum(bias, 0)) / (1 - kept**2),
            "deviation_mean": deviation_mean,
            "deviation_variance": deviation - deviation_mean,
            "first_error": first,
            "probe_left": series["probe"][-1] / first,
            "oracle_left": series["oracle"][-1] / first,
            "probe_output": seen.probe_output.cpu().numpy(),
            "oracle_output": seen.oracle_output.cpu().numpy(),
            "key_ratio": _max_to_median(seen.state_by_key.cpu().numpy()),
            "value_ratio": _max_to_median(seen.state_by_value.cpu().numpy()),
        }


def _moments(total: Tensor, squares: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of each element from sums over observations."""
    mean = total.double() / count
    variance = (squares.double() / count - mean.square()).clamp(min=0)
    return mean, variance * count / max(1, count - 1)


def _units(seen: Observations, heads: dict[str, Array], keys: Any) -> pa.Table:
    if seen.log_decay.ndim == 2:
        values = {name: heads[name][..., None] for name in ("half_life", "deviation", "relative")}
        error = seen.series["output_error"].tensor().mean(0)
        values["output_error"] = error.cpu().numpy()[..., None]
        table = _table(UNIT_SCHEMA, values, keys, ("head", "key"))
        none = pa.array(np.full(table.num_rows, -1, np.int32))
        index = table.schema.get_field_index("key")
        return table.set_column(index, UNIT_SCHEMA.field("key"), none)
    deviation = seen.deviation_by_key.cpu().numpy() / len(seen.positions)
    state = seen.state_by_key.cpu().numpy() / len(seen.positions)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = {
            "half_life": _half_life((seen.log_decay / seen.steps).cpu().numpy()),
            "deviation": deviation,
            "relative": deviation / state,
            "output_error": seen.output_error_by_key.cpu().numpy() / len(seen.positions),
        }
    return _table(UNIT_SCHEMA, values, keys, ("head", "key"))


def _table(
    schema: pa.Schema, values: dict[str, Array], keys: tuple[list[str], int, int], axes: Any
) -> pa.Table:
    """Lay out arrays [policies, …axes] as rows; an axis becomes a column of its indices."""
    names, stream, layer = keys
    shape = next(iter(values.values())).shape
    index = np.indices(shape, dtype=np.int32)
    columns: dict[str, Any] = {
        "policy": np.asarray(names, dtype=object)[index[0].ravel()],
        "stream": np.full(index[0].size, stream, np.int32),
        "layer": np.full(index[0].size, layer, np.int32),
    }
    columns |= {axis: index[i + 1].ravel() for i, axis in enumerate(axes)}
    columns |= {name: x.ravel() for name, x in values.items()}
    arrays = [pa.array(columns[field.name], type=field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _half_life(log_decay: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(2) / -np.minimum(log_decay, -0.0))


def _max_to_median(mean_squares: Array) -> Array:
    rms = np.sqrt(mean_squares)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(rms.max(-1) / np.median(rms, axis=-1))
