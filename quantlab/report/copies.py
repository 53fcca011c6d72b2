"""The table and figure of compared recurrence copies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa

from quantlab.formats import parse_format
from quantlab.report.ablation_figure import log_ticks
from quantlab.report.figure import finish
from quantlab.report.page import write_figures
from quantlab.report.style import named_colours
from quantlab.report.table import Table, number

Row = dict[str, Any]
HEIGHT = 320
# Names of layers that fit side by side.
FEW = 9
WAYS = {"rederive": "derived again", "fold": "folded"}


def copies_table(rows: pa.Table) -> Table:
    """Lay out rows of `analysis.copies.COPIES_SCHEMA`; equal formats of read copies together."""
    found: list[Row] = rows.to_pylist()
    return Table(
        header=(
            "recurrence copy", "inputs", "corrections", "read", "against", "windows", "first",
            "differing", "relative",
        ),
        rows=tuple(
            (
                f"layer {r['layer']}, {parse_format(r['recur']).short}",
                r["inputs"],
                r["corrections"],
                *(parse_format(r[name]).short for name in ("read", "against")),
                f"{r['windows']:,}",
                _first(r["first_difference"]),
                f"{r['differing']:,}",
                number(r["relative"]),
            )
            for r in found
        ),
        note="inputs: recorded once and the same for all policies, or each policy's own in the "
        "model. first: the first window after which a bit of the recurrence copy differs from "
        "that of the policy that reads `against`, comparing whole copies after every window; "
        "relative: RMS difference over RMS state after the last. A comparison on recorded inputs "
        "ends once all have differed",
    )  # fmt: skip


def write_copies(rows: pa.Table, path: Path, *, title: str, subtitle: str) -> list[Path]:
    """Write the figure as PNG and SVG into a run's directory.

    Args:
        rows: of `analysis.copies.COPIES_SCHEMA`.
        path: the directory.
        title: what was compared.
        subtitle: on what.

    Raises:
        RunError: if the disk is full.
    """
    return write_figures(path, {"copies": copies_figure(rows, title=title, subtitle=subtitle)})


def copies_figure(rows: pa.Table, *, title: str, subtitle: str) -> Any:
    """Draw how far recurrence copies end from those beside the first read format, by layer.

    Args:
        rows: as for `write_copies`.
        title: likewise.
        subtitle: likewise.
    """
    import altair as alt

    found: list[Row] = rows.to_pylist()
    ticks = log_ticks([r["relative"] for r in found if _drawable(r["relative"])])
    edges = (ticks[0] / 2, ticks[-1] * 2)  # of copies that are equal and that are not finite
    points = [_point(r, edges) for r in found]
    infinite = any(p["y"] == edges[1] for p in points)

    def order(name: str) -> list[str]:
        return list(dict.fromkeys(p[name] for p in points))

    y = alt.Y(
        "y:Q",
        title="RMS difference ÷ RMS state after the last window",
        scale=alt.Scale(
            type="log",
            domain=[edges[0] / 1.3, edges[1] * 1.3 if infinite else ticks[-1]],
            nice=False,
        ),
        axis=alt.Axis(values=ticks, format="~g"),
    )
    base = alt.Chart().encode(
        x=alt.X(
            "place:N",
            sort=order("place"),
            title="inputs and recurrent layer",
            axis=alt.Axis(labelAngle=0 if len(order("place")) < FEW else -90),
        ),
        xOffset=alt.XOffset("slot:N", sort=order("slot")),
        y=y,
        color=named_colours(alt, "corrections", order("corrections"), "corrections"),
        shape=alt.Shape("read:N", title="read", sort=order("read")),
        tooltip=["place:N", "corrections:N", "read:N", "relative:N", "first:N"],
    )
    layers = []
    for filled in (True, False):
        rows_of = [p for p in points if p["differs"] == filled]
        mark = base.mark_point(size=56, filled=filled, strokeWidth=1.6, opacity=1)
        layers += [mark.properties(data=alt.Data(values=rows_of))] if rows_of else []
    remarks = ["filled: a bit differed", "hollow, at the lower edge: none ever did"]
    if infinite:
        remarks.append("at the upper edge: not finite")
    against = ", ".join(dict.fromkeys(parse_format(r["against"]).short for r in found))
    lines = [f"{subtitle}; against {against}", "; ".join(remarks)]
    return finish(alt, alt.layer(*layers), title=title, subtitle=lines, height=HEIGHT)


def _point(row: Row, edges: tuple[float, float]) -> Row:
    """Place a row: what is drawn of it, and what is said of it."""
    size, first = row["relative"], row["first_difference"]
    corrections, read = WAYS[row["corrections"]], parse_format(row["read"]).short
    return {
        "place": f"{row['inputs']} {row['layer']}",
        "slot": f"{corrections}, {read}",
        "corrections": corrections,
        "read": read,
        "relative": number(size),
        "first": _first(first),
        "differs": first >= 0,
        "y": size if _drawable(size) else edges[0] if size == 0 else edges[1],
    }


def _drawable(size: float) -> bool:
    return math.isfinite(size) and size > 0


def _first(window: int) -> str:
    return "never" if window < 0 else f"{window:,}"
