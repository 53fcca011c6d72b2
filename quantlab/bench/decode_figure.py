"""Figures of a decode benchmark: speed-up by batch, by window beside the traffic model, bandwidth.

Drawn from the result's rows alone; a row without a speed is left out.
"""

from __future__ import annotations

import re
from typing import Any

from quantlab.analysis.traffic import (
    PAPER_SHAPES,
    LayerShape,
    conventional_bytes,
    record_bytes,
    window_bytes,
)
from quantlab.bench.decode import CONVENTIONAL
from quantlab.bench.measure import Row
from quantlab.bench.result import Result
from quantlab.replay.policy import DEFAULT_WINDOW, Policy, parse_policy
from quantlab.report.figure import finish
from quantlab.report.style import PALETTE

_NAME = re.compile(r"(?P<shape>\S+) B=(?P<batch>\d+) (?P<policy>.+)")
_SHAPES = {shape.name: shape for shape in PAPER_SHAPES}


def decode_figures(result: Result) -> dict[str, Any]:
    """Draw what a result has rows for.

    Args:
        result: of `quantlab bench decode`.

    Returns:
        altair charts by file name without ending.

    Raises:
        ValueError: the result of another benchmark.
    """
    if result.bench != "decode":
        raise ValueError(f"figures are drawn of decode results, this one is of {result.bench}")
    points = [p for row in result.rows if (p := _point(row)) is not None]
    drawn = {
        "decode-batches": _batches(points),
        "decode-windows": _windows(points),
        "decode-bandwidth": _bandwidth(points),
    }
    return {name: chart for name, chart in drawn.items() if chart is not None}


def _point(row: Row) -> dict[str, Any] | None:
    """Take a kernel row apart; None for others and for rows without a speed."""
    match = _NAME.fullmatch(row.name)
    if match is None or row.status != "ok" or match["shape"] not in _SHAPES:
        return None
    if match["policy"].startswith("rival"):
        return None
    policy = parse_policy(_spelled(match["policy"]))
    return {
        "shape": match["shape"],
        "batch": int(match["batch"]),
        "policy": match["policy"].split(" L=")[0],
        "long": policy,
        **row.values,
    }


def _spelled(short: str) -> str:
    kind, _, rest = short.partition(" ")
    return f"{kind}:{rest}" if kind in ("shared", "conventional") else short


def _batches(points: list[dict[str, Any]]) -> Any:
    """Speed-up of a window over conventional FP32 steps, against the batch."""
    import altair as alt

    shown = [
        p for p in points
        if p["long"].window == DEFAULT_WINDOW and "over_conventional" in p
    ]  # fmt: skip
    # shapes of which few batches are measured would only cross the others' lines
    batches = {shape: {p["batch"] for p in shown if p["shape"] == shape} for shape in _SHAPES}
    rows = [_plain(p, "over_conventional") for p in shown if len(batches[p["shape"]]) > 3]
    swept = [r["policy"] for r in rows]
    rows = [r for r in rows if swept.count(r["policy"]) > 6]
    if not rows:
        return None
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("batch:Q", title="batch", scale=alt.Scale(type="log", base=2)),
        y=alt.Y("value:Q", title="speed-up over conventional FP32", scale=alt.Scale(zero=False)),
        color=_colour(alt, rows, "policy"),
    )
    chart = alt.layer(*_dashed(alt, base, "shape:N", title="shape"), _one(alt))
    return finish(
        alt, chart, title="Decode kernels, window of 16",
        subtitle="mean step of a window, flush included, over one conventional FP32 step",
    )  # fmt: skip


