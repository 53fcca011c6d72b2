"""A report on several runs: claims of papers first, then every run.

Nothing in it is written by hand but the introduction: figures come from the runs' rows, through
their tables, commands from what the runs recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.csv

from quantlab.errors import UsageError
from quantlab.report.ablation_table import folding_table
from quantlab.report.claims import CLAIMS, TITLES, Evidence, claims_table
from quantlab.report.document import Document, Section, to_html, to_markdown
from quantlab.report.load import load_shown
from quantlab.report.shown import Shown, csv_bytes

# Kinds that claims are judged on, each a field of `Evidence`.
_JUDGED = ("kl", "rounding", "window", "correction", "propagation", "copies")


def write_digest(
    paths: Sequence[Path], out: Path, *, introduction: str, folding: Path | None = None
) -> Path:
    """Write README.md, index.html, tables as CSV and figures as SVG of some runs.

    Args:
        paths: run directories of `quantlab kl`, `ablate`, `attribute`, `propagate` and `predict`;
            of several runs of a kind on a model, claims take a policy's figures from the first
            that has it.
        out: directory; what is written there before is replaced file by file.
        introduction: Markdown, from the title on.
        folding: CSV of `quantlab ablate folding`.

    Returns:
        README.md.

    Raises:
        UsageError: a directory holds no such run, or two hold the same one.
    """
    runs = _named([load_shown(path) for path in paths])
    out.mkdir(parents=True, exist_ok=True)
    table = None if folding is None else pyarrow.csv.read_csv(folding)
    points: list[dict[str, Any]] = [] if table is None else table.to_pylist()
    evidence = _evidence(list(runs.values()))
    sections = [
        Section(title=TITLES[paper], tables=[claims_table(paper, evidence, points)], numeric=False)
        for paper in CLAIMS
    ]
    for name, run in runs.items():
        section = run.section(f"{name}-")
        sections.append(section)
        for (file, _), data in zip(section.files, run.data.values(), strict=True):
            (out / file).write_bytes(csv_bytes(data))
        for figure in section.figures:
            (out / figure.name).write_text(figure.svg, encoding="utf-8")
    if table is not None:
        (out / "folding.csv").write_bytes(csv_bytes(table))
        sections.append(
            Section(
                title="Synthetic: where folded corrections hurt",
                command="quantlab ablate folding",
                tables=[folding_table(table)],
                files=[("folding.csv", "every point")],
            )
        )
    document = Document(introduction=introduction, sections=sections)
    page = out / "README.md"
    page.write_text(to_markdown(document), encoding="utf-8")
    (out / "index.html").write_text(to_html(document), encoding="utf-8")
    return page


def _named(found: Sequence[Shown]) -> dict[str, Shown]:
    """Name runs by kind and model, counted where there are several."""
    runs: dict[str, Shown] = {}
    for run in found:
        same = [r for r in runs.values() if (r.kind, r.spec) == (run.kind, run.spec)]
        if same:
            raise UsageError(f"{run.path} is the same {run.kind} run as {same[0].path}")
        name = f"{run.kind}-{Path(run.spec.model).name}"
        count = sum(key == name or key.startswith(f"{name}-") for key in runs)
        runs[f"{name}-{count + 1}" if count else name] = run
    return runs


def _evidence(runs: Sequence[Shown]) -> list[Evidence]:
    found = []
    for model in dict.fromkeys(run.spec.model for run in runs):
        rows: dict[str, list[dict[str, Any]]] = {}
        order: dict[str, float] = {}
        mine = [run for run in runs if run.spec.model == model]
        for run in mine:
            dtype = run.record["model"]["dtype"]
            if run.kind in _JUDGED:
                added = [{**row, "dtype": dtype} for row in run.summary.to_pylist()]
                rows.setdefault(run.kind, []).extend(added)
            order = {**(run.order or {}), **order}
        op = mine[0].record["model"]["op"]
        found.append(Evidence(model=model, op=op, order=order or None, **rows))
    return found
