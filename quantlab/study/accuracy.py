"""Run an accuracy study, or go on with one that was killed.

spec.json         what the study is, and what it resolved to
run.json          when it ran, under what, and how it ended
parts/            generations as they finish, and the engine's state; gone once complete
rows.parquet      one row a generation
outputs.parquet   what each wrote
summary.csv       accuracy and change of every policy
bins.csv          the same by quartile of the FP32 output length
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from quantlab.errors import RunError, UsageError
from quantlab.metrics.accuracy_table import bins_table, summary_table
from quantlab.study.accuracy_generate import generate
from quantlab.study.accuracy_rows import SCHEMA_VERSION, finish_rows
from quantlab.study.accuracy_spec import SPEC_VERSION, EvalSpec, ask, describe
from quantlab.study.accuracy_text import Texts
from quantlab.study.progress import Progress, Silent
from quantlab.study.provenance import provenance
from quantlab.study.session import Interrupted, Session, require_same, require_same_model
from quantlab.study.store import RunDirectory, read_table

CHECKPOINT_SECONDS = 120.0
OUTPUTS_FILE = "outputs.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """An accuracy run.

    Attributes:
        path: its directory.
        spec: what was asked for.
        record: spec.json.
        run: run.json.
        rows: `quantlab.study.accuracy_rows.SCHEMA`.
    """

    path: Path
    spec: EvalSpec
    record: dict[str, Any]
    run: dict[str, Any]
    rows: pa.Table

    def outputs(self) -> pa.Table:
        """Read what each generation wrote: `quantlab.study.accuracy_rows.OUTPUTS`.

        Raises:
            RunError: the file is damaged or was taken away.
        """
        return read_table(self.path / OUTPUTS_FILE)

    def summary(self) -> pa.Table:
        """Accuracy and change of every policy."""
        return summary_table(self.rows, margin=self.spec.margin)

    def bins(self, *, count: int = 4, log: bool = False) -> pa.Table:
        """Accuracy and change by FP32 output length."""
        return bins_table(self.rows, margin=self.spec.margin, count=count, log=log)


def load_eval(path: Path | str) -> EvalResult:
    """Read a finished accuracy run.

    Raises:
        UsageError: it holds no run, another kind of run, or an unfinished one.
        RunError: a file in it is damaged.
    """
    directory = RunDirectory(Path(path))
    if not directory.exists:
        raise UsageError(f"{path} holds no run (no spec.json)")
    record = directory.read_json(directory.spec_file)
    if record.get("study") != "eval":
        raise UsageError(f"{path} holds a run of {record.get('study')}, not of eval")
    if not directory.rows_file.exists():
        raise UsageError(f"{path} is not finished: run the same eval command with --resume")
    return EvalResult(
        path=directory.path,
        spec=EvalSpec.from_json(record["spec"]),
        record=record,
        run=directory.read_json(directory.run_file),
        rows=read_table(directory.rows_file),
    )


def run_eval(
    spec: EvalSpec,
    out: Path | str,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    command: Sequence[str] | None = None,
    model: Any = None,
) -> EvalResult:
    """Generate, grade and compare, into a run directory.

    Args:
        spec: the study.
        out: the run directory.
        resume: go on with the run that is there, if any; the same spec is required.
        progress: told how many generations are done.
        checkpoint_seconds: time between saves of generations and engine state.
        command: recorded as how this was started.
        model: a loaded model instead of the one the spec names.

    Raises:
        UsageError: the directory holds another run, or model and task do not fit.
        MissingAsset: model or data are not here.
        Interrupted: on SIGINT; resuming goes on.
    """
    progress = progress or Silent()
    directory = RunDirectory(Path(out))
    directory.prepare(resume=resume)
    with directory.locked():
        directory.sweep()
        recorded = directory.read_json(directory.spec_file)
        if recorded:
            require_same(directory, "spec", recorded.get("spec", {}), spec.to_json())
            if directory.finished:
                progress.note(f"{directory.path} is finished already: nothing to compute")
                return load_eval(directory.path)
        session = Session(directory, progress, command)
        try:
            _run(directory, spec, recorded, session, progress, checkpoint_seconds, model)
        except KeyboardInterrupt:
            session.end("interrupted")
            directory.discard_unstarted()
            raise Interrupted(
                f"interrupted; what was generated is in {directory.path}, and the same command "
                "with --resume goes on from there"
            ) from None
        except BaseException:
            session.end("failed")
            directory.discard_unstarted()
            raise
        session.end("finished")
        directory.drop_parts()
    return load_eval(directory.path)


def _run(
    directory: RunDirectory,
    spec: EvalSpec,
    recorded: dict[str, Any],
    session: Session,
    progress: Progress,
    checkpoint_seconds: float,
    model: Any,
) -> None:
    asked = ask(spec)
    m = model
    if m is None:
        from quantlab.models import load_model

        m = load_model(spec.model, device=spec.device, dtype=spec.dtype)
    text = Texts(m, asked, spec.room)
    asked = text.asked
    record = {
        "study": "eval",
        "spec_version": SPEC_VERSION,
        "rows_schema": SCHEMA_VERSION,
        "spec": spec.to_json(),
        "model": m.identity,
        "data": describe(asked),
        "tokenizer": text.name,
        "stop_ids": text.stop_ids,
        "made_with": provenance(spec.device),
    }
    if recorded:
        require_same(directory, "data", recorded.get("data", {}), record["data"])
        require_same_model(directory, recorded.get("model", {}), record["model"])
    else:
        from quantlab.models.check import check_model

        check_model(m).raise_if_failed()
        directory.write_json(directory.spec_file, record)
    session.begin(spec.device)
    generate(directory, spec, m, text, progress, checkpoint_seconds, session.record)
    rows, outputs = finish_rows(
        directory.read_parts(),
        spec,
        asked,
        decode=text.decode,
        thinking=text.thinking,
        grader=_grade_mathematics,
        no_text=text.no_text,
    )
    expected = len(spec.arms) * len(asked) * spec.repetitions
    if rows.num_rows != expected:
        raise RunError(f"{rows.num_rows:,} generations where {expected:,} were expected")
    write_rows(directory, spec, rows, outputs)


def write_rows(directory: RunDirectory, spec: EvalSpec, rows: pa.Table, outputs: pa.Table) -> None:
    """Write what a run found, and its tables.

    Raises:
        RunError: the disk is full.
    """
    directory.write_table(directory.path / OUTPUTS_FILE, outputs)
    directory.write_table(directory.rows_file, rows)
    for file, table in (
        (directory.summary_file, summary_table(rows, margin=spec.margin)),
        (directory.path / "bins.csv", bins_table(rows, margin=spec.margin)),
    ):
        sink = pa.BufferOutputStream()
        pyarrow.csv.write_csv(table, sink)
        directory.write(file, sink.getvalue().to_pybytes())


def _grade_mathematics(pairs: Sequence[tuple[str, str]]) -> Sequence[str]:
    from quantlab.data.benchmarks.math_grader import MathGrader

    with MathGrader() as grader:
        return grader.grade(pairs)