def _windows(points: list[dict[str, Any]]) -> Any:
    """Speed-up against the window, measured and as bytes alone would have it."""
    import altair as alt

    replayed = [p for p in points if p["long"].window > 1]
    found = {(p["shape"], p["batch"]) for p in replayed if p["long"].window != DEFAULT_WINDOW}
    conventional = {
        (p["shape"], p["batch"]): p["window_us"] for p in points if p["long"] == CONVENTIONAL
    }
    rows = []
    for p in replayed:
        key = (p["shape"], p["batch"])
        if key not in found or key not in conventional:
            continue
        common = {"window": p["long"].window, "policy": p["policy"]}
        measured = conventional[key] / p["window_us"]
        rows.append({**common, "value": measured, "what": "measured"})
        bound = _bound(_SHAPES[p["shape"]], p["long"])
        rows.append({**common, "value": bound, "what": "bytes at equal bandwidth"})
    lengths = {(r["policy"], r["window"]) for r in rows}
    swept = [policy for policy, _ in lengths]
    rows = [r for r in rows if swept.count(r["policy"]) > 1]
    if not rows:
        return None
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("window:Q", title="window L", scale=alt.Scale(type="log", base=2)),
        y=alt.Y("value:Q", title="speed-up over conventional FP32", scale=alt.Scale(zero=False)),
        color=_colour(alt, rows, "policy"),
    )
    chart = alt.layer(*_dashed(alt, base, "what:N", title="", sort=["measured"]), _one(alt))
    where = ", ".join(sorted(f"{shape} at batch {batch}" for shape, batch in found))
    return finish(alt, chart, title="Decode kernels against the window", subtitle=where)


def _bandwidth(points: list[dict[str, Any]]) -> Any:
    """Bytes of a step without a flush over its time, as a fraction of a read's rate."""
    import altair as alt

    largest = max((p["batch"] for p in points if p["batch"] <= 256), default=0)
    shown = [
        p for p in points
        if p["batch"] == largest and "step_of_read" in p and p["long"].window == DEFAULT_WINDOW
    ]  # fmt: skip
    if not shown:
        return None
    names = dict.fromkeys(p["policy"] for p in shown)
    rows = [
        {**_plain(p, key), "what": what}
        for p in shown
        for key, what in (("step_of_read", "all bytes"), ("states_of_read", "states alone"))
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("policy:N", title=None, sort=list(names)),
        x=alt.X("value:Q", title="fraction of the measured read bandwidth",
                scale=alt.Scale(domain=[0, 1])),
        color=_colour(alt, rows, "shape"),
        shape=alt.Shape("what:N", title=""),
    )  # fmt: skip
    return finish(
        alt, base.mark_point(filled=True, size=70, opacity=0.8), height=40 * len(names),
        title=f"Steps without a flush, batch {largest}",
        subtitle="bytes of the traffic model over the measured time",
    )  # fmt: skip


def _bound(shape: LayerShape, policy: Policy) -> float:
    """Bytes of L conventional FP32 steps over those of a window."""
    record = record_bytes(shape, rederive=shape.delta and policy.corrections == "rederive")
    other = policy.read if policy.kind == "separate" else None
    moved = window_bytes(shape, policy.recur, other, record, window=policy.window)
    plain = conventional_bytes(shape, CONVENTIONAL.recur).total
    return float(policy.window * plain / moved)


def _plain(point: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: point[name] for name in ("shape", "batch", "policy")} | {"value": point[key]}


def _colour(alt: Any, rows: list[dict[str, Any]], key: str) -> Any:
    names = list(dict.fromkeys(r[key] for r in rows))
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(names))]
    return alt.Color(f"{key}:N", title=key, scale=alt.Scale(domain=names, range=colours))


def _dashed(alt: Any, base: Any, by: str, **keys: Any) -> list[Any]:
    """Draw lines dashed by a field, and their points."""
    legend = alt.Legend(symbolType="stroke", symbolStrokeColor="#555555", symbolSize=400)
    lines = base.mark_line().encode(strokeDash=alt.StrokeDash(by, legend=legend, **keys))
    return [lines, base.mark_point(filled=True, size=36, opacity=1).encode(detail=by)]


def _one(alt: Any) -> Any:
    """Draw a line where nothing is won."""
    rule = alt.Chart(alt.Data(values=[{"one": 1.0}])).mark_rule(color="#999999")
    return rule.encode(y=alt.Y("one:Q", title="speed-up over conventional FP32"))
