"""Predict KL at N from calibration statistics, then hold it against a measurement.

    KL(policy, N)  ≈  Σ_heads κ_kept · E‖D q‖² / E‖o‖² of what the recurrence carries
                              + κ_fresh · that of the read copy's own cast

with the expectation from gates, keys, write strengths, queries and the errors of single writes
(`analysis.pullback`, `analysis.write_errors`), and the nats that a relative error costs from
small injections (`analysis.sensitivity`), all on text that the measurement does not touch: what
follows its last token in the same documents. No policy is decoded with before the prediction is on
disk; what is measured changes none of it.

Errors are relative throughout: states may grow over tens of thousands of tokens, and the errors of
writes grow with them, but what follows the recurrence normalises its output.

It leaves out: saturation (KL is taken as quadratic, which it is below some 0.1 nats); states that
grow after the calibration text's end, beside which older errors would be smaller; correlations
between the errors of different heads; 16-bit records, so the model is calibrated in FP32.

A directory of such a run holds

    spec.json             what was asked for and what it resolved to
    run.json              when it ran and how it ended
    rows.parquet          predicted KL, one row a policy and N; written before anything is measured
    heads.parquet         one row a policy, layer and head: errors, sensitivities, half-life
    measured/             the KL study it is held against, unless another run was named
    compared.csv          predicted against measured, one line a policy and N
    agreement.csv         order and size, one line an N
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from quantlab.analysis.comparison import PREDICTION_SCHEMA, compare_prediction
from quantlab.data import Streams, check_data, load_streams
from quantlab.errors import UsageError
from quantlab.metrics.positions import lengths
from quantlab.replay.policy import Policy
from quantlab.study.backend import Backend
from quantlab.study.progress import Progress, Silent
from quantlab.study.provenance import provenance
from quantlab.study.result import load_result
from quantlab.study.run import run_kl
from quantlab.study.session import Interrupted, Session
from quantlab.study.spec import KlSpec, differences
from quantlab.study.store import RunDirectory, read_table

TOKENS = 1024
TEXTS = 2
# Beside the suite, where no policies are named: one copy rounded to nearest.
EXTRA = ("shared:fp16", "shared:fp8", "shared:nvfp4")

HEAD_SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string()),
        pa.field("layer", pa.int32()),
        pa.field("head", pa.int32()),
        *(
            pa.field(name, pa.float64(), metadata={"meaning": meaning})
            for name, meaning in {
                "half_life": "steps in which the mean gate halves a state",
                "write": "relative mean square error of one write, of what most steps read",
                "predicted_error": "expected squared output error over the calibration text, "
                "relative to the output's mean square, as all errors here",
                "decoded_error": "the same decoded on its recorded inputs",
                "kept_error": "expected squared output error at N, carried by the recurrence",
                "fresh_error": "the same of the read copy's own cast",
                "kept_kappa": "nats per unit of the former",
                "fresh_kappa": "nats per unit of the latter; NaN where no policy needs it",
            }.items()
        ),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A prediction held against a measurement.

    Attributes:
        path: its directory.
        spec: the study that was predicted.
        record: spec.json.
        predicted: rows.parquet.
        heads: heads.parquet.
        compared: see `analysis.comparison`.
        agreement: likewise.
        measured: directory of the measurement.
    """

    path: Path
    spec: KlSpec
    record: dict[str, Any]
    predicted: pa.Table
    heads: pa.Table
    compared: pa.Table
    agreement: pa.Table
    measured: Path


def default_directory(spec: KlSpec, tokens: int) -> Path:
    """`runs/predict-MODEL-N-HASH`: the same prediction finds itself again."""
    model = Path(spec.model).name.lower()
    return Path("runs") / f"predict-{model}-{spec.tokens}-{tokens}-{spec.digest()}"


