"""A run of any study with its tables and figures, ready to be shown in a report."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.csv

from quantlab.report.ablation import TITLES
from quantlab.report.document import Document, Figure, Section, to_html, to_markdown
from quantlab.report.table import Table

if TYPE_CHECKING:
    from quantlab.study.spec import KlSpec

Kind = Literal[
    "kl", "rounding", "window", "correction", "propagation", "attribution", "copies", "prediction"
]
NAMES: dict[Kind, str] = {
    "kl": "KL from FP32-state decoding",
    "propagation": "drift of stored states",
    "attribution": "which heads matter",
    "copies": "does what is read change what is stored",
    "prediction": "KL predicted from calibration alone",
    "rounding": TITLES["rounding"],
    "window": TITLES["window"],
    "correction": TITLES["correction"],
}


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
        streams: how many were measured, where those in `record` are others.
        remark: on how it was made, beside streams, device and time.
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
    streams: int | None = None
    remark: str = ""

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

    def _ended(self) -> str:
        """State of the run; one that was killed before it could tell has none."""
        from quantlab.study.store import RunDirectory

        directory = RunDirectory(self.path)
        untold = "finished" if directory.rows_file.exists() else "its end is not recorded"
        return str(directory.read_json(directory.run_file).get("state", untold))

    def _facts(self, sessions: list[dict[str, Any]]) -> str:
        made = self.record["made_with"]
        git = made.get("git")
        revision = "an installed package" if git is None else git["commit"][:7]
        dirty = " with changes" if git and git["dirty"] else ""
        seconds = sum(session.get("seconds", 0) for session in sessions)
        count = self.streams or len(self.record["data"]["streams"])
        remark = f", {self.remark}" if self.remark else ""
        dtype = self.record["model"].get("dtype", "in memory")
        ended = self._ended()
        left = "" if ended == "finished" else f" Not finished ({ended})."
        return (
            f"{count} stream{'s' * (count != 1)} of {Path(self.spec.data).name}, prompt "
            f"{self.spec.prompt}, {dtype}{remark}; {seconds:,.0f} s on "
            f"{made['device']} at {revision}{dirty}.{left}"
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
    """Give the command that a run was first started with, without what decides no row.

    A run that it names is given by its directory's name.
    """
    first = list(sessions[0].get("command", [])) if sessions else []
    if not first:
        return "from Python; see spec.json"
    kept: list[str] = []
    while first:
        word = first.pop(0)
        if word in ("--out", "-o"):
            first = first[1:]
        elif word == "--against":
            kept += [word, *(Path(run).name for run in first[:1])]
            first = first[1:]
        elif word.startswith("--against="):
            kept.append(f"--against={Path(word).name}")
        elif word not in _NOT_SHOWN and not word.startswith("--out="):
            kept.append(word)
    return shlex.join(kept)
