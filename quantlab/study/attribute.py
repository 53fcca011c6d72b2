"""Attribution: a KL study of one policy on the whole model, on parts of it, and on all but each.

It is a study in a run directory like any other, so that it resumes as one does, plus

    attribution.json    how the model was cut
    attribution.csv     one line a unit and N
    additivity.csv      one line an N: how units add up, and how stable their order is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.csv

from quantlab.analysis.attribution import attribution_tables
from quantlab.errors import UsageError
from quantlab.metrics.positions import lengths
from quantlab.replay.part import Part, Unit
from quantlab.replay.policy import parse_policy
from quantlab.study.build import build_spec
from quantlab.study.result import Result, load_result
from quantlab.study.run import run_kl
from quantlab.study.session import Interrupted
from quantlab.study.spec import KlSpec
from quantlab.study.store import RunDirectory

By = Literal["head", "layer"]
POLICY = "shared:nvfp4-sr"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """An attribution that was run.

    Attributes:
        result: the study.
        units: one row a unit and N (`quantlab.analysis.attribution.ATTRIBUTION_SCHEMA`).
        sums: one row an N (`ADDITIVITY_SCHEMA`).
    """

    result: Result
    units: pa.Table
    sums: pa.Table


def attribution_spec(
    model: str,
    *,
    policy: str = POLICY,
    by: By = "head",
    layers: Sequence[int] | None = None,
    window: int = 16,
    **others: Any,
) -> KlSpec:
    """Take a policy whole, and on every unit alone and left out; all are rows of one batch.

    Args:
        model: as for `build_spec`; its config tells layers and heads.
        policy: what is attributed.
        by: unit: a head, or a whole recurrent layer.
        layers: recurrent layers whose units are taken, counted from 0; None for all.
        window: L where the policy does not say it.
        others: the other arguments of `build_spec`.

    Raises:
        UsageError: for a name or a layer that does not exist, or a policy that is cut already.
        MissingAsset: the model's config is not here.
    """
    try:
        whole = parse_policy(policy, window=window)
    except ValueError as error:
        raise UsageError(f"--policy: {error}") from error
    if whole.part is not None:
        raise UsageError(f"--policy {policy}: applies to a part already; leave {whole.part} out")
    if whole.read.is_exact and whole.recur.is_exact:
        raise UsageError(f"--policy {policy}: rounds no state, so there is nothing to attribute")
    if by not in get_args(By):
        raise UsageError(f"--by {by}: units are {' or '.join(get_args(By))}s")
    spec = build_spec(model, [whole], **others)  # what is wrong with the rest is said first
    heads = model_heads(model)
    units = _units(heads, by, layers)
    parts = [Part(units=(unit,), excluded=excluded) for unit in units for excluded in (False, True)]
    cut = tuple(replace(whole, part=part) for part in parts)
    return replace(spec, policies=(*spec.policies, *cut))


def model_heads(model: str) -> list[int]:
    """Count the heads of every recurrent layer, from the model's config."""
    from quantlab.models.shapes import recurrent_shapes

    return [heads for heads, _, _ in recurrent_shapes(model)]


def _units(heads: Sequence[int], by: By, layers: Sequence[int] | None) -> list[Unit]:
    chosen = sorted(set(range(len(heads)) if layers is None else layers))
    if not chosen or chosen[0] < 0 or chosen[-1] >= len(heads):
        raise UsageError(
            f"--layers: the model has recurrent layers 0 … {len(heads) - 1} (got {list(chosen)})"
        )
    if by == "layer":
        return [(layer, None) for layer in chosen]
    return [(layer, head) for layer in chosen for head in range(heads[layer])]


def default_directory(spec: KlSpec) -> Path:
    """`runs/attribute-MODEL-N-HASH`: the same attribution finds its own run again."""
    model = Path(spec.model).name.lower()
    return Path("runs") / f"attribute-{model}-{spec.tokens}-{spec.digest()}"


def run_attribution(spec: KlSpec, out: Path | str, **options: Any) -> Attribution:
    """Run a study, or go on with it, and compare its parts.

    Args:
        spec: of `attribution_spec`.
        out: the run directory.
        options: of `run_kl`: resume, progress, backend, checkpoint_seconds, command.

    Raises:
        QuantlabError: as `run_kl`.
    """
    directory = RunDirectory(Path(out))
    parts = {"parts": [str(p.part) for p in spec.policies if p.part is not None]}
    try:
        result = run_kl(spec, out, **options)
    except Interrupted:
        if directory.exists:  # what was measured can be compared
            directory.write_json(directory.path / "attribution.json", parts)
        raise
    directory.write_json(directory.path / "attribution.json", parts)
    attribution = _compared(result)
    for name, table in (("attribution", attribution.units), ("additivity", attribution.sums)):
        sink = pa.BufferOutputStream()
        pyarrow.csv.write_csv(table, sink)
        directory.write(directory.path / f"{name}.csv", sink.getvalue().to_pybytes())
    return attribution


def load_attribution(path: Path | str) -> Attribution:
    """Read the run directory of an attribution; of an interrupted one, what has been measured.

    Raises:
        UsageError: it holds none.
        RunError: a file in it is damaged.
    """
    directory = RunDirectory(Path(path))
    if not directory.read_json(directory.path / "attribution.json"):
        raise UsageError(f"{path} holds no attribution (no attribution.json)")
    return _compared(load_result(path))


def _compared(result: Result) -> Attribution:
    units, sums = attribution_tables(result.rows, lengths(result.spec.tokens))
    return Attribution(result=result, units=units, sums=sums)
