"""A run of any study, read back with its tables and figures, ready to be shown in a report."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.csv

from quantlab.errors import UsageError
from quantlab.report.ablation import TITLES, write_ablation
from quantlab.report.ablation_table import ablation_tables
from quantlab.report.attribution import attribution_report, write_attribution
from quantlab.report.document import Document, Figure, Section, to_html, to_markdown
from quantlab.report.page import write_report
from quantlab.report.propagation import propagation_tables, write_propagation
from quantlab.report.table import Table, make_table

if TYPE_CHECKING:
    from quantlab.study.spec import KlSpec

Kind = Literal["kl", "rounding", "window", "correction", "propagation", "attribution", "copies"]
NAMES: dict[Kind, str] = {
    "kl": "KL from FP32-state decoding",
    "propagation": "drift of stored states",
    "attribution": "which heads matter",
    "copies": "does what is read change what is stored",
    "rounding": TITLES["rounding"],
    "window": TITLES["window"],
    "correction": TITLES["correction"],
}


_COMMANDS = {"propagation": "propagate", "copies": "ablate copies"}
# Options of a command that say where results go and what is printed.
_NOT_SHOWN = ("-q", "--quiet", "--resume", "--no-figures", "--figures", "--json", "--markdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A run, whatever it is.

    Attributes:
        kind: what was studied.
        what: the same in words.
        path: its directory.
        spec: what was asked for.
        record: spec.json.
        data: CSV by name: the comparison table first.
        summary: that first table.
        tables: laid out.
        figures: SVG files, drawn.
        order: policy → mean Spearman of its units' error between streams (of watched runs).
    """

    kind: Kind
    what: str
    path: Path
    spec: KlSpec
    record: dict[str, Any]
    data: dict[str, pa.Table]
    tables: Sequence[Table]
    figures: Sequence[Path]
    order: dict[str, float] | None = None

    @property
    def summary(self) -> pa.Table:
        """The comparison table."""
        return next(iter(self.data.values()))

    def sessions(self) -> list[dict[str, Any]]:
        """Stretches of computing, as recorded."""
        from quantlab.study.store import RunDirectory

        directory = RunDirectory(self.path)
        return list(directory.read_json(directory.run_file).get("sessions", []))

    def section(self, prefix: str = "") -> Section:
        """Show the run.

        Args:
            prefix: of the names of its files beside the report.
        """
        sessions = self.sessions()
        return Section(
            title=f"{self.spec.model}: {self.what}",
            command=command(sessions),
            facts=self._facts(sessions),
            tables=self.tables,
            figures=[
                Figure(
                    name=f"{prefix}{path.name}",
                    text=f"{self.spec.model}, {self.what}: {path.stem}",
                    svg=path.read_text("utf-8"),
                )
                for path in self.figures
            ],
            files=[(self._csv(name, prefix), "every figure") for name in self.data],
        )

    def _csv(self, name: str, prefix: str) -> str:
        if prefix and name == next(iter(self.data)):
            return f"{prefix.removesuffix('-')}.csv"
        return f"{prefix}{name}.csv"

    def _facts(self, sessions: list[dict[str, Any]]) -> str:
        made = self.record["made_with"]
        git = made.get("git")
        revision = "an installed package" if git is None else git["commit"][:7]
        dirty = " with changes" if git and git["dirty"] else ""
        seconds = sum(session.get("seconds", 0) for session in sessions)
        count = len(self.record["data"]["streams"])
        dtype = self.record["model"].get("dtype", "in memory")
        ended = sessions[-1].get("state", "finished") if sessions else "finished"
        left = "" if ended == "finished" else f" Not finished ({ended})."
        return (
            f"{count} stream{'s' * (count != 1)} of {Path(self.spec.data).name}, prompt "
            f"{self.spec.prompt}, {dtype}; {seconds:,.0f} s on "
            f"{made['device']} at {revision}{dirty}.{left}"
        )


def kind_of(path: Path) -> Kind:
    """Say what a run directory holds.

    Raises:
        UsageError: no run.
        RunError: a file in it is damaged.
    """
    from quantlab.study.store import RunDirectory

    directory = RunDirectory(path)
    ablation = directory.read_json(path / "ablation.json").get("kind")
    if (path / "attribution.json").exists():
        ablation = "attribution"
    study = directory.read_json(directory.spec_file).get("study")
    recorded = "propagation" if study == "propagate" else ablation or study
    kind = next((name for name in NAMES if name == recorded), None)
    if kind is None:
        raise UsageError(f"{path} holds no run of kl, ablate, attribute or propagate")
    if kind in ("propagation", "copies") and not directory.rows_file.exists():
        raise UsageError(f"{path} holds no finished run of quantlab {_COMMANDS[kind]}")
    return kind


def load_shown(path: Path) -> Shown:
    """Read a run directory and draw its figures.

    Raises:
        UsageError: it holds no run.
        RunError: a file in it is damaged, or the disk is full.
    """
    kind = kind_of(path)
    if kind == "kl":
        return _kl(path)
    if kind == "attribution":
        return _attribution(path)
    if kind == "copies":
        return _copies(path)
    return _propagation(path) if kind == "propagation" else _ablation(path)


