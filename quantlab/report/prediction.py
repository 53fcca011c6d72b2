"""Tables and figure of a prediction held against a measurement."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantlab.report.ablation_figure import log_ticks
from quantlab.report.figure import finish
from quantlab.report.page import write_figures
from quantlab.report.style import named_colours
from quantlab.report.table import Table, number, short_length, short_policy

if TYPE_CHECKING:
    from quantlab.study.predict import Prediction

Row = dict[str, Any]
# A size within it is called right, see `within_2` of `analysis.comparison.AGREEMENT_SCHEMA`.
FACTOR = 2


def prediction_tables(result: Prediction) -> list[Table]:
    """Lay out sizes at the last N that is measured, and agreement at every N."""
    rows: list[Row] = result.compared.to_pylist()
    last = max((r["n"] for r in rows), default=0)
    decoded = _decoded(result)
    sizes = Table(
        header=("policy", "predicted", "measured", "ratio", "low", "high", "fresh", "decoded"),
        rows=tuple(
            (
                short_policy(r["policy"]),
                *(number(r[name]) for name in ("predicted", "measured")),
                *(number(r[name]) for name in ("ratio", "ratio_low", "ratio_high")),
                number(r["fresh"] / r["predicted"]),
                number(decoded[r["policy"]]),
            )
            for r in rows
            if r["n"] == last
        ),
        note=f"KL at {short_length(last)}, nats. ratio: predicted over measured, with its 95 % "
        "interval over resampled streams of the measurement. fresh: share predicted of the read "
        "copy's own cast. decoded: expected over decoded squared output error on the calibration "
        "text's own op inputs, weighted by their cost: what the ratio owes to the propagation of "
        "error, the rest is owed to its cost in nats and to the text",
    )
    agreement = Table(
        header=(
            "N", "policies", "Kendall", "low", "high", "of writes", "Spearman", "ratio", "least",
            "most", "within 2",
        ),
        rows=tuple(
            (
                short_length(r["n"]),
                str(r["policies"]),
                *(number(r[f"kendall{end}"]) for end in ("", "_low", "_high")),
                number(r["kendall_of_writes"]),
                number(r["spearman"]),
                *(number(r[f"ratio_{x}"]) for x in ("median", "least", "most")),
                f"{100 * r['within_2']:.0f}%",
            )
            for r in result.agreement.to_pylist()
        ),
        note="order of the policies whose KL is ten times the noise floor: Kendall's τ with its "
        "interval over resampled streams, that of an order by the error of a single write, and "
        "Spearman's ρ; predicted over measured: median, least, most, and share within a factor "
        "of two",
    )  # fmt: skip
    return [sizes, agreement]


def _decoded(result: Prediction) -> dict[str, float]:
    """Divide expected by decoded output error on the calibration text, heads weighted by cost."""
    sums: dict[str, list[float]] = {}
    for r in result.heads.to_pylist():
        total = sums.setdefault(r["policy"], [0.0, 0.0])
        total[0] += r["kept_kappa"] * r["predicted_error"]
        total[1] += r["kept_kappa"] * r["decoded_error"]
    return {name: a / b if b > 0 else math.nan for name, (a, b) in sums.items()}


def write_prediction(result: Prediction) -> list[Path]:
    """Write the figure as PNG and SVG into the run's directory.

    Returns:
        The files; none if nothing that is predicted was measured above the noise floor.

    Raises:
        RunError: if the disk is full.
    """
    chart = prediction_figure(result)
    return [] if chart is None else write_figures(result.path, {"prediction": chart})


def prediction_figure(result: Prediction) -> Any:
    """Draw predicted against measured KL, a line a policy through its N, log-log.

    Bars are the interval of what was measured, at the last N; the band is a factor of two.

    Returns:
        An altair chart; None if there is nothing to draw.
    """
    import altair as alt

    spec = result.spec
    points = [_point(r) for r in result.compared.to_pylist() if r["counts"] and r["predicted"] > 0]
    if not points:
        return None
    last = max(p["n"] for p in points)
    final = [p for p in points if p["n"] == last]
    ticks = log_ticks(
        [p[name] for p in points for name in ("measured", "predicted")]
        + [p[end] for p in final for end in ("low", "high")]
    )
    scale = alt.Scale(type="log", domain=[ticks[0], ticks[-1]], nice=False)
    axis = alt.Axis(values=ticks, format="~e")
    x_title, y_title = "measured KL at N (nats)", "predicted KL at N (nats)"
    x = alt.X("measured:Q", title=x_title, scale=scale, axis=axis)
    y = alt.Y("predicted:Q", title=y_title, scale=scale, axis=axis)
    names = list(dict.fromkeys(p["policy"] for p in points))
    colour = named_colours(alt, "policy", names, "policy")
    tooltip = [
        alt.Tooltip("policy:N"),
        alt.Tooltip("length:N", title="N"),
        *(alt.Tooltip(f"{name}:Q", format=".3g") for name in ("measured", "predicted")),
    ]

    def layer(rows: list[Row]) -> Any:
        return alt.Chart(alt.Data(values=rows))

    # ends beyond the axes, so that the band's edges run to the frame
    beyond = (ticks[0] / FACTOR, ticks[-1] * FACTOR)
    ends = [{"measured": t, "predicted": t, "low": t / FACTOR, "high": t * FACTOR} for t in beyond]
    band = layer(ends).mark_area(color="#bbbbbb", opacity=0.35, clip=True)
    equal = layer(ends).mark_line(color="#888888", strokeDash=[4, 3], clip=True)
    lines = layer(points).mark_line(strokeWidth=1.2, opacity=0.6)
    dots = layer(points).mark_point(filled=True, size=14, opacity=0.6)
    bars = layer(final).mark_rule(strokeWidth=1.6)
    marks = layer(final).mark_point(filled=True, size=60, opacity=1)
    low = alt.X("low:Q", title=x_title, scale=scale, axis=axis)
    chart = alt.layer(
        band.encode(x=x, y=alt.Y("low:Q", title=y_title, scale=scale, axis=axis), y2="high:Q"),
        equal.encode(x=x, y=y),
        lines.encode(x=x, y=y, color=colour, order="n:Q"),
        dots.encode(x=x, y=y, color=colour, tooltip=tooltip),
        bars.encode(x=low, x2="high:Q", y=y, color=colour),
        marks.encode(x=x, y=y, color=colour, tooltip=tooltip),
    )
    streams = result.compared["streams"][0].as_py()
    interval = ", bars: 95 % over streams" if any(p["low"] < p["high"] for p in final) else ""
    return finish(
        alt,
        chart,
        title=f"{spec.model}: KL predicted from calibration alone",
        subtitle=[
            f"{streams} stream{'s' * (streams != 1)} of {Path(spec.data).name}, a line a policy "
            f"from N = {short_length(min(p['n'] for p in points))} to {short_length(last)}",
            f"large dots: N = {short_length(last)}{interval}; dashed: as measured, grey: within a "
            f"factor of {FACTOR}",
        ],
    )


def _point(row: Row) -> Row:
    """Take what is drawn from a row of `COMPARED_SCHEMA`: the interval is of what was measured."""
    low, high = (row["predicted"] / row[f"ratio_{end}"] for end in ("high", "low"))
    known = math.isfinite(low) and math.isfinite(high) and low > 0
    return {
        "policy": short_policy(row["policy"]),
        "n": row["n"],
        "length": short_length(row["n"]),
        "measured": row["measured"],
        "predicted": row["predicted"],
        "low": low if known else row["measured"],
        "high": high if known else row["measured"],
    }
