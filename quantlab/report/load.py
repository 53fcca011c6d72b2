"""Read a run of any study back, with its tables laid out and its figures drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from quantlab.errors import UsageError
from quantlab.report.ablation import write_ablation
from quantlab.report.ablation_table import ablation_tables
from quantlab.report.attribution import attribution_report, write_attribution
from quantlab.report.copies import copies_table, write_copies
from quantlab.report.page import write_report
from quantlab.report.prediction import prediction_tables, write_prediction
from quantlab.report.propagation import propagation_tables, write_propagation
from quantlab.report.shown import NAMES, Kind, Shown
from quantlab.report.table import make_table

# Kinds that are shown only once they are finished, and the commands that finish them.
_FINISHED: dict[Kind, str] = {"copies": "ablate copies", "prediction": "predict"}
# What spec.json calls a kind, where that is another word.
_STUDIES = {"propagate": "propagation", "predict": "prediction"}


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
    recorded = _STUDIES.get(str(study), ablation or study)
    kind = next((name for name in NAMES if name == recorded), None)
    if kind is None:
        raise UsageError(f"{path} holds no run of kl, ablate, attribute, propagate or predict")
    if kind in _FINISHED and not directory.finished:
        raise UsageError(f"{path} holds no finished run of quantlab {_FINISHED[kind]}")
    return kind


def load_shown(path: Path) -> Shown:
    """Read a run directory and draw its figures.

    Raises:
        UsageError: it holds no run.
        RunError: a file in it is damaged, or the disk is full.
    """
    return _LOADED[kind_of(path)](path)


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
    from quantlab.study.spec import KlSpec
    from quantlab.study.store import RunDirectory, read_table

    directory = RunDirectory(path)
    record = directory.read_json(directory.spec_file)
    spec, rows = KlSpec.from_json(record["spec"]), read_table(directory.rows_file)
    drawn = write_copies(
        rows,
        path,
        title=f"{spec.model}: {NAMES['copies']}",
        subtitle=f"{Path(spec.data).name}; recorded: {spec.tokens:,} tokens, in the model: "
        f"{record['in_model']:,}",
    )
    return Shown(
        kind="copies",
        what=NAMES["copies"],
        path=path,
        spec=spec,
        record=record,
        data={"copies": rows},
        tables=[copies_table(rows)],
        figures=_svg(drawn),
    )


def _prediction(path: Path) -> Shown:
    from quantlab.study.predict import load_prediction

    found = load_prediction(path)
    texts, tokens = found.record["texts"], found.record["tokens"]
    return Shown(
        kind="prediction",
        what=NAMES["prediction"],
        path=path,
        spec=found.spec,
        record=found.record,
        data={"compared": found.compared, "agreement": found.agreement},
        tables=prediction_tables(found),
        figures=_svg(write_prediction(found)),
        streams=max(found.compared["streams"].to_pylist(), default=None),
        remark=f"calibrated on {texts} other text{'s' * (texts != 1)} of {tokens:,} tokens",
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
        streams=watched.summary["streams"][0].as_py(),  # that are done
    )


_LOADED: dict[Kind, Callable[[Path], Shown]] = {
    "kl": _kl,
    "rounding": _ablation,
    "window": _ablation,
    "correction": _ablation,
    "attribution": _attribution,
    "copies": _copies,
    "propagation": _propagation,
    "prediction": _prediction,
}


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
