"""Tables of ablations, from their comparison tables alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa

from quantlab.analysis.growth import fit_growth
from quantlab.report.table import Table, number, short_length

Row = dict[str, Any]
# Columns of N: every other doubling, and the last.
STRIDE = 4
# Below this N a growth law would be fitted to the post-prefill store alone.
GROWTH_FROM = 64


def ablation_tables(kind: str, table: pa.Table) -> list[Table]:
    """Lay out the comparison of an ablation.

    Args:
        kind: "rounding", "window" or "correction".
        table: of `quantlab.analysis` (`ROUNDING_SCHEMA`, …).

    Returns:
        One or more tables; without rows, one that says so.
    """
    rows: list[Row] = table.to_pylist()
    if not rows:
        return [Table(header=("policy",), rows=(), note="nothing to compare has been measured yet")]
    return _LAYOUTS[kind](rows)


def _rounding(rows: list[Row]) -> list[Table]:
    streams, seeds = rows[0]["streams"], rows[0]["seeds"]
    over = f"mean over {streams} stream{'s' * (streams != 1)} and {seeds} seed{'s' * (seeds != 1)}"
    ratios = _by_length(
        rows,
        "format",
        lambda r: _ratio_cell(r),
        f"RTN KL ÷ SR KL of a shared copy at N, {over}; above 1 RTN is worse. div.: a stream's RTN "
        "state stopped being finite; SR div.: a seed's did",
    )
    shares = _by_length(
        rows,
        "format",
        lambda r: _percent(r["bias"] / r["sr"]),
        "share of SR's KL that is bias: what the mean over ever more seeds would keep (estimated "
        f"from {seeds} seeds, to leading order; the rest is spread between seeds)",
    )
    last = [r for r in rows if r["n"] == max(x["n"] for x in rows)]
    detail = Table(
        header=("format", "RTN", "SR", "SR by seed", "bias", "bias 95 %", "spread", "spread 95 %"),
        rows=tuple(
            (
                r["format"],
                "div." if r["rtn_diverged"] else number(r["rtn"]),
                "div." if r["sr_diverged"] else number(r["sr"]),
                f"{number(r['sr_seed_min'])} … {number(r['sr_seed_max'])}",
                number(r["bias"]),
                _interval(r, "bias"),
                number(r["spread"]),
                _interval(r, "spread"),
            )
            for r in last
        ),
        note=f"KL in nats at N = {short_length(last[0]['n'])}; intervals over streams",
    )
    growth = [
        (name, *_growth(points, "rtn"), *_growth(points, "sr"))
        for name, points in _grouped(rows, "format")
    ]
    laws = Table(
        header=("format", "RTN", "95 %", "law", "SR", "95 %", "law"),
        rows=tuple(growth),
        note=f"exponent of KL in N, least squares on logarithms over N ≥ {GROWTH_FROM}",
    )
    return [ratios, detail, laws] if seeds < 2 else [ratios, shares, detail, laws]


def _window(rows: list[Row]) -> list[Table]:
    for row in rows:
        row["name"] = f"{row['policy']} L={row['window']}"
    kl = _by_length(
        rows,
        "name",
        lambda r: "div." if r["diverged"] else number(r["kl"]),
        "KL from FP32-state decoding at N in nats, by window L",
    )
    changed = [r for r in rows if r["window"] != r["base_window"]]
    fall = _by_length(
        changed,
        "name",
        lambda r: "div." if r["diverged"] else number(r["fall"]),
        "KL at the shortest window ÷ KL here; 95 % and predicted at the last N. Predicted for one "
        "copy: the number of stores saved, if errors are independent and KL is quadratic in them",
        extra={
            "95 %": lambda r: _interval(r, "fall"),
            "predicted": lambda r: bounds(r["predicted_low"], r["predicted_high"]),
            "writes": lambda r: f"{r['writes']:,}",
        },
    )
    return [kl, fall]


def _correction(rows: list[Row]) -> list[Table]:
    ratio = _by_length(
        rows,
        "policy",
        lambda r: (
            "identical" if r["identical"] else "div." if r["fold_diverged"] else number(r["ratio"])
        ),
        "KL with cached corrections folded ÷ KL with corrections derived again; the last columns "
        "are at the last N",
        extra={
            "95 %": lambda r: "–" if r["identical"] else _interval(r, "ratio"),
            "rederive": lambda r: "div." if r["rederive_diverged"] else number(r["rederive"]),
            "fold": lambda r: "div." if r["fold_diverged"] else number(r["fold"]),
        },
    )
    return [ratio]


def folding_table(points: pa.Table) -> Table:
    """Lay out the points of a folding sweep: one line a decay and rank, one column a β."""
    rows: list[Row] = points.to_pylist()
    betas = sorted({r["beta"] for r in rows})
    cells = {
        (r["decay"], r["rank"], r["beta"]): f"{number(r['error'])} {r['outcome']}" for r in rows
    }
    lines = dict.fromkeys((r["decay"], r["rank"]) for r in rows)
    return Table(
        header=("decay", "key rank", *(f"β = {beta:g}" for beta in betas)),
        rows=tuple(
            (f"{decay:g}", str(rank), *(cells[decay, rank, beta] for beta in betas))
            for decay, rank in lines
        ),
        note="RMS error of the recurrence copy over the state's RMS, in the last quarter of the "
        "windows, corrections folded; derived again it is "
        f"{number(max(r['rederived'] for r in rows))}",
    )


_LAYOUTS: dict[str, Callable[[list[Row]], list[Table]]] = {
    "rounding": _rounding,
    "window": _window,
    "correction": _correction,
}


def _by_length(
    rows: list[Row],
    name: str,
    cell: Callable[[Row], str],
    note: str,
    extra: dict[str, Callable[[Row], str]] | None = None,
) -> Table:
    """One line a name, one column an N, and columns of the last N."""
    shown = _shown(sorted({r["n"] for r in rows}))
    extra = extra or {}
    lines = []
    for label, points in _grouped(rows, name):
        by_n = {p["n"]: p for p in points}
        lines.append(
            (
                label,
                *(cell(by_n[n]) if n in by_n else "–" for n in shown),
                *(show(points[-1]) for show in extra.values()),
            )
        )
    header = ("policy" if name == "name" else name, *map(short_length, shown), *extra)
    return Table(header=header, rows=tuple(lines), note=note)


def _shown(grid: Sequence[int]) -> list[int]:
    shown, n = [], grid[0]
    while n <= grid[-1]:
        shown += [n] * (n in grid)
        n *= STRIDE
    return shown if grid[-1] in shown else [*shown, grid[-1]]


def _grouped(rows: Iterable[Row], name: str) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: r["n"]):
        groups.setdefault(row[name], []).append(row)
    order = list(dict.fromkeys(r[name] for r in rows))
    return [(label, groups[label]) for label in order]


def _ratio_cell(row: Row) -> str:
    if row["sr_diverged"]:
        return "SR div."
    return "div." if row["rtn_diverged"] else number(row["ratio"])


def _growth(points: list[Row], column: str) -> tuple[str, str, str]:
    used = [(p["n"], p[column]) for p in points if p["n"] >= GROWTH_FROM]
    try:
        fit = fit_growth([n for n, _ in used], [v for _, v in used])
    except ValueError:
        return "–", "–", "–"
    return f"{fit.exponent:.2f}", f"{fit.low:.2f} … {fit.high:.2f}", fit.law


def _interval(row: Row, name: str) -> str:
    return bounds(row[f"{name}_low"], row[f"{name}_high"])


def bounds(low: float, high: float) -> str:
    """Lay out an interval; `–` where there is none."""
    if math.isnan(low) or math.isnan(high):
        return "–"
    return number(low) if low == high else f"{number(low)} … {number(high)}"


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.0f}%"
