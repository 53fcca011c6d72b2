"""Tables and figure of a prediction held against a measurement."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantlab.report.ablation_figure import log_ticks
from quantlab.report.figure import finish
from quantlab.report.page import render
from quantlab.report.style import PALETTE
from quantlab.report.table import Table, number, short_length, short_policy

if TYPE_CHECKING:
    from quantlab.study.predict import Prediction

Row = dict[str, Any]


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

    Raises:
        RunError: if the disk is full.
    """
    from quantlab.study.store import RunDirectory

    if not result.compared.num_rows:
        return []
    directory, written = RunDirectory(result.path), []
    png, svg = render(prediction_figure(result))
    for suffix, data in ((".png", png), (".svg", svg.encode("utf-8"))):
        path = result.path / f"prediction{suffix}"
        directory.write(path, data)
        written.append(path)
    return written


def prediction_figure(result: Prediction) -> Any:
    """Draw predicted against measured KL, a line a policy through its N, log-log."""
    import altair as alt

    rows = [r for r in result.compared.to_pylist() if r["counts"] and r["predicted"] > 0]
    points = [
        {
            "policy": short_policy(r["policy"]),
            "n": r["n"],
            "length": short_length(r["n"]),
            "measured": r["measured"],
            "predicted": r["predicted"],
        }
        for r in rows
    ]
    names = list(dict.fromkeys(p["policy"] for p in points))
    ticks = log_ticks([p[name] for p in points for name in ("measured", "predicted")])
    scale = alt.Scale(type="log", domain=[ticks[0], ticks[-1]], nice=False)
    axis = alt.Axis(values=ticks, format="~g")
    x = alt.X("measured:Q", title="measured KL at N (nats)", scale=scale, axis=axis)
    y = alt.Y("predicted:Q", title="predicted KL at N (nats)", scale=scale, axis=axis)
    colour = alt.Color(
        "policy:N",
        title="policy",
        sort=names,
        scale=alt.Scale(domain=names, range=[PALETTE[i % len(PALETTE)] for i in range(len(names))]),
        legend=alt.Legend(labelLimit=300, symbolOpacity=1),
    )
    base = alt.Chart(alt.Data(values=points)).encode(x=x, y=y, color=colour)
    lines = base.mark_line(strokeWidth=1.2, opacity=0.6).encode(order="n:Q")
    dots = base.mark_point(filled=True, size=42, opacity=0.9).encode(
        tooltip=["policy:N", "length:N", "measured:Q", "predicted:Q"]
    )
    ends = [{"measured": t, "predicted": t} for t in (ticks[0], ticks[-1])]
    diagonal = (
        alt.Chart(alt.Data(values=ends)).mark_line(color="#888888", strokeDash=[4, 3])
    ).encode(x=x, y=y)
    spec = result.spec
    streams = result.compared["streams"][0].as_py()
    chart = alt.layer(diagonal, lines, dots)
    return finish(
        alt,
        chart,
        title=f"{spec.model}: KL predicted from calibration alone",
        subtitle=f"{streams} stream{'s' * (streams != 1)} of {Path(spec.data).name}, N = "
        f"{points[0]['length']} … {short_length(spec.tokens)}; dashed: as measured",
    )
