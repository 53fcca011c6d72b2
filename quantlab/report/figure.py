"""Figures of a summary, as Vega-Lite by way of altair.

`kl_figure` is KL at N against N, log-log: one line a policy, its interval over streams as a band,
diverged points as crosses at the top edge, the noise floor shaded. `tail_figure` is the
distribution of per-token KL at the last N.
"""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa

from quantlab.report.style import Style, styles
from quantlab.report.table import number, short_length

WIDTH, HEIGHT = 640, 400
# Room under the lowest curve for the noise floor, as a factor.
BELOW = 100.0
FONT = "DejaVu Sans, Verdana, sans-serif"
QUANTILES = {
    "median": "kl_median",
    "90 %": "kl_p90",
    "99 %": "kl_p99",
    "99.9 %": "kl_p999",
    "max": "kl_max",
}


def kl_figure(summary: pa.Table, *, title: str, subtitle: str, floor: str | None) -> Any:
    """Draw KL at N against N.

    Args:
        summary: of `quantlab.metrics.summary.SUMMARY_SCHEMA`.
        title: what was measured.
        subtitle: on what.
        floor: long form of the policy whose KL is the noise floor.

    Returns:
        An altair chart.
    """
    import altair as alt

    points = summary.to_pylist()
    look = styles(list(dict.fromkeys(p["policy"] for p in points)), floor)
    drawn = [_point(p, look) for p in points if p["kl"] > 0 and math.isfinite(p["kl"])]
    grid = sorted({p["n"] for p in points})
    low, high = _decades([v for d in drawn for v in (d["kl"], d["low"], d["high"]) if v > 0])
    others = [v for d in drawn if d["policy_long"] != floor for v in (d["kl"], d["low"]) if v > 0]
    beneath = ""
    if others and low < _decades(others)[0] / BELOW:
        # an FP32 model's floor can lie ten decades down, and would squeeze everything else
        low = _decades(others)[0] / BELOW
        level = [p["floor"] for p in points if p["policy"] == floor][-1]
        if level < low:
            beneath = f"noise floor below the axis ({number(level)} at the last N)"
    for d in drawn:
        d["low"] = max(d["low"], low)
    diverged = [
        {**_identity(p, look), "n": p["n"], "kl": high, "diverged": p["diverged"]}
        for p in points
        if p["diverged"]
    ]
    shade = [
        {"n": p["n"], "kl": p["floor"], "low": low}
        for p in points
        if p["policy"] == floor and p["floor"] > low
    ]
    x = alt.X(
        "n:Q",
        title="tokens generated after the prompt, N",
        scale=alt.Scale(type="log", base=2, domain=[grid[0], grid[-1]], nice=False),
        axis=alt.Axis(values=_ticks(grid), labelExpr=_labels(grid), grid=True),
    )
    y_scale = alt.Scale(type="log", domain=[low, high], nice=False)
    decades = [10.0**e for e in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    y = alt.Y(
        "kl:Q",
        title="KL from FP32-state decoding at N (nats)",
        scale=y_scale,
        axis=alt.Axis(values=decades, format="~e", grid=True),
    )
    looks = _encodings(alt, _ordered(points, look))
    tooltip = [
        alt.Tooltip("policy:N"),
        alt.Tooltip("n:Q", title="N", format=","),
        alt.Tooltip("kl:Q", title="KL (nats)", format=".3e"),
        alt.Tooltip("p99:Q", title="99 % of tokens below", format=".3e"),
        alt.Tooltip("top1:Q", title="top-1 agreement", format=".2%"),
    ]
    layers = []
    remarks = [beneath]
    if shade:
        remarks.append("grey: noise floor")
        layers.append(
            alt.Chart(_data(alt, shade))
            .mark_area(color="#bbbbbb", opacity=0.35, clip=True)
            .encode(x=x, y=y, y2="low:Q")
        )
    if any(math.isfinite(d["high"]) and d["high"] > d["low"] for d in drawn):
        remarks.append("bands: 95 % over streams")
        banded = [d for d in drawn if math.isfinite(d["high"]) and d["policy_long"] != floor]
        layers.append(
            alt.Chart(_data(alt, banded))
            .mark_area(opacity=0.13, clip=True)
            .encode(x=x, y=alt.Y("low:Q", scale=y_scale), y2="high:Q", color=looks["color"])
        )
    base = alt.Chart(_data(alt, drawn)).encode(x=x, y=y, **looks, tooltip=tooltip)
    layers.append(base.mark_line(strokeWidth=1.8, clip=True).encode(shape=alt.Undefined))
    # not clipped, which would halve the marks at the edges: those below the axis are left out
    marked = alt.Chart(_data(alt, [d for d in drawn if d["kl"] >= low])).encode(
        x=x, y=y, color=looks["color"], shape=looks["shape"], tooltip=tooltip
    )
    layers.append(marked.mark_point(size=42, filled=True, opacity=1))
    if diverged:
        layers.append(
            alt.Chart(_data(alt, diverged))
            .mark_point(shape="cross", angle=45, size=90, filled=True, opacity=1)
            .encode(
                x=x,
                y=y,
                color=looks["color"],
                tooltip=["policy:N", "n:Q", alt.Tooltip("diverged:Q", title="streams diverged")],
            )
        )
        remarks.append("×: a stream's state diverged")
    exact = sorted({look[p["policy"]].name for p in points if p["kl"] == 0 and p["n"] == grid[-1]})
    if exact:
        remarks.append(f"{', '.join(exact)}: exactly 0")
    lines = [subtitle, "; ".join(r for r in remarks if r)]
    return finish(alt, alt.layer(*layers), title=title, subtitle=[x for x in lines if x])


def tail_figure(summary: pa.Table, *, title: str, subtitle: str, floor: str | None) -> Any:
    """Draw quantiles of per-token KL at the last N, one row a policy.

    Args:
        summary: as for `kl_figure`.
        title: what was measured.
        subtitle: on what.
        floor: as for `kl_figure`.

    Returns:
        An altair chart.
    """
    import altair as alt

    points = summary.to_pylist()
    look = styles(list(dict.fromkeys(p["policy"] for p in points)), floor)
    last = max(p["n"] for p in points)
    marks = ["circle", "triangle-down", "square", "diamond", "cross"]
    drawn = [
        {"policy": look[p["policy"]].name, "quantile": name, "kl": p[column]}
        for p in points
        if p["n"] == last
        for name, column in QUANTILES.items()
        if p[column] > 0 and math.isfinite(p[column])
    ]
    order = [s.name for s in _ordered(points, look)]
    low, high = _decades([d["kl"] for d in drawn])
    decades = [10.0**e for e in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    base = alt.Chart(_data(alt, drawn)).encode(
        y=alt.Y("policy:N", sort=order, title=None, axis=alt.Axis(labelLimit=260, grid=True)),
        x=alt.X(
            "kl:Q",
            title=f"KL of a token at N = {short_length(last)} (nats)",
            scale=alt.Scale(type="log", domain=[low, high], nice=False),
            axis=alt.Axis(values=decades, format="~e"),
        ),
    )
    spread = base.mark_line(color="#999999").encode(detail="policy:N")
    dots = base.mark_point(size=60, filled=True, opacity=1).encode(
        color=alt.Color(
            "quantile:N",
            title="of tokens below",
            sort=list(QUANTILES),
            scale=alt.Scale(domain=list(QUANTILES), range=list(PALETTE_TAIL)),
        ),
        shape=alt.Shape(
            "quantile:N",
            title="of tokens below",
            sort=list(QUANTILES),
            scale=alt.Scale(domain=list(QUANTILES), range=marks),
        ),
        tooltip=["policy:N", "quantile:N", alt.Tooltip("kl:Q", format=".3e")],
    )
    height = max(120, 26 * len(order))
    return finish(alt, spread + dots, title=title, subtitle=subtitle, height=height)


PALETTE_TAIL = ("#000000", "#0072B2", "#009E73", "#E69F00", "#D55E00")


def _identity(point: dict[str, Any], look: dict[str, Style]) -> dict[str, Any]:
    return {"policy": look[point["policy"]].name, "policy_long": point["policy"]}


def _point(point: dict[str, Any], look: dict[str, Style]) -> dict[str, Any]:
    return {
        **_identity(point, look),
        "n": point["n"],
        "kl": point["kl"],
        "low": _or(point["kl_low"], point["kl"]),
        "high": _or(point["kl_high"], point["kl"]),
        "p99": point["kl_p99"],
        "top1": point["top1_agreement"],
    }


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None or math.isnan(value) else value


def _ordered(points: list[dict[str, Any]], look: dict[str, Style]) -> list[Style]:
    """Styles by the height at which their lines end, diverged ones first: the legend's order."""
    last = {p["policy"]: p for p in points}

    def height(policy: str) -> float:
        point = last[policy]
        return math.inf if point["diverged"] else float(point["kl"])

    return [look[policy] for policy in sorted(look, key=height, reverse=True)]


def _decades(values: list[float]) -> tuple[float, float]:
    """Smallest run of whole decades that holds the values."""
    if not values:
        return 1e-6, 1.0
    low = 10.0 ** math.floor(math.log10(min(values)))
    high = 10.0 ** math.ceil(math.log10(max(values)))
    return low, high if high > low else 10 * low


def _ticks(grid: list[int]) -> list[int]:
    """Powers of four from the first N on, and the last N unless it would touch its neighbour."""
    ticks = [n for i, n in enumerate(grid) if i % 2 == 0]
    return ticks if grid[-1] in ticks or grid[-1] < 1.5 * ticks[-1] else [*ticks, grid[-1]]


def _labels(grid: list[int]) -> str:
    names = {str(n): short_length(n) for n in grid}
    return f"({names})[datum.value]"


def _data(alt: Any, rows: list[dict[str, Any]]) -> Any:
    return alt.Data(values=rows)


def _encodings(alt: Any, ordered: list[Style]) -> dict[str, Any]:
    """Colour, dash and mark of a policy, which share one legend."""
    names = [s.name for s in ordered]
    legend = alt.Legend(
        title="policy (by last value)",
        labelLimit=300,
        symbolSize=90,
        symbolStrokeWidth=2,
        symbolOpacity=1,
    )

    def scale(values: list[Any]) -> Any:
        return alt.Scale(domain=names, range=values)

    return {
        "color": alt.Color(
            "policy:N", sort=names, legend=legend, scale=scale([s.colour for s in ordered])
        ),
        "strokeDash": alt.StrokeDash(
            "policy:N", sort=names, legend=legend, scale=scale([s.dash for s in ordered])
        ),
        "shape": alt.Shape(
            "policy:N", sort=names, legend=legend, scale=scale([s.mark for s in ordered])
        ),
    }


def finish(
    alt: Any, chart: Any, *, title: str, subtitle: str | list[str], height: int = HEIGHT
) -> Any:
    """Give a chart its size, titles and the look that all figures share."""
    return (
        chart.properties(
            width=WIDTH,
            height=height,
            title=alt.Title(text=title, subtitle=subtitle, anchor="start", offset=12),
        )
        .configure(font=FONT, background="white", padding=14)
        .configure_axis(
            labelFontSize=12,
            titleFontSize=13,
            titleFontWeight="normal",
            gridColor="#e4e4e4",
            titlePadding=10,
        )
        .configure_legend(labelFontSize=12, titleFontSize=12, titleFontWeight="normal")
        .configure_title(fontSize=15, subtitleFontSize=12, subtitleColor="#555555")
        .configure_view(stroke="#999999")
    )
