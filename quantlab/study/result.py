"""A finished or unfinished run, read back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from quantlab.errors import UsageError
from quantlab.metrics.positions import lengths
from quantlab.metrics.summary import summarise
from quantlab.study.rows import merge
from quantlab.study.spec import KlSpec
from quantlab.study.store import RunDirectory, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run.

    Attributes:
        path: its directory.
        spec: what was asked for.
        record: spec.json: the spec, and what model, data and plan it resolved to.
        run: run.json: when and under what it ran, and how it ended.
        rows: one row a policy, stream and measured position (`quantlab.study.rows.SCHEMA`).
        summary: KL at N and its companions (`quantlab.metrics.summary.SUMMARY_SCHEMA`).
    """

    path: Path
    spec: KlSpec
    record: dict[str, Any]
    run: dict[str, Any]
    rows: pa.Table
    summary: pa.Table

    @property
    def finished(self) -> bool:
        """Whether every cell of the study has been measured."""
        return self.run.get("state") == "finished"

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Cells (batches of streams) that failed, with their errors."""
        return list(self.run.get("failed", []))

    def __str__(self) -> str:
        from quantlab.report.table import plain_table

        return plain_table(self.summary)


def load_result(path: Path | str) -> Result:
    """Read a run directory; of an unfinished run, what has been measured so far.

    Raises:
        UsageError: if it holds no run.
        RunError: if a file in it is damaged.
    """
    directory = RunDirectory(Path(path))
    if not directory.exists:
        raise UsageError(f"{path} holds no run (no spec.json)")
    record = directory.read_json(directory.spec_file)
    spec = KlSpec.from_json(record.get("spec", {}))
    if directory.rows_file.exists():
        rows = read_table(directory.rows_file)
    else:
        rows = merge(directory.read_parts(), spec)
    floor = None if spec.floor is None else str(spec.floor)
    return Result(
        path=directory.path,
        spec=spec,
        record=record,
        run=directory.read_json(directory.run_file),
        rows=rows,
        summary=summarise(rows, lengths(spec.tokens), floor=floor),
    )
