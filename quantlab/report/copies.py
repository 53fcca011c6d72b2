"""The table of compared recurrence copies."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from quantlab.formats import parse_format
from quantlab.report.table import Table, number


def copies_table(rows: pa.Table) -> Table:
    """Lay out rows of `analysis.copies.COPIES_SCHEMA`; equal formats of read copies together."""
    found: list[dict[str, Any]] = rows.to_pylist()
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
                "never" if r["first_difference"] < 0 else f"{r['first_difference']:,}",
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
