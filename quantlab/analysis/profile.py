"""From watched scans to tables: what each head accumulated, and what the theory says of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quantlab.analysis.observer import SERIES, Observations, ObservedScan
from quantlab.analysis.ranges import RANGE_COUNTS
from quantlab.replay.policy import Policy

Array = npt.NDArray[Any]

_KEY = (
    pa.field("policy", pa.string()),
    pa.field("stream", pa.int32()),
    pa.field("layer", pa.int32()),
)


def _number(name: str, meaning: str) -> pa.Field:
    return pa.field(name, pa.float64(), metadata={"meaning": meaning})


SERIES_SCHEMA = pa.schema(
    [
        *_KEY,
        pa.field("head", pa.int32()),
        pa.field("position", pa.int32()),
        *(_number(name, meaning) for name, meaning in SERIES.items()),
    ]
)
"""One row a policy, stream, layer, head and observation. Squares are means over elements."""

RANGE_SCHEMA = pa.schema(
    [
        *_KEY,
        pa.field("position", pa.int32()),
        pa.field("elements", pa.int64()),
        *(
            pa.field(name, pa.int64(), metadata={"meaning": meaning})
            for name, meaning in RANGE_COUNTS.items()
        ),
    ]
)
"""One row a policy, stream, layer and observation: what its store did, over all heads."""

HEAD_SCHEMA = pa.schema(
    [
        *_KEY,
        pa.field("head", pa.int32()),
        _number("half_life", "steps in which the mean gate halves a state"),
        _number("state", "mean over observations of the mean square of the stored state"),
        _number("deviation", "mean over observations of the mean square of D: accumulated error"),
        _number("relative", "mean over observations of mean square of D over that of the state"),
        _number("from_reference", "as deviation, from the reference run's stored state"),
        _number("output_relative", "Σ ‖D q‖² over Σ ‖S q‖²"),
        _number("write", "mean square of a write's error"),
        _number(
            "bias", "mean over elements of b², b an element's mean error; unbiased, can be < 0"
        ),
        _number("independent", "predicted deviation: errors of writes independent, gates alone"),
        _number("contracted", "the same with the isotropic contraction of a delta rule"),
        _number("biased", "predicted share of the bias: b² times the mean of (Σ γ)²"),
        _number("closed_form", "σ²/(1 − α^{2L}) with the mean gate and the mean write error"),
        _number("probe_output", "Σ over steps of the output error that the first store leaves"),
        _number("oracle_output", "the same if a delta rule did not read the error back"),
        _number("key_ratio", "largest over median RMS of the state's key channels"),
        _number("value_ratio", "largest over median RMS of the state's value rows"),
    ]
)
"""One row a policy, stream, layer and head."""

UNIT_SCHEMA = pa.schema(
    [
        *_KEY,
        pa.field("head", pa.int32()),
        pa.field("key", pa.int32()),
        _number("half_life", "steps in which the mean gate halves a state"),
        _number("deviation", "accumulated error of the unit, a mean square"),
        _number("relative", "the same over the unit's mean square state"),
    ]
)
"""One row a unit that decays on its own: a head (key −1), or a key channel of one (KDA)."""


def profile(
    scans: Sequence[ObservedScan], policies: Sequence[Policy], stream: int
) -> dict[str, pa.Table]:
    """Tables of one stream's run.

    Args:
        scans: of all layers, with one stream each.
        policies: of the scans, the reference among them.
        stream: index of the stream in the study.

    Returns:
        `series`, `ranges`, `heads` and `units`, of the schemas above.
    """
    found: dict[str, list[pa.Table]] = {"series": [], "ranges": [], "heads": [], "units": []}
    names = [str(policy) for policy in policies]
    for layer, scan in enumerate(scans):
        seen = scan.seen
        if seen is None or not seen.positions:
            raise ValueError("nothing was observed: the run is shorter than the stride")
        series = {name: x.tensor().cpu().numpy() for name, x in seen.series.items()}
        keys = (names, stream, layer)
        heads = _heads(seen, series, policies)
        found["series"].append(_series(series, seen.positions, keys))
        found["ranges"].append(_ranges(scan, seen, keys))
        found["heads"].append(_table(HEAD_SCHEMA, heads, keys, ("head",)))
        found["units"].append(_units(seen, heads, keys))
    return {name: pa.concat_tables(tables) for name, tables in found.items()}


def _series(series: dict[str, Array], positions: list[int], keys: Any) -> pa.Table:
    # [observations, rows, H] to [rows, H, observations]
    values = {name: np.moveaxis(x, 0, -1) for name, x in series.items()}
    table = _table(SERIES_SCHEMA, values, keys, ("head", "position"))
    at = np.asarray(positions, np.int32)[table["position"].to_numpy()]
    index = table.schema.get_field_index("position")
    return table.set_column(index, SERIES_SCHEMA.field("position"), pa.array(at))


def _ranges(scan: ObservedScan, seen: Observations, keys: Any) -> pa.Table:
    counts = {name: x.tensor().cpu().numpy().T for name, x in seen.ranges.items()}
    _, heads, dv, dk = seen.write_sum.shape
    counts["elements"] = np.full_like(counts["clipped"], heads * dv * dk)
    table = _table(RANGE_SCHEMA, counts, keys, ("position",))
    at = np.asarray(seen.positions, np.int32)[table["position"].to_numpy()]
    index = table.schema.get_field_index("position")
    return table.set_column(index, RANGE_SCHEMA.field("position"), pa.array(at))


def _heads(
    seen: Observations, series: dict[str, Array], policies: Sequence[Policy]
) -> dict[str, Array]:
    """Columns of `HEAD_SCHEMA`, each [rows, H]."""
    count = len(seen.positions)
    mean_error = seen.write_sum.double() / count
    variance = (seen.write_square.double() / count - mean_error.square()).clamp(min=0)
    variance = variance * count / max(1, count - 1)
    bias = (mean_error.square() - variance / count).mean((-2, -1)).cpu().numpy()
    write = series["write"].mean(0)
    log_decay = (seen.log_decay / seen.steps).cpu().numpy()
    per_head = log_decay if log_decay.ndim == 2 else log_decay.mean(-1)
    windows = np.array([p.window for p in policies])[:, None]
    kept = np.exp(2 * windows * per_head)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "half_life": _half_life(per_head),
            "state": series["state"].mean(0),
            "deviation": series["deviation"].mean(0),
            "relative": (series["deviation"] / series["state"]).mean(0),
            "from_reference": series["from_reference"].mean(0),
            "output_relative": series["output_error"].sum(0) / series["output"].sum(0),
            "write": write,
            "bias": bias,
            "independent": series["independent"].mean(0),
            "contracted": series["contracted"].mean(0),
            "biased": bias * np.square(series["bias_gain"]).mean(0),
            "closed_form": write / (1 - kept),
            "probe_output": seen.probe_output.cpu().numpy(),
            "oracle_output": seen.oracle_output.cpu().numpy(),
            "key_ratio": _max_to_median(seen.state_by_key.cpu().numpy()),
            "value_ratio": _max_to_median(seen.state_by_value.cpu().numpy()),
        }


def _units(seen: Observations, heads: dict[str, Array], keys: Any) -> pa.Table:
    if seen.log_decay.ndim == 2:
        values = {name: heads[name][..., None] for name in ("half_life", "deviation", "relative")}
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