def _kl(path: Path) -> Shown:
    from quantlab.study.result import load_result

    result = load_result(path)
    drawn = path / "kl.svg"
    return Shown(
        kind="kl",
        what=NAMES["kl"],
        path=path,
        spec=result.spec,
        record=result.record,
        data={"summary": result.summary},
        tables=[make_table(result.summary)],
        figures=[drawn] if drawn.exists() else _svg(write_report(result))[:1],
    )


def _ablation(path: Path) -> Shown:
    from quantlab.study.ablate import load_ablation

    ablation = load_ablation(path)
    return Shown(
        kind=ablation.kind,
        what=NAMES[ablation.kind],
        path=path,
        spec=ablation.result.spec,
        record=ablation.result.record,
        data={"ablation": ablation.table},
        tables=ablation_tables(ablation.kind, ablation.table),
        figures=_svg(write_ablation(ablation)),
    )


def _attribution(path: Path) -> Shown:
    from quantlab.study.attribute import load_attribution

    found = load_attribution(path)
    by_layer = max(found.units["head"].to_pylist(), default=0) < 0
    return Shown(
        kind="attribution",
        what="which layers matter" if by_layer else NAMES["attribution"],
        path=path,
        spec=found.result.spec,
        record=found.result.record,
        data={"attribution": found.units, "additivity": found.sums},
        tables=attribution_report(found.units, found.sums),
        figures=_svg(write_attribution(found)),
    )


def _copies(path: Path) -> Shown:
    from quantlab.report.copies import copies_table
    from quantlab.study.spec import KlSpec
    from quantlab.study.store import RunDirectory, read_table

    directory = RunDirectory(path)
    record = directory.read_json(directory.spec_file)
    rows = read_table(directory.rows_file)
    return Shown(
        kind="copies",
        what=NAMES["copies"],
        path=path,
        spec=KlSpec.from_json(record["spec"]),
        record=record,
        data={"copies": rows},
        tables=[copies_table(rows)],
        figures=[],
    )


def _propagation(path: Path) -> Shown:
    from quantlab.study.propagate import load_propagation

    watched = load_propagation(path)
    return Shown(
        kind="propagation",
        what=NAMES["propagation"],
        path=path,
        spec=watched.spec,
        record=watched.record,
        data={"propagation": watched.summary},
        tables=propagation_tables(watched.summary),
        figures=_svg(write_propagation(watched)),
        order=unit_order(watched.tables["units"]),
    )


def write_run_page(shown: Shown) -> list[Path]:
    """Write report.md, index.html and the CSV of a run into its directory.

    Returns:
        Its figures as PNG and SVG, then the two reports.
    """
    from quantlab.study.store import RunDirectory

    section = shown.section()
    document = Document(introduction=f"# {section.title}", sections=[section])
    path, directory = shown.path, RunDirectory(shown.path)
    for name, table in shown.data.items():
        directory.write(path / f"{name}.csv", csv_bytes(table))
    pages = {"report.md": to_markdown(document), "index.html": to_html(document)}
    for name, text in pages.items():
        directory.write(path / name, text.encode("utf-8"))
    drawn = [file for svg in shown.figures for file in (svg.with_suffix(".png"), svg)]
    return [*drawn, *(path / name for name in pages)]


def csv_bytes(table: pa.Table) -> bytes:
    """Write a table as CSV."""
    sink = io.BytesIO()
    pyarrow.csv.write_csv(table, sink)
    return sink.getvalue()


def command(sessions: Sequence[dict[str, Any]]) -> str:
    """Give the command that a run was first started with, without what decides no row."""
    first = list(sessions[0].get("command", [])) if sessions else []
    if not first:
        return "from Python; see spec.json"
    kept: list[str] = []
    while first:
        word = first.pop(0)
        if word in ("--out", "-o"):
            first = first[1:]
        elif word not in _NOT_SHOWN and not word.startswith("--out="):
            kept.append(word)
    return shlex.join(kept)


def unit_order(units: pa.Table) -> dict[str, float]:
    """Spearman of units' accumulated error between two streams, mean over pairs, by policy."""
    from itertools import combinations

    import numpy as np

    from quantlab.analysis.attribution import rank_correlation
    from quantlab.report.table import short_policy

    names = np.asarray(units["policy"].to_pylist(), dtype=object)
    streams, error = units["stream"].to_numpy(), units["deviation"].to_numpy()
    found = {}
    for name in dict.fromkeys(names):
        mine = names == name
        by_stream = [error[mine & (streams == s)] for s in np.unique(streams)]
        pairs = [rank_correlation(a, b) for a, b in combinations(by_stream, 2)]
        found[short_policy(name)] = float(np.mean(pairs)) if pairs else float("nan")
    return found


def _svg(files: Sequence[Path]) -> list[Path]:
    return [file for file in files if file.suffix == ".svg"]
