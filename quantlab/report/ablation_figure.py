"""Figures of ablations, as Vega-Lite by way of altair, from their comparison tables alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from quantlab.report.figure import finish
from quantlab.report.style import named_colours
from quantlab.report.table import short_length

HEIGHT = 320


def ablation_figure(kind: str, table: pa.Table, *, title: str, subtitle: str) -> Any:
    """Draw the comparison of an ablation.

    Args:
        kind: "rounding", "window" or "correction".
        table: of `quantlab.analysis`, with rows.
        title: what was measured.
        subtitle: on what.

    Returns:
        An altair chart.
    """
    import altair as alt

    rows = table.to_pylist()
    chart = _DRAWN[kind](alt, rows)
    return finish(alt, chart, title=title, subtitle=subtitle, height=HEIGHT)


def _rounding(alt: Any, rows: list[dict[str, Any]]) -> Any:
    points = [
        {
            "name": r["format"],
            "n": r["n"],
            "value": r["ratio"],
            "low": _or(r["ratio_low"], r["ratio"]),
            "high": _or(r["ratio_high"], r["ratio"]),
        }
        for r in rows
        if not r["rtn_diverged"] and not r["sr_diverged"]
    ]
    return log_lines(alt, points, "RTN KL ÷ SR KL at N", "shared copy", rule=1.0)


def _window(alt: Any, rows: list[dict[str, Any]]) -> Any:
    last = max(r["n"] for r in rows)
    points = [
        {
            "name": r["policy"],
            "n": r["window"],
            "value": r["kl"],
            "low": _or(r["kl_low"], r["kl"]),
            "high": _or(r["kl_high"], r["kl"]),
        }
        for r in rows
        if r["n"] == last and not r["diverged"]
    ]
    y = f"KL at N = {short_length(last)} (nats)"
    return log_lines(alt, points, y, "policy", x_title="replay window L, tokens per store")


def _correction(alt: Any, rows: list[dict[str, Any]]) -> Any:
    points = [
        {
            "name": f"{r['policy']}, {way}",
            "n": r["n"],
            "value": r[way],
            "low": r[way],
            "high": r[way],
        }
        for way in ("rederive", "fold")
        for r in rows
        if not r[f"{way}_diverged"]
    ]
    return log_lines(alt, points, "KL from FP32-state decoding at N (nats)", "policy, corrections")


_DRAWN: dict[str, Callable[[Any, list[dict[str, Any]]], Any]] = {
    "rounding": _rounding,
    "window": _window,
    "correction": _correction,
}


def log_lines(
    alt: Any,
    points: list[dict[str, Any]],
    y_title: str,
    legend: str,
    *,
    x_title: str = "tokens generated after the prompt, N",
    rule: float | None = None,
) -> Any:
    """Lines with bands over a doubling axis, log-log."""
    points = [p for p in points if p["value"] > 0 and math.isfinite(p["value"])]
    names = list(dict.fromkeys(p["name"] for p in points))
    for p in points:
        p["low"] = p["low"] if p["low"] > 0 else p["value"]
    grid = sorted({p["n"] for p in points})
    x = alt.X(
        "n:Q",
        title=x_title,
        scale=alt.Scale(type="log", base=2, nice=False),
        axis=alt.Axis(
            values=grid, labelExpr=f"({ {str(n): short_length(n) for n in grid} })[datum.value]"
        ),
    )
    ticks = log_ticks([p[end] for p in points for end in ("low", "high")])
    scale = alt.Scale(type="log", domain=[ticks[0], ticks[-1]], nice=False)
    y = alt.Y("value:Q", title=y_title, scale=scale, axis=alt.Axis(values=ticks, format="~g"))
    color = named_colours(alt, "name", names, legend)
    base = alt.Chart(alt.Data(values=points)).encode(x=x, color=color)
    band = base.mark_area(opacity=0.13).encode(
        y=alt.Y("low:Q", title=y_title, scale=scale), y2="high:Q"
    )
    line = base.mark_line(strokeWidth=1.8).encode(y=y)
    dots = base.mark_point(filled=True, size=42, opacity=1).encode(
        y=y,
        tooltip=["name:N", "n:Q", alt.Tooltip("value:Q", format=".3g")],
    )
    layers = [band, line, dots]
    if rule is not None:
        mark = alt.Chart(alt.Data(values=[{"value": rule}])).mark_rule(color="#888888")
        layers.insert(0, mark.encode(y=alt.Y("value:Q", scale=scale, title=y_title)))
    return alt.layer(*layers)


def log_ticks(values: list[float]) -> list[float]:
    """Ticks of 1, 2 and 5 (whole decades over more than three) that enclose the values."""
    if not values:
        return [0.1, 1.0, 10.0]
    low, high = math.log10(min(values)), math.log10(max(values))
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    exponents = range(math.floor(low) - 1, math.ceil(high) + 2)
    ticks = [float(f"{step}e{e}") for e in exponents for step in steps]
    below = [t for t in ticks if t <= min(values)]
    above = [t for t in ticks if t >= max(values)]
    return [t for t in ticks if below[-1] <= t <= above[0]]


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None or math.isnan(value) else value
