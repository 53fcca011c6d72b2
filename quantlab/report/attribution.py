"""Tables and figures of an attribution, from its tables alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quantlab.report.ablation_figure import log_lines
from quantlab.report.ablation_table import bounds
from quantlab.report.figure import finish
from quantlab.report.page import describe, write_figures
from quantlab.report.table import Table, number, short_length

if TYPE_CHECKING:
    from quantlab.study.attribute import Attribution

Row = dict[str, Any]
# Units of the table; the others are in the CSV.
SHOWN = 12


def attribution_report(units: pa.Table, sums: pa.Table) -> list[Table]:
    """Lay out the largest units at the last N, and sums over units at every N."""
    rows: list[Row] = units.to_pylist()
    if not rows:
        return [Table(header=("unit",), rows=(), note="nothing has been measured yet")]
    return [_largest(rows), *_sums(sums.to_pylist())]


def _largest(rows: list[Row]) -> Table:
    last = [r for r in rows if r["n"] == max(x["n"] for x in rows)]
    ranked = sorted(last, key=lambda r: -_or(r["only"], -math.inf))
    more = f"; {len(ranked) - SHOWN} more in attribution.csv" if len(ranked) > SHOWN else ""
    return Table(
        header=("unit", "alone", "share", "95 %", "left out", "saved", "95 %"),
        rows=tuple(
            (
                unit_name(r),
                "div." if math.isnan(r["only"]) else number(r["only"]),
                _percent(r["share"]),
                _percents(r, "share"),
                "div." if math.isnan(r["without"]) else number(r["without"]),
                _percent(r["saved"]),
                _percents(r, "saved"),
            )
            for r in ranked[:SHOWN]
        ),
        note=f"{last[0]['policy']} at N = {short_length(last[0]['n'])}, whole "
        f"{number(last[0]['whole'])}. alone: KL in nats with the policy on this unit only; share: "
        "of the whole's. left out: on all but this unit; saved: what that takes off the whole's"
        + more,
    )


def _sums(rows: list[Row]) -> list[Table]:
    added = Table(
        header=("N", "whole", "Σ alone", "95 %", "Σ saved", "95 %", "top quarter", "half in"),
        rows=tuple(
            (
                short_length(r["n"]),
                number(r["whole"]),
                number(r["sum_only"]),
                bounds(r["sum_only_low"], r["sum_only_high"]),
                number(r["sum_saved"]),
                bounds(r["sum_saved_low"], r["sum_saved_high"]),
                _percent(r["top_quarter"]),
                f"{r['half']} of {r['units']}",
            )
            for r in rows
        ),
        note="Σ alone, Σ saved: sums over units ÷ whole, 1 where units add up. top quarter: share "
        "of Σ alone in the largest quarter of units; half in: fewest units with half of it. "
        "Intervals over streams",
    )
    ranks = Table(
        header=("N", "two streams", "least", "two halves", "two windows", "alone, saved"),
        rows=tuple(
            (
                short_length(r["n"]),
                *(
                    number(r[name])
                    for name in (
                        "streams_spearman",
                        "streams_spearman_least",
                        "halves_spearman",
                        "positions_spearman",
                        "ways_spearman",
                    )
                ),
            )
            for r in rows
        ),
        note="Spearman of the order of units: between two streams (mean over pairs, and the "
        "least), between halves of the streams, between the two halves of the window of N, and "
        "between the two ways of attributing",
    )
    return [added, ranks]


def unit_name(row: Row) -> str:
    """Name a unit in words."""
    layer = f"layer {row['layer']}"
    return layer if row["head"] < 0 else f"{layer}, head {row['head']}"


def write_attribution(attribution: Attribution) -> list[Path]:
    """Write map and sums as PNG and SVG into the run's directory.

    Returns:
        The files; none if nothing could be compared yet.

    Raises:
        RunError: if the disk is full.
    """
    result = attribution.result
    if attribution.units.num_rows == 0:
        return []
    name = attribution.units["policy"][0].as_py()
    title, subtitle = f"{result.spec.model}: where the KL of {name} comes from", describe(result)
    figures = {
        "map": map_figure(attribution.units, title=title, subtitle=subtitle),
        "additivity": additivity_figure(
            attribution.sums, title=f"{result.spec.model}: do parts add up?", subtitle=subtitle
        ),
    }
    return write_figures(result.path, figures)


def map_figure(units: pa.Table, *, title: str, subtitle: str) -> Any:
    """Draw the share of every unit at the last N: heads across, layers down.

    Args:
        units: of `ATTRIBUTION_SCHEMA`.
        title: what was measured.
        subtitle: on what.
    """
    import altair as alt

    rows: list[Row] = units.to_pylist()
    last = [r for r in rows if r["n"] == max(x["n"] for x in rows)]
    cells = [
        {
            "layer": r["layer"],
            "head": "all" if r["head"] < 0 else str(r["head"]),
            "share": r["share"],
            "label": _percent(r["share"]),
            "unit": unit_name(r),
        }
        for r in last
        if math.isfinite(r["share"])
    ]
    heads = sorted({r["head"] for r in last})
    columns = ["all"] if heads[0] < 0 else [str(head) for head in heads]
    top = max((c["share"] for c in cells), default=1.0)
    base = alt.Chart(alt.Data(values=cells)).encode(
        x=alt.X("head:O", title="head", sort=columns, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("layer:O", title="recurrent layer"),
    )
    boxes = base.mark_rect(stroke="white").encode(
        color=alt.Color(
            "share:Q",
            title="share of whole",
            scale=alt.Scale(scheme="blues", domain=[0, top]),
            legend=alt.Legend(format="%"),
        ),
        tooltip=["unit:N", alt.Tooltip("share:Q", format=".3p")],
    )
    text = base.mark_text(fontSize=11).encode(
        text="label:N",
        color=alt.condition(f"datum.share > {top * 0.6}", alt.value("white"), alt.value("#1a1a1a")),
    )
    height = max(120, 34 * len({c["layer"] for c in cells}))
    where = f"KL of the unit alone ÷ whole, at N = {short_length(last[0]['n'])}; {subtitle}"
    return finish(alt, alt.layer(boxes, text), title=title, subtitle=where, height=height)


def additivity_figure(sums: pa.Table, *, title: str, subtitle: str) -> Any:
    """Draw sums over units ÷ whole against N."""
    import altair as alt

    names = {"sum_only": "Σ alone", "sum_saved": "Σ saved by leaving out"}
    points = [
        {
            "name": label,
            "n": r["n"],
            "value": r[name],
            "low": _or(r[f"{name}_low"], r[name]),
            "high": _or(r[f"{name}_high"], r[name]),
        }
        for name, label in names.items()
        for r in sums.to_pylist()
    ]
    chart = log_lines(alt, points, "sum over units ÷ whole", "way", rule=1.0)
    return finish(alt, chart, title=title, subtitle=subtitle, height=320)


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f}%"


def _percents(row: Row, name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "–" if math.isnan(low) else f"{_percent(low)} … {_percent(high)}"


def _or(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value
