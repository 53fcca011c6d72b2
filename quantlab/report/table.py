"""The table of a run: KL at N for every policy, as text cells."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from quantlab.replay.policy import parse_policy

COLUMN_FACTOR = 4
# A ratio beyond this says no more than that the floor does not matter.
FAR = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells ready to be laid out.

    Attributes:
        header: column titles; the first column is the policy, the others are numbers.
        rows: one a policy, as long as the header.
        note: what the numbers are, one line.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def short_length(n: int) -> str:
    """`16`, `1K`, `128K`: binary thousands where they are whole."""
    return f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else f"{n:,}"


def short_policy(policy: str) -> str:
    """Legend name of a policy given in its long form."""
    return parse_policy(policy).short


def number(x: float | None) -> str:
    """Three significant digits: `1.23e-4`, `0.012`, `0`, `inf`, `–` for none."""
    if x is None or math.isnan(x):
        return "–"
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    if x == 0:
        return "0"
    if 0.01 <= abs(x) < 1000:
        return f"{x:.3g}"
    mantissa, exponent = f"{x:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def make_table(summary: pa.Table) -> Table:
    """Lay out a summary: KL at N = 16, 64, 256, …, and the companions at the last N."""
    points: list[dict[str, Any]] = summary.to_pylist()
    grid = sorted({p["n"] for p in points})
    if not grid:
        return Table(header=("policy",), rows=(), note="nothing has been measured yet")
    last = grid[-1]
    shown = [n for n in grid if n == last or _is_power(n, grid[0])]
    by_key = {(p["policy"], p["n"]): p for p in points}
    policies = list(dict.fromkeys(p["policy"] for p in points))
    at = f"at {short_length(last)}"
    header = (
        "policy",
        *(short_length(n) for n in shown),
        "÷ floor",
        "p99",
        "max",
        "excess NLL",
        "top-1",
    )
    rows = []
    for policy in policies:
        point = by_key[policy, last]
        rows.append(
            (
                short_policy(policy),
                *(_kl(by_key.get((policy, n))) for n in shown),
                _ratio(point),
                number(point["kl_p99"]),
                number(point["kl_max"]),
                number(point["excess_nll"]),
                _percent(point["top1_agreement"]),
            )
        )
    streams = by_key[policies[0], last]["streams"]
    plural = "s" if streams != 1 else ""
    note = (
        f"KL from FP32-state decoding in nats, mean over {streams} stream{plural} and the "
        f"min(N, 256) positions ending at N; columns from ÷ floor on are {at}"
    )
    return Table(header=header, rows=tuple(rows), note=note)


def plain_table(summary: pa.Table) -> str:
    """Text of the table of a summary: columns aligned, no colour."""
    return plain(make_table(summary))


def plain(table: Table) -> str:
    """Text of a table: columns aligned, no colour, its note beneath."""
    cells = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.header))]
    lines = []
    for row in cells:
        first = row[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join((first, *rest)).rstrip())
    lines.insert(1, "─" * len(lines[0]))
    return "\n".join([*lines, "", table.note])


def _is_power(n: int, base: int) -> bool:
    while n > base and n % COLUMN_FACTOR == 0:
        n //= COLUMN_FACTOR
    return n == base


def _kl(point: dict[str, Any] | None) -> str:
    if point is None:
        return "–"
    return "div." if point["diverged"] else number(point["kl"])


def _ratio(point: dict[str, Any]) -> str:
    floor, kl = point["floor"], point["kl"]
    if floor is None or math.isnan(floor) or math.isnan(kl) or floor <= 0:
        return "–"
    return number(kl / floor) if kl < FAR * floor else f">{number(FAR)}"


def _percent(x: float) -> str:
    return "–" if math.isnan(x) else f"{100 * x:.2f}%"


def markdown_table(summary: pa.Table) -> str:
    """Lay the table of a summary out in Markdown, for reports that are committed."""
    return markdown(make_table(summary))


def markdown(table: Table, *, numeric: bool = True) -> str:
    """Lay a table out in Markdown, its note beneath; numeric columns are set to the right."""
    lines = [
        " | ".join(table.header),
        " | ".join(["---", *["---:" if numeric else "---"] * (len(table.header) - 1)]),
    ]
    lines += [" | ".join(row) for row in table.rows]
    return "\n".join([*(f"| {line} |" for line in lines), "", table.note])
