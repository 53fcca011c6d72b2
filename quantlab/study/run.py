"""Run a KL study, or go on with one that was killed."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.csv

from quantlab.data import Streams, check_data, load_streams
from quantlab.errors import QuantlabError, RunError, UsageError
from quantlab.metrics.positions import WINDOW, lengths, measured_positions
from quantlab.study.backend import Backend
from quantlab.study.batch import run_batch
from quantlab.study.progress import Progress, Silent
from quantlab.study.provenance import provenance
from quantlab.study.result import Result, load_result
from quantlab.study.rows import SCHEMA_VERSION, merge
from quantlab.study.session import Interrupted, Session, require_same, require_same_model
from quantlab.study.spec import SPEC_VERSION, KlSpec, differences
from quantlab.study.store import RunDirectory

if TYPE_CHECKING:
    from quantlab.models import LoadedModel

# Seconds between two saves of the engine's state within a batch: what a kill can cost.
CHECKPOINT_SECONDS = 120.0


def run_kl(
    spec: KlSpec,
    out: Path | str,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    backend: Backend | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    command: Sequence[str] | None = None,
) -> Result:
    """Measure KL, NLL and agreement of every policy, into a run directory.

    Args:
        spec: the study.
        out: the run directory.
        resume: go on with the run that is there, if any; the same spec is required.
        progress: told how far it is.
        backend: models and engine.
        checkpoint_seconds: time between saves within a batch.
        command: recorded as how this was started; None from Python.

    Returns:
        The result, read back from the directory. With failed cells, `failed` lists them; they are
        tried again by resuming.

    Raises:
        UsageError: the directory holds another run, or the spec does not fit model or data.
        MissingAsset: model or data are not here.
        RunError: everything failed, the disk is full, or a file is damaged.
        Interrupted: on SIGINT; resuming goes on.
    """
    progress, backend = progress or Silent(), backend or Backend()
    directory = RunDirectory(Path(out))
    check_data(spec.data)
    directory.prepare(resume=resume)
    with directory.locked():
        directory.sweep()
        recorded = directory.read_json(directory.spec_file)
        if recorded:
            require_same(directory, "spec", recorded.get("spec", {}), spec.to_json())
            if directory.finished:
                progress.note(f"{directory.path} is finished already: nothing to compute")
                directory.drop_parts()
                return load_result(directory.path)
        session = Session(directory, progress, command)
        try:
            failed = _run(directory, spec, recorded, session, backend, checkpoint_seconds)
        except KeyboardInterrupt:
            session.end("interrupted")
            directory.discard_unstarted()
            raise Interrupted(
                f"interrupted; what was measured is in {directory.path}, and the same command "
                "with --resume goes on from there"
            ) from None
        except BaseException:
            session.end("failed")
            directory.discard_unstarted()
            raise
        session.end("failed cells" if failed else "finished", failed)
    result = load_result(directory.path)
    if not failed:
        directory.drop_parts()
    return result


def _run(
    directory: RunDirectory,
    spec: KlSpec,
    recorded: dict[str, Any],
    session: Session,
    backend: Backend,
    checkpoint_seconds: float,
) -> list[dict[str, Any]]:
    m, streams = open_streams(spec, backend)
    record = _record(spec, recorded, m, streams, backend, session.progress)
    if recorded:
        require_same(
            directory,
            "schema of rows",
            {"version": recorded.get("rows_schema")},
            {"version": SCHEMA_VERSION},
        )
        require_same(directory, "data", recorded.get("data", {}), record["data"])
        require_same_model(directory, recorded.get("model", {}), record["model"])
    record["self_test"] = backend.self_test(m)
    if not recorded:
        directory.write_json(directory.spec_file, record)
    session.begin(spec.device)
    batches: list[list[int]] = record["plan"]["stream_batches"]
    positions = measured_positions(spec.tokens)
    names = [s.name for s in streams.streams]
    total = spec.tokens * sum(map(len, batches))
    waiting = [i for i in range(len(batches)) if not directory.done_file(i).exists()]
    finished = total - spec.tokens * sum(len(batches[i]) for i in waiting)
    session.progress.start(total, finished)
    failed: list[dict[str, Any]] = []
    for index in waiting:
        batch = batches[index]

        def advance(done: int, before: int = finished, width: int = len(batch)) -> None:
            session.progress.advance(before + done * width)

        try:
            forcing = backend.forcing(
                m,
                spec,
                streams.tokens[batch],
                streams=batch,
                positions=positions,
                segment=record["plan"]["segment"],
            )
            run_batch(
                directory,
                spec,
                index,
                forcing,
                streams=batch,
                stream_names=[names[s] for s in batch],
                positions=positions,
                advance=advance,
                note=session.progress.note,
                checkpoint_seconds=checkpoint_seconds,
            )
        except Exception as error:
            if _out_of_memory(error):
                error = RunError(
                    f"out of memory with {record['plan']['rows']} rows in a batch and segments of "
                    f"{record['plan']['segment']}: give a smaller --batch-rows or --segment, and "
                    f"another --out ({str(error).splitlines()[0]})"
                )
            if isinstance(error, OSError | QuantlabError) or len(failed) + 1 == len(batches):
                raise error
            text = f"{type(error).__name__}: {error}"
            failed.append({"batch": index, "streams": batch, "error": text})
            session.progress.note(f"streams {batch} failed ({text}); going on with the others")
            log = "".join(traceback.format_exception(error))
            directory.write(directory.path / f"failed-{index:04d}.log", log.encode())
        finished += spec.tokens * len(batch)
    if failed and not any(directory.done_file(i).exists() for i in range(len(batches))):
        raise RunError(f"every batch failed; the first with {failed[0]['error']}")
    rows = merge(directory.read_parts(), spec)
    directory.write_table(directory.rows_file, rows)
    write_summary(directory, load_result(directory.path))
    return failed


def write_summary(directory: RunDirectory, result: Result) -> None:
    """Write summary.csv."""
    sink = pyarrow.BufferOutputStream()
    pyarrow.csv.write_csv(result.summary, sink)
    directory.write(directory.summary_file, sink.getvalue().to_pybytes())


def _out_of_memory(error: Exception) -> bool:
    import torch

    # torch has no class for a CPU allocation that failed
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def open_streams(spec: KlSpec, backend: Backend) -> tuple[LoadedModel, Streams]:
    """Load the streams, before the model where its tokenizer is known without its weights.

    Raises:
        QuantlabError: whatever is wrong with data or model.
    """

    def load(tokenizer: Any) -> Streams:
        return load_streams(
            spec.data,
            tokenizer=tokenizer,
            streams=spec.streams,
            tokens=spec.tokens,
            prompt=spec.prompt,
        )

    tokenizer = backend.tokenizer(spec)
    if tokenizer is not None:
        streams = load(tokenizer)
        return backend.load(spec), streams
    m = backend.load(spec)
    if m.tokenizer is None:
        raise UsageError(f"{spec.model} brings no tokenizer, and --data are text")
    return m, load(m.tokenizer)


def _record(
    spec: KlSpec,
    recorded: dict[str, Any],
    m: LoadedModel,
    streams: Streams,
    backend: Backend,
    progress: Progress,
) -> dict[str, Any]:
    """spec.json. A resumed run keeps the recorded plan, so that it re-forms the same batches."""
    plan = recorded.get("plan")
    if plan is None:
        made = backend.plan(m, spec, len(streams.streams))
        plan = {
            "stream_batches": made.stream_batches,
            "segment": made.segment,
            "rows": made.rows,
            "bytes": made.bytes,
        }
    made_with = provenance(spec.device)
    before = recorded.get("made_with", made_with)
    changed = differences(
        {"git": before.get("git"), "versions": before.get("versions")},
        {"git": made_with["git"], "versions": made_with["versions"]},
    )
    if changed:
        progress.note(f"resuming under other code than the run began with ({changed})")
    return {
        "study": "kl",
        "spec_version": SPEC_VERSION,
        "rows_schema": SCHEMA_VERSION,
        "spec": spec.to_json(),
        "model": m.identity,
        "data": streams.provenance(),
        "plan": plan,
        "lengths": list(lengths(spec.tokens)),
        "window": WINDOW,
        "made_with": made_with,
    }
