"""What a watched run shows as a whole: one line of figures a policy, from its tables alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quantlab.metrics.positions import window

Array = npt.NDArray[np.float64]
QUARTER = 0.25

PROPAGATION_SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string()),
        pa.field("streams", pa.int32()),
        pa.field("units", pa.int32()),
        *(
            pa.field(name, pa.float64(), metadata={"meaning": meaning})
            for name, meaning in {
                "relative": "median over heads of mean D² over mean S²",
                "read_relative": "the same of the copy that steps 1 … L − 1 read",
                "output_relative": "median over heads of Σ‖D q‖² over Σ‖S q‖²",
                "step_relative": "the same over all steps, of outputs with the copy they read",
                "write_relative": "median over heads of a write's mean square error over mean S²",
                "reference_ratio": "Σ deviation from the reference run over Σ D², over all heads",
                "spearman": "of units' half-life with accumulated error, streams averaged",
                "spearman_relative": "the same with error over the unit's state",
                "quarter_share": "share of accumulated error in the longest-lived quarter of units",
                "quarter_share_relative": "the same of error over the unit's state",
                "bias_share": "median over heads of b² over the mean square of a write's error",
                "independent_ratio": "Σ D² over Σ predicted from independent errors and gates",
                "contracted_ratio": "the same, prediction with the rule's isotropic contraction",
                "predicted_ratio": "the same, prediction of the gates with the bias added",
                "closed_form_ratio": "median over heads of D² over σ²/(1 − α^{2L})",
                "limit_ratio": "median over heads of D² over b²/(1 − α^L)² + σ²/(1 − α^{2L})",
                "probe_left": "median over heads, share left of one injection at the end, squared",
                "oracle_left": "the same without the delta rule's feedback",
                "heads_above_bound": "share of heads whose D² exceeds the independent prediction",
                "oracle_ratio": "Σ output error of the oracle over native feedback, one injection",
                "key_ratio": "median over heads, largest over median RMS of key channels",
                "value_ratio": "the same of value rows",
                "clipped": "share of elements per store",
                "flushed": "share of elements per store",
                "subnormal": "share of elements per store",
                "excess_nll_first": "nats, mean over the first 256 positions",
                "excess_nll_last": "nats, mean over the last 256 positions",
            }.items()
        ),
    ]
)


def propagation_summary(tables: dict[str, pa.Table], tokens: int) -> pa.Table:
    """Summarise the tables of `profile.profile`, of all streams, and the measured tokens.

    Args:
        tables: `heads`, `units`, `ranges`, and `tokens` (rows of a KL study).
        tokens: N.

    Returns:
        A table of `PROPAGATION_SCHEMA`, one row a policy in the order of `tokens`, which has no
        reference.
    """
    policies = list(dict.fromkeys(tables["tokens"]["policy"].to_pylist()))
    rows = []
    for policy in policies:
        heads, units, ranges, measured = (
            _of(tables[name], policy) for name in ("heads", "units", "ranges", "tokens")
        )
        # of the copy that most steps read, where there are two
        copy = "read" if "read" in ranges["copy"] else "recurrence"
        ranges = {name: x[ranges["copy"] == copy] for name, x in ranges.items()}
        rows.append(
            {
                "policy": policy,
                "streams": len(set(heads["stream"].tolist())),
                **_heads(heads),
                **_units(units),
                **{
                    name: float(ranges[name].sum() / ranges["elements"].sum())
                    for name in ("clipped", "flushed", "subnormal")
                },
                **_excess(measured, tokens),
            }
        )
    return pa.Table.from_pylist(rows, schema=PROPAGATION_SCHEMA)


def _of(table: pa.Table, policy: str) -> dict[str, npt.NDArray[Any]]:
    names = np.asarray(table["policy"].to_pylist(), dtype=object)
    kept = table.filter(pa.array(names == policy))
    return {name: np.asarray(kept[name].to_numpy()) for name in kept.schema.names}


def _heads(heads: dict[str, Array]) -> dict[str, float]:
    total = heads["deviation"].sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "relative": float(np.median(heads["relative"])),
            "read_relative": float(np.median(heads["read_relative"])),
            "output_relative": float(np.median(heads["output_relative"])),
            "step_relative": float(np.median(heads["step_relative"])),
            "write_relative": float(np.median(heads["write"] / heads["state"])),
            "reference_ratio": float(heads["from_reference"].sum() / total),
            "bias_share": float(np.median(heads["bias"] / heads["write"])),
            "independent_ratio": float(total / heads["independent"].sum()),
            "contracted_ratio": float(total / heads["contracted"].sum()),
            "predicted_ratio": float(
                total / (heads["independent"] + np.maximum(heads["biased"], 0)).sum()
            ),
            "closed_form_ratio": float(np.median(heads["deviation"] / heads["closed_form"])),
            "limit_ratio": float(
                np.median(heads["deviation"] / (heads["bias_limit"] + heads["variance_limit"]))
            ),
            "probe_left": float(np.median(heads["probe_left"])),
            "oracle_left": float(np.median(heads["oracle_left"])),
            "heads_above_bound": float(np.mean(heads["deviation"] > heads["independent"])),
            "oracle_ratio": float(heads["oracle_output"].sum() / heads["probe_output"].sum())
            if heads["oracle_output"].any()
            else float("nan"),
            "key_ratio": float(np.median(heads["key_ratio"])),
            "value_ratio": float(np.median(heads["value_ratio"])),
        }


def _units(units: dict[str, Array]) -> dict[str, float]:
    streams = len(set(units["stream"].tolist()))

    def averaged(name: str) -> Array:
        return np.asarray(units[name].reshape(streams, -1).mean(axis=0))

    half_life = averaged("half_life")
    found: dict[str, float] = {"units": len(half_life)}
    for suffix, name in (("", "deviation"), ("_relative", "relative")):
        error = averaged(name)
        found[f"spearman{suffix}"] = spearman(half_life, error)
        found[f"quarter_share{suffix}"] = quarter_share(half_life, error)
    return found


def spearman(x: Array, y: Array) -> float:
    """Rank correlation; NaN where one of them is constant."""
    from scipy import stats

    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(stats.spearmanr(x, y).statistic)


def quarter_share(half_life: Array, error: Array) -> float:
    """Share of error in the quarter of units with the longest half-lives, rounded up."""
    count = int(np.ceil(QUARTER * len(half_life)))
    longest = np.argsort(-half_life, kind="stable")[:count]
    return float(error[longest].sum() / error.sum())


def _excess(rows: dict[str, Array], tokens: int) -> dict[str, float]:
    excess = rows["nll"] - rows["nll_reference"]
    first = np.isin(rows["position"], first_positions(tokens))
    last = np.isin(rows["position"], np.asarray(window(tokens)))
    return {
        "excess_nll_first": float(excess[first].mean()),
        "excess_nll_last": float(excess[last].mean()),
    }


def first_positions(tokens: int) -> Sequence[int]:
    """Return the first min(N, 256) positions."""
    return range(1, len(window(tokens)) + 1)
