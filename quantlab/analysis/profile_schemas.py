"""Columns of the tables that `profile` lays out."""

from __future__ import annotations

import pyarrow as pa

from quantlab.analysis.observations import SERIES
from quantlab.analysis.ranges import RANGE_COUNTS

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
        pa.field("copy", pa.string()),
        pa.field("position", pa.int32()),
        pa.field("elements", pa.int64()),
        *(
            pa.field(name, pa.int64(), metadata={"meaning": meaning})
            for name, meaning in RANGE_COUNTS.items()
        ),
    ]
)
"""One row a policy, stream, layer, copy ("recurrence", where there are two "read" as well) and
observation: what its store did, over all heads."""

HEAD_SCHEMA = pa.schema(
    [
        *_KEY,
        pa.field("head", pa.int32()),
        _number("half_life", "steps in which the mean gate halves a state"),
        _number("state", "mean over observations of the mean square of the stored state"),
        _number("deviation", "mean over observations of the mean square of D: accumulated error"),
        _number("relative", "mean over observations of mean square of D over that of the state"),
        _number("read_deviation", "as deviation, of the copy that steps 1 … L − 1 read"),
        _number("read_relative", "as relative, of that copy"),
        _number("from_reference", "as deviation, from the reference run's stored state"),
        _number("output_relative", "Σ ‖D q‖² over Σ ‖S q‖²"),
        _number("step_relative", "Σ over all steps ‖o − o*‖² over Σ ‖o*‖², o* the shadow's output"),
        _number("write", "mean square of a write's error"),
        _number(
            "bias", "mean over elements of b², b an element's mean error; unbiased, can be < 0"
        ),
        _number("independent", "predicted deviation: errors of writes independent, gates alone"),
        _number("contracted", "the same with the isotropic contraction of a delta rule"),
        _number("biased", "predicted share of the bias: b² times the mean of (Σ γ)²"),
        _number("closed_form", "σ²/(1 − α^{2L}) with the mean gate and the mean write error"),
        _number("bias_limit", "b²/(1 − α^L)² with the mean gate"),
        _number("variance_limit", "(σ² − b²)/(1 − α^{2L}), σ² the mean write error"),
        _number("deviation_mean", "mean over elements of (mean of D over observations)²"),
        _number("deviation_variance", "mean over elements of D's variance over observations"),
        _number("first_error", "mean square of the post-prefill store's error: one injection"),
        _number("probe_left", "share of it that is left at the last observation"),
        _number("oracle_left", "the same if the delta rule did not read it back"),
        _number("probe_output", "Σ over steps of the output error that the first store leaves"),
        _number("oracle_output", "the same if a delta rule did not read the error back"),
        _number("key_ratio", "largest over median RMS of the state's key channels"),
        _number("value_ratio", "largest over median RMS of the state's value rows"),
    ]
)
"""One row a policy, stream, layer and head. A head that wanders slowly has a mean over a short run
that is not its bias: `deviation_mean` holds both."""

UNIT_SCHEMA = pa.schema(
    [
        *_KEY,
        pa.field("head", pa.int32()),
        pa.field("key", pa.int32()),
        _number("half_life", "steps in which the mean gate halves a state"),
        _number("deviation", "accumulated error of the unit, a mean square"),
        _number("relative", "the same over the unit's mean square state"),
        _number("output_error", "mean square over dv of D q, of a key channel its own part"),
    ]
)
"""One row a unit that decays on its own: a head (key −1), or a key channel of one (KDA)."""

GEOMETRY_SCHEMA = pa.schema(
    [
        *_KEY,
        pa.field("head", pa.int32()),
        pa.field("axis", pa.string()),
        pa.field("index", pa.int32()),
        _number("state", "mean over observations of the mean square of the stored state"),
        _number("deviation", "the same of D"),
    ]
)
"""One row a key channel (axis "key") or value row (axis "value") of every policy, stream, layer and
head: where a state is large, and where its error lies."""
