"""A page in Markdown on several ablations and watched runs: claims first, then every table.

Nothing in it is written by hand but the introduction: figures come from the runs' rows, through
their tables, commands from what the runs recorded.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv

from quantlab.errors import UsageError
from quantlab.report.ablation import TITLES, write_ablation
from quantlab.report.ablation_table import ablation_tables, folding_table
from quantlab.report.claims import Evidence, claims_table
from quantlab.report.propagation import propagation_tables, write_propagation
from quantlab.report.table import Table, markdown

if TYPE_CHECKING:
    from quantlab.study.spec import KlSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A run, whatever it is.

    Attributes:
        kind: "rounding", "window", "correction" or "propagation".
        path: its directory.
        spec: what was asked for.
        record: spec.json.
        summary: its comparison table.
        tables: that, laid out.
        figures: SVG files.
    """

    kind: str
    path: Path
    spec: KlSpec
    record: dict[str, Any]
    summary: pa.Table
    tables: Sequence[Table]
    figures: Sequence[Path]


def write_digest(
    paths: Sequence[Path], out: Path, *, introduction: str, folding: Path | None = None
) -> Path:
    """Write README.md, tables as CSV and figures as SVG of some runs.

    Args:
        paths: run directories of `quantlab ablate` and `quantlab propagate`; of several runs of a
            kind on a model, claims take a policy's figures from the first that has it.
        out: directory; what is written there before is replaced file by file.
        introduction: Markdown, from the title on.
        folding: CSV of `quantlab ablate folding`.

    Returns:
        The page.

    Raises:
        UsageError: a directory holds no such run, or two hold the same one.
    """
    runs: dict[str, Shown] = {}
    for path in paths:
        run = _load(path)
        name = f"{run.kind}-{Path(run.spec.model).name}"
        same = [r for r in runs.values() if (r.kind, r.spec) == (run.kind, run.spec)]
        if same:
            raise UsageError(f"{path} is the same {run.kind} run as {same[0].path}")
        count = sum(key == name or key.startswith(f"{name}-") for key in runs)
        runs[f"{name}-{count + 1}" if count else name] = run
    out.mkdir(parents=True, exist_ok=True)
    claims = claims_table(_evidence(list(runs.values())))
    parts = [introduction.rstrip(), "## Claims", markdown(claims, numeric=False)]
    for name, run in runs.items():
        title = TITLES.get(run.kind, "drift of stored states")
        sessions = _sessions(run)
        parts += [f"## {run.spec.model}: {title}", f"    {_command(sessions)}"]
        parts.append(_facts(run, sessions))
        parts += [markdown(table) for table in run.tables]
        pyarrow.csv.write_csv(run.summary, out / f"{name}.csv")
        for figure in run.figures:
            target = out / f"{name}-{figure.name}"
            target.write_bytes(figure.read_bytes())
            parts.append(f"![{run.spec.model}, {title}: {figure.stem}]({target.name})")
    if folding is not None:
        table = pyarrow.csv.read_csv(folding)
        pyarrow.csv.write_csv(table, out / "folding.csv")
        parts += ["## Synthetic: where folded corrections hurt", "    quantlab ablate folding"]
        parts.append(markdown(folding_table(table)))
    page = out / "README.md"
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def _load(path: Path) -> Shown:
    from quantlab.study.ablate import load_ablation
    from quantlab.study.propagate import load_propagation

    if (path / "ablation.json").exists():
        ablation = load_ablation(path)
        return Shown(
            kind=ablation.kind,
            path=path,
            spec=ablation.result.spec,
            record=ablation.result.record,
            summary=ablation.table,
            tables=ablation_tables(ablation.kind, ablation.table),
            figures=[f for f in write_ablation(ablation) if f.suffix == ".svg"],
        )
    watched = load_propagation(path)
    return Shown(
        kind="propagation",
        path=path,
        spec=watched.spec,
        record=watched.record,
        summary=watched.summary,
        tables=propagation_tables(watched.summary),
        figures=[f for f in write_propagation(watched) if f.suffix == ".svg"],
    )


def _evidence(runs: Sequence[Shown]) -> list[Evidence]:
    found = []
    for model in dict.fromkeys(run.spec.model for run in runs):
        mine = [run for run in runs if run.spec.model == model]
        is_delta = any(run.record["model"]["op"] != "mamba2" for run in mine)
        rows: dict[str, list[Any]] = {}
        for run in mine:
            rows.setdefault(run.kind, []).extend(run.summary.to_pylist())
        found.append(Evidence(model=model, is_delta=is_delta, **rows))
    return found


def _sessions(run: Shown) -> list[dict[str, Any]]:
    from quantlab.study.store import RunDirectory

    directory = RunDirectory(run.path)
    return list(directory.read_json(directory.run_file).get("sessions", []))


def _command(sessions: list[dict[str, Any]]) -> str:
    command = sessions[0].get("command", []) if sessions else []
    return shlex.join(command) if command else "from Python; see spec.json"


def _facts(run: Shown, sessions: list[dict[str, Any]]) -> str:
    made = run.record["made_with"]
    git = made.get("git")
    revision = "an installed package" if git is None else git["commit"][:7]
    dirty = " with changes" if git and git["dirty"] else ""
    seconds = sum(session.get("seconds", 0) for session in sessions)
    count = len(run.record["data"]["streams"])
    return (
        f"{count} stream{'s' * (count != 1)} of {Path(run.spec.data).name}, prompt "
        f"{run.spec.prompt}, {run.record['model']['dtype']}; {seconds:,.0f} s on "
        f"{made['device']} at {revision}{dirty}."
    )
