"""Ablations: KL studies whose policies differ in one thing, and the table that compares them.

An ablation is a KL study in a run directory like any other, so that it resumes as one does, plus
`ablation.json` with its kind and `ablation.csv` with its table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.csv

from quantlab.analysis.corrections import correction_table
from quantlab.analysis.rounding import rounding_table
from quantlab.analysis.windows import window_table
from quantlab.errors import UsageError
from quantlab.formats import Format, FormatError, parse_format
from quantlab.metrics.positions import lengths
from quantlab.replay.policy import DEFAULT_WINDOW, Corrections, Policy, parse_policy
from quantlab.study.build import build_spec
from quantlab.study.result import Result, load_result
from quantlab.study.run import run_kl
from quantlab.study.session import Interrupted
from quantlab.study.spec import KlSpec
from quantlab.study.store import RunDirectory

Kind = Literal["rounding", "window", "correction"]

FORMATS = ("fp16", "fp8", "nvfp4")
SEEDS = (0, 1, 2)
WINDOWS = (1, 4, 16, 32, 64)
WINDOW_POLICIES = ("shared:fp8-sr", "shared:nvfp4-sr", "fp8/fp32", "nvfp4/fp32")
# With exact records a single copy has nothing to fold: BF16 ones, as engines keep, are added.
CORRECTION_POLICIES = (
    "fp8/fp32",
    "nvfp4/fp32",
    "nvfp4/fp16-sr",
    "nvfp4/fp32 records=bf16",
    "shared:nvfp4-sr records=bf16",
)

_TABLES: dict[Kind, Callable[[pa.Table, Sequence[int]], pa.Table]] = {
    "rounding": rounding_table,
    "window": window_table,
    "correction": correction_table,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """An ablation that was run.

    Attributes:
        kind: which.
        result: the study.
        table: the comparison (`ROUNDING_SCHEMA`, `WINDOW_SCHEMA`, `CORRECTION_SCHEMA`).
    """

    kind: Kind
    result: Result
    table: pa.Table


def rounding_spec(
    model: str,
    *,
    formats: Sequence[str] = FORMATS,
    seeds: Sequence[int] = SEEDS,
    window: int = 16,
    **others: Any,
) -> KlSpec:
    """Shared copies of every format, to nearest and stochastically under every seed.

    Args:
        model: as for `build_spec`.
        formats: without a rounding.
        seeds: of the stochastic rounding; two or more split bias from spread.
        window: L.
        others: the other arguments of `build_spec`.

    Raises:
        UsageError: for a name that does not exist, or a format that rounds nothing.
    """
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"--seeds must be one or more different ones (got {list(seeds)})")
    policies = []
    for text in formats:
        fmt = _format(text)
        if fmt.is_exact:
            raise UsageError(f"--format {text}: stores an FP32 state as it is; nothing is rounded")
        nearest, stochastic = replace(fmt, rounding="rtn"), replace(fmt, rounding="sr")
        policies.append(Policy(kind="shared", read=nearest, recur=nearest, window=window))
        policies += [
            Policy(kind="shared", read=stochastic, recur=stochastic, window=window, seed=seed)
            for seed in seeds
        ]
    return build_spec(model, policies, **others)


def window_spec(
    model: str,
    *,
    policies: Sequence[str] = WINDOW_POLICIES,
    windows: Sequence[int] = WINDOWS,
    seeds: Sequence[int] = (0,),
    **others: Any,
) -> KlSpec:
    """Every policy at every window; policies with two copies from L = 2.

    Args:
        model: as for `build_spec`.
        policies: without L.
        windows: two or more.
        seeds: of the stochastic rounding.
        others: the other arguments of `build_spec`.

    Raises:
        UsageError: for a name that does not exist, or fewer than two windows.
    """
    lengths_of = sorted(set(windows))
    if len(lengths_of) < 2 or lengths_of[0] < 1:
        raise UsageError(f"--windows must be two or more of 1, 2, … (got {list(windows)})")
    chosen = []
    for text, length, seed in product(policies, lengths_of, seeds):
        base = _policy(text)
        if base.kind == "conventional":
            raise UsageError(
                f"--policy {text}: has L = 1 always; name it shared:{base.recur.short}"
            )
        if base.kind == "separate" and length == 1:
            continue
        policy = replace(base, window=length)
        chosen.append(replace(policy, seed=seed if policy.is_stochastic else None))
    return build_spec(model, list(dict.fromkeys(chosen)), **others)


def correction_spec(
    model: str, *, policies: Sequence[str] = CORRECTION_POLICIES, window: int = 16, **others: Any
) -> KlSpec:
    """Every policy with corrections derived again and with cached ones folded.

    Args:
        model: as for `build_spec`.
        policies: without `corrections=`.
        window: L where a policy does not say it.
        others: the other arguments of `build_spec`.

    Raises:
        UsageError: for a name that does not exist.
    """
    ways: tuple[Corrections, ...] = ("rederive", "fold")
    chosen = [
        replace(_policy(text, window), corrections=way) for text, way in product(policies, ways)
    ]
    return build_spec(model, chosen, **others)


def default_directory(kind: Kind, spec: KlSpec) -> Path:
    """`runs/ablate-KIND-MODEL-N-HASH`: the same ablation finds its own run again."""
    model = Path(spec.model).name.lower()
    return Path("runs") / f"ablate-{kind}-{model}-{spec.tokens}-{spec.digest()}"


def run_ablation(kind: Kind, spec: KlSpec, out: Path | str, **options: Any) -> Ablation:
    """Run a study, or go on with it, and compare its policies.

    Args:
        kind: how to compare them.
        spec: the study, of the kind's own function above.
        out: the run directory.
        options: of `run_kl`: resume, progress, backend, checkpoint_seconds, command.

    Raises:
        QuantlabError: as `run_kl`.
    """
    directory = RunDirectory(Path(out))
    try:
        result = run_kl(spec, out, **options)
    except Interrupted:
        if directory.exists:  # what was measured can be compared
            directory.write_json(directory.path / "ablation.json", {"kind": kind})
        raise
    directory.write_json(directory.path / "ablation.json", {"kind": kind})
    ablation = Ablation(
        kind=kind, result=result, table=_TABLES[kind](result.rows, lengths(spec.tokens))
    )
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(ablation.table, sink)
    directory.write(directory.path / "ablation.csv", sink.getvalue().to_pybytes())
    return ablation


def load_ablation(path: Path | str) -> Ablation:
    """Read the run directory of an ablation; of an interrupted one, what has been measured.

    Raises:
        UsageError: it holds no ablation.
        RunError: a file in it is damaged.
    """
    directory = RunDirectory(Path(path))
    recorded = directory.read_json(directory.path / "ablation.json").get("kind")
    kind = next((k for k in _TABLES if k == recorded), None)
    if kind is None:
        raise UsageError(f"{path} holds no ablation (no ablation.json)")
    result = load_result(path)
    table = _TABLES[kind](result.rows, lengths(result.spec.tokens))
    return Ablation(kind=kind, result=result, table=table)


def run_folding(read: str, *, windows: int = 128, out: Path | None = None) -> pa.Table:
    """Sweep where folded corrections hurt; see `quantlab.analysis.folding`.

    Args:
        read: format of the read copy.
        windows: of 16 steps; at least 8.
        out: a CSV file to write as well.

    Raises:
        UsageError: no such format, or too few windows.
    """
    from quantlab.analysis.folding import FoldPoint, fold_sweep

    fmt = _format(read)
    if windows < 8:
        raise UsageError(f"--windows must be at least 8, to see a trend (got {windows})")
    if fmt.needs_words or fmt.is_exact:
        raise UsageError(f"--read {read}: give a format that rounds, to nearest")
    names = [field.name for field in fields(FoldPoint)]
    points = [
        {name: getattr(point, name) for name in names}
        for point in fold_sweep(read=read, windows=windows)
    ]
    table = pa.Table.from_pylist(points)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.csv.write_csv(table, out)
    return table


def _policy(text: str, window: int = DEFAULT_WINDOW) -> Policy:
    try:
        return parse_policy(text, window=window)
    except ValueError as error:
        raise UsageError(f"--policy: {error}") from error


def _format(text: str) -> Format:
    try:
        return parse_format(text)
    except FormatError as error:
        raise UsageError(str(error)) from error
