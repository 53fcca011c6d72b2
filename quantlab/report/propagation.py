"""Tables and figures of a watched run, from its tables alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from quantlab.report.ablation_figure import log_ticks
from quantlab.report.figure import finish
from quantlab.report.page import write_figures
from quantlab.report.style import named_colours
from quantlab.report.table import Table, number, short_length, short_policy

if TYPE_CHECKING:
    from quantlab.study.propagate import Propagation

Row = dict[str, Any]


def propagation_tables(summary: pa.Table) -> list[Table]:
    """Lay out a summary (`PROPAGATION_SCHEMA`) as three tables."""
    rows: list[Row] = summary.to_pylist()
    return [
        _columns(
            rows,
            {
                "state": "relative",
                "read": "read_relative",
                "output": "output_relative",
                "steps": "step_relative",
                "÷ by reference": "reference_ratio",
                "Spearman": "spearman",
                "of relative": "spearman_relative",
                "quarter": "quarter_share",
                "its relative": "quarter_share_relative",
                "NLL first": "excess_nll_first",
                "NLL last": "excess_nll_last",
            },
            "state, read copy, output of the stored state right after a store, and outputs of all "
            "steps as they were: mean square error over mean square, median head. ÷ by reference: "
            "deviation from the reference run over deviation from the exact recurrence on the "
            "run's own inputs. Spearman of half-life with accumulated error, and with error "
            "relative to the state; quarter: share of it in the longest-lived quarter of units. "
            "NLL: excess over the first and last 256 positions, nats",
        ),
        _columns(
            rows,
            {
                "write": "write_relative",
                "bias²": "bias_share",
                "÷ independent": "independent_ratio",
                "÷ with bias": "predicted_ratio",
                "÷ contracted": "contracted_ratio",
                "above": "heads_above_bound",
                "÷ closed form": "closed_form_ratio",
                "÷ limits": "limit_ratio",
                "left": "probe_left",
                "left, no rule": "oracle_left",
                "oracle": "oracle_ratio",
            },
            "write: mean square error of one write over the state's mean square, median head. "
            "bias²: share of a write's mean square error that is an element's mean, median head. "
            "Measured deviation over what independent errors come to under the run's own gates, "
            "with the bias added, and with a delta rule's contraction under isotropic keys; "
            "above: share of heads over the first; closed form: σ²/(1 − α^{2L}) of the mean gate, "
            "limits: b²/(1 − α^L)² + σ²/(1 − α^{2L}), median head. left: share of the first "
            "store's squared error at the end, median head, and without the delta rule's feedback. "
            "oracle: output error of this one injection without feedback over with it",
        ),
        _columns(
            rows,
            {
                "keys": "key_ratio",
                "values": "value_ratio",
                "clipped": "clipped",
                "flushed": "flushed",
                "subnormal": "subnormal",
            },
            "largest over median RMS of the state's key channels and value rows, median head; "
            "shares of elements that a store clips, flushes to zero, or keeps as a subnormal",
        ),
    ]


def _columns(rows: list[Row], columns: dict[str, str], note: str) -> Table:
    return Table(
        header=("policy", *columns),
        rows=tuple(
            (short_policy(r["policy"]), *(number(r[name]) for name in columns.values()))
            for r in rows
        ),
        note=note,
    )


def write_propagation(result: Propagation) -> list[Path]:
    """Write heads and drift as PNG and SVG into the run's directory.

    Raises:
        RunError: if the disk is full.
    """
    spec = result.spec
    names = {str(p): p.short for p in spec.policies}
    streams = result.summary["streams"][0].as_py()
    subtitle = (
        f"{streams} stream{'s' * (streams != 1)} of {Path(spec.data).name}, N = "
        f"{short_length(spec.tokens)}, observed every {result.every} tokens"
    )
    figures = {
        "heads": heads_figure(
            result.tables["heads"],
            names,
            title=f"{spec.model}: slow heads accumulate error",
            subtitle=subtitle,
        ),
        "drift": drift_figure(
            result.tables["rows"],
            names,
            title=f"{spec.model}: drift of stored states",
            subtitle=subtitle,
        ),
        "injection": injection_figure(
            result.tables["rows"],
            result.tables["heads"],
            names,
            title=f"{spec.model}: one rounding error, left to the recurrence",
            subtitle=subtitle,
        ),
    }
    return write_figures(result.path, figures)


def heads_figure(heads: pa.Table, names: dict[str, str], *, title: str, subtitle: str) -> Any:
    """Draw accumulated relative error of every head against its half-life, log-log.

    Args:
        heads: of `HEAD_SCHEMA`.
        names: legend names by long form; others (the reference) are left out.
        title: what was measured.
        subtitle: on what.
    """
    import altair as alt

    points = [
        {
            "policy": names[r["policy"]],
            "x": r["half_life"],
            "y": r["relative"],
            "head": f"layer {r['layer']}, head {r['head']}",
        }
        for r in heads.to_pylist()
        if r["policy"] in names and _drawable(r["half_life"]) and _drawable(r["relative"])
    ]
    chart = (
        alt.Chart(alt.Data(values=points))
        .mark_point(filled=True, size=36, opacity=0.8)
        .encode(
            x=_axis(alt, "X", points, "x", "half-life of the head's mean gate, tokens"),
            y=_axis(alt, "Y", points, "y", "mean square error ÷ mean square of the state"),
            color=named_colours(alt, "policy", list(names.values()), "policy"),
            tooltip=["policy:N", "head:N", "x:Q", alt.Tooltip("y:Q", format=".3g")],
        )
    )
    return finish(alt, chart, title=title, subtitle=subtitle)


def drift_figure(series: pa.Table, names: dict[str, str], *, title: str, subtitle: str) -> Any:
    """Draw the mean over heads and streams of the relative squared deviation against position."""
    import altair as alt

    policies = np.asarray(series["policy"].to_pylist(), dtype=object)
    positions = series["position"].to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = series["deviation"].to_numpy() / series["state"].to_numpy()
    points = []
    for policy, name in names.items():
        for position in np.unique(positions):
            here = relative[(policies == policy) & (positions == position)]
            value = float(here.mean())
            if _drawable(value):
                points.append({"policy": name, "x": int(position), "y": value})
    chart = (
        alt.Chart(alt.Data(values=points))
        .mark_line(strokeWidth=1.8)
        .encode(
            x=_axis(alt, "X", points, "x", "tokens generated after the prompt"),
            y=_axis(alt, "Y", points, "y", "mean square error ÷ mean square of the state"),
            color=named_colours(alt, "policy", list(names.values()), "policy"),
        )
    )
    return finish(alt, chart, title=title, subtitle=subtitle)


def injection_figure(
    series: pa.Table, heads: pa.Table, names: dict[str, str], *, title: str, subtitle: str
) -> Any:
    """Draw what is left of the first store's squared error, mean over heads and streams.

    Solid as the recurrence has it, dashed if no delta rule read the error back; without a delta
    rule the two are one line.
    """
    import altair as alt

    first = {
        tuple(r[k] for k in ("policy", "stream", "layer", "head")): r["first_error"]
        for r in heads.to_pylist()
    }
    left: dict[tuple[str, int, str], list[float]] = {}
    for r in series.to_pylist():
        error = first[tuple(r[k] for k in ("policy", "stream", "layer", "head"))]
        if r["policy"] in names and error > 0:
            for column, name in (("probe", "as it is"), ("oracle", "no feedback")):
                key = (names[r["policy"]], r["position"], name)
                left.setdefault(key, []).append(r[column] / error)
    points = [
        {"policy": policy, "x": x, "rule": rule, "y": float(np.mean(found))}
        for (policy, x, rule), found in left.items()
        if _drawable(float(np.mean(found)))
    ]
    rules = ["as it is", "no feedback"]
    dash = alt.Scale(domain=rules, range=[[1, 0], [4, 3]])
    chart = (
        alt.Chart(alt.Data(values=points))
        .mark_line(strokeWidth=1.8)
        .encode(
            x=_axis(alt, "X", points, "x", "tokens since the injection"),
            y=_axis(alt, "Y", points, "y", "share left, squared"),
            color=named_colours(alt, "policy", list(names.values()), "policy"),
            strokeDash=alt.StrokeDash("rule:N", title="delta rule", sort=rules, scale=dash),
        )
    )
    return finish(alt, chart, title=title, subtitle=subtitle)


def _axis(alt: Any, channel: str, points: list[Row], name: str, title: str) -> Any:
    ticks = log_ticks([p[name] for p in points])
    scale = alt.Scale(type="log", domain=[ticks[0], ticks[-1]], nice=False)
    axis = alt.Axis(values=ticks, format="~g")
    return getattr(alt, channel)(f"{name}:Q", title=title, scale=scale, axis=axis)


def _drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0