def run_prediction(
    spec: KlSpec,
    out: Path | str,
    *,
    tokens: int = TOKENS,
    texts: int = TEXTS,
    against: Path | str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    measuring: Progress | None = None,
    backend: Backend | None = None,
    command: Sequence[str] | None = None,
) -> Prediction:
    """Predict a KL study, and measure it unless it is measured already.

    Args:
        spec: the study.
        out: the run directory.
        tokens: of each calibration text, after its prompt.
        texts: how many documents give one.
        against: directory of a finished run of `spec`; None to measure.
        resume: go on with the run that is there, if any.
        progress: told how far the prediction is, in rows of layers and injections.
        measuring: told how far the measurement is.
        backend: models and engine.
        command: recorded as how this was started.

    Raises:
        UsageError: the directory holds another run, data are too short, or activations would not
            be FP32.
        MissingAsset, RunError: as a KL study.
        Interrupted: on SIGINT; resuming goes on.
    """
    progress, backend = progress or Silent(), backend or Backend()
    _check(spec, tokens, texts)
    check_data(spec.data)
    directory = RunDirectory(Path(out))
    directory.prepare(resume=resume)
    with directory.locked():
        directory.sweep()
        asked = {
            "study": "predict",
            "spec": spec.to_json(),
            "tokens": tokens,
            "texts": texts,
            "against": None if against is None else str(against),
        }
        recorded = directory.read_json(directory.spec_file)
        if recorded:
            found = differences({k: recorded.get(k) for k in asked}, asked)
            if found:
                raise UsageError(f"{directory.path} holds another run: {found}")
        session = Session(directory, progress, command)
        try:
            if not directory.rows_file.exists():
                _predict(directory, spec, asked, progress, backend)
            session.begin(spec.device)
            if against is None:
                measured = directory.path / "measured"
                run_kl(spec, measured, resume=True, progress=measuring, backend=backend)
        except KeyboardInterrupt:
            session.end("interrupted")
            directory.discard_unstarted()
            raise Interrupted(
                f"interrupted; what is done is in {directory.path}, and the same command with "
                "--resume goes on"
            ) from None
        except BaseException:
            directory.discard_unstarted()
            raise
        session.end("finished")
    directory.drop_parts()
    result = load_prediction(directory.path)
    for name in ("compared", "agreement"):
        sink = pa.BufferOutputStream()
        pyarrow.csv.write_csv(getattr(result, name), sink)
        directory.write(directory.path / f"{name}.csv", sink.getvalue().to_pybytes())
    return result


def load_prediction(path: Path | str) -> Prediction:
    """Read a prediction and compare it with its measurement, complete or not.

    Raises:
        UsageError: it holds none.
        RunError: a file in it is damaged.
    """
    directory = RunDirectory(Path(path))
    record = directory.read_json(directory.spec_file)
    if record.get("study") != "predict" or not directory.rows_file.exists():
        raise UsageError(f"{path} holds no finished run of quantlab predict")
    spec = KlSpec.from_json(record["spec"])
    predicted = read_table(directory.rows_file)
    heads = read_table(directory.path / "heads.parquet")
    measured = directory.path / "measured" if record["against"] is None else Path(record["against"])
    rows = load_result(measured).rows
    compared, agreement = compare_prediction(
        predicted, _writes(heads), rows, list(lengths(spec.tokens))
    )
    return Prediction(
        path=directory.path,
        spec=spec,
        record=record,
        predicted=predicted,
        heads=heads,
        compared=compared,
        agreement=agreement,
        measured=measured,
    )


def _check(spec: KlSpec, tokens: int, texts: int) -> None:
    from quantlab.study.calibrate import INJECTION_PROMPT, INJECTION_TOKENS

    if spec.dtype not in (None, "fp32"):
        raise UsageError(
            f"--dtype {spec.dtype}: injections are far below what 16-bit activations resolve; a "
            "prediction is made in fp32"
        )
    least = INJECTION_PROMPT + INJECTION_TOKENS
    if spec.prompt + tokens < least:
        raise UsageError(
            f"--calibrate {tokens}: prompt and calibration are {spec.prompt + tokens} tokens, and "
            f"injections take {least}"
        )
    if texts < 1:
        raise UsageError(f"--texts must be positive (got {texts})")


def calibration_tokens(spec: KlSpec, tokens: int, texts: int, tokenizer: Any) -> Streams:
    """Load what follows the measured tokens in the first documents that are long enough.

    Returns:
        Streams of prompt + tokens + 1 ids.

    Raises:
        UsageError: no or too few documents are so long.
    """
    streams = load_streams(
        spec.data,
        tokenizer=tokenizer,
        streams=texts,
        tokens=spec.tokens + spec.prompt + tokens,
        prompt=spec.prompt,
    )
    return replace(streams, tokens=streams.tokens[:, -(spec.prompt + tokens + 1) :])


def _predict(
    directory: RunDirectory,
    spec: KlSpec,
    asked: dict[str, Any],
    progress: Progress,
    backend: Backend,
) -> None:
    import torch

    from quantlab.engine.teacher_forcing import scan_class
    from quantlab.replay.seeded import by_seed
    from quantlab.study.calibrate import (
        INJECTION_PROMPT,
        INJECTION_TOKENS,
        estimate_layer,
        record,
        sensitivities,
    )

    tokenizer = backend.tokenizer(spec)
    texts = calibration_tokens(spec, asked["tokens"], asked["texts"], tokenizer)
    m = backend.load(replace(spec, dtype="fp32"))
    self_test = backend.self_test(m)
    segment = backend.plan(m, spec, 1).segment
    policies = _without_seeds(spec.policies)
    grid = lengths(spec.tokens)
    shapes = ["kept", *(["fresh"] if any(p.kind == "separate" for p in policies) else [])]
    count = len(texts.streams)
    heads = sum(shape[0] for shape in m.recurrent_shapes)
    # a layer's scan of all policies takes about what as many injections take
    progress.start(count * (m.layers * len(policies) + len(shapes) * heads), 0)
    done = 0

    scan = by_seed(scan_class("windowed", m.device))
    layers, cost = [], []
    for ids in texts.tokens:
        found = []
        recordings = record(m, ids[None], prompt=spec.prompt, segment=segment)
        for layer in range(m.layers):
            recording, recordings[layer] = recordings[layer], None  # type: ignore[call-overload]
            found.append(
                estimate_layer(recording, policies, grid, layer=layer, seed=spec.seed, scan=scan)
            )
            done += len(policies)
            progress.advance(done)
        layers.append(found)
        before = done

        def advance(injected: int, before: int = before) -> None:
            progress.advance(before + injected)

        short = ids[None, : INJECTION_PROMPT + INJECTION_TOKENS + 1]
        cost.append(sensitivities(m, short, shapes, seed=spec.seed, progress=advance))  # type: ignore[arg-type]
        done += len(shapes) * heads
    predicted, by_head = _tables(policies, grid, layers, cost, torch)
    directory.write_json(
        directory.spec_file,
        {
            **asked,
            "model": m.identity,
            "data": texts.provenance(),
            "self_test": self_test,
            "segment": segment,
            "made_with": provenance(spec.device),
        },
    )
    directory.write_table(directory.path / "heads.parquet", by_head)
    directory.write_table(directory.rows_file, predicted)


def _tables(
    policies: list[Policy], grid: Sequence[int], layers: Any, cost: Any, torch: Any
) -> tuple[pa.Table, pa.Table]:
    """Average over texts, and lay out."""
    names = [str(p) for p in policies]
    # a mean cost over texts: all their nats over all their squared relative errors
    kappa = {
        shape: [
            torch.stack([c[shape][0][layer] for c in cost]).sum(0)
            / torch.stack([c[shape][1][layer] for c in cost]).sum(0)
            for layer in range(len(layers[0]))
        ]
        for shape in cost[0]
    }
    totals = {(name, n): {"kept": 0.0, "fresh": 0.0} for name in names for n in grid}
    heads: list[dict[str, Any]] = []
    for layer in range(len(layers[0])):
        of = [text[layer] for text in layers]
        fresh = torch.stack([x.fresh for x in of]).mean(0).cpu()
        here = torch.stack([x.here for x in of]).mean(0).cpu()
        decoded = torch.stack([x.decoded for x in of]).mean(0).cpu()
        write = torch.stack([x.errors.relative() for x in of]).mean(0).cpu()
        half_life = torch.stack([x.half_life for x in of]).mean(0).cpu()
        nothing = torch.full_like(kappa["kept"][layer], float("nan"))
        k_kept = kappa["kept"][layer]
        k_fresh = kappa["fresh"][layer] if "fresh" in kappa else nothing
        for p in range(len(policies)):
            kept = torch.stack([x.kept[p] for x in of]).mean(0).cpu()  # [lengths, H]
            spent = kept @ k_kept
            lost = float(fresh[p] @ k_fresh) if "fresh" in kappa else 0.0
            for i, n in enumerate(grid):
                totals[names[p], n]["kept"] += float(spent[i])
                totals[names[p], n]["fresh"] += lost
            heads += [
                {
                    "policy": names[p],
                    "layer": layer,
                    "head": h,
                    "half_life": float(half_life[h]),
                    "write": float(write[p, h]),
                    "predicted_error": float(here[p, h]),
                    "decoded_error": float(decoded[p, h]),
                    "kept_error": float(kept[-1, h]),
                    "fresh_error": float(fresh[p, h]),
                    "kept_kappa": float(k_kept[h]),
                    "fresh_kappa": float(k_fresh[h]),
                }
                for h in range(len(k_kept))
            ]
    rows = [
        {"policy": name, "n": n, "predicted": x["kept"] + x["fresh"], **x}
        for (name, n), x in totals.items()
    ]
    return (
        pa.Table.from_pylist(rows, schema=PREDICTION_SCHEMA),
        pa.Table.from_pylist(heads, schema=HEAD_SCHEMA),
    )


def _writes(heads: pa.Table) -> dict[str, float]:
    """Median over heads of one write's relative error, by policy."""
    found: dict[str, list[float]] = {}
    for row in heads.to_pylist():
        found.setdefault(row["policy"], []).append(row["write"])
    return {name: float(np.median(x)) for name, x in found.items()}


def _without_seeds(policies: Sequence[Policy]) -> list[Policy]:
    """Policies that differ in more than a seed: each once."""
    return list({str(q): q for q in (replace(p, seed=None) for p in policies)}.values())
