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

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from quantlab.data.benchmarks.extraction import Thinking, thinking_of
from quantlab.data.tasks import END_ID, Problem
from quantlab.data.tokenize import ByteTokenizer
from quantlab.errors import RunError, UsageError
from quantlab.metrics.accuracy_table import bins_table, summary_table
from quantlab.study.accuracy_rows import SCHEMA_VERSION, finish_rows, part_table
from quantlab.study.accuracy_spec import SPEC_VERSION, Asked, EvalSpec, ask, describe
from quantlab.study.progress import Progress, Silent
from quantlab.study.provenance import provenance
from quantlab.study.session import Interrupted, Session, require_same, require_same_model
from quantlab.study.store import RunDirectory, read_table, save_tensors

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
    text = _Text(m, asked)
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
    _generate(directory, spec, m, text, progress, checkpoint_seconds)
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


class _Text:
    """Prompts to ids and outputs to text, by the model's own tokenizer and chat template."""

    def __init__(self, m: Any, asked: Sequence[Asked]) -> None:
        import torch

        self.ids = [a.id for a in asked]
        tokenizer = m.tokenizer
        own: Any = ByteTokenizer()
        embedded = {isinstance(a.source, Problem) for a in asked}
        eos = _eos(m)
        self.thinking: Thinking | None = None
        self.no_text: tuple[int, ...] = ()
        byte_level = tokenizer is None or "byt5" in type(tokenizer).__name__.lower()
        byte_level = byte_level or isinstance(tokenizer, ByteTokenizer)
        if True in embedded and not byte_level:
            raise UsageError("embedded tasks are for byte-level models, such as the zoo's")
        if byte_level:
            if False in embedded:
                raise UsageError("public benchmarks need a model with a tokenizer of its own")
            self.name = own.name
            self.stop_ids = sorted({*eos, END_ID})
            self.no_text = (0, 2)
            self.prompts = [torch.from_numpy(own.encode(a.source.prompt)) for a in asked]
            self._decode: Callable[[Any], str] = own.decode
            return
        self.name = str(getattr(tokenizer, "name_or_path", type(tokenizer).__name__))
        self.stop_ids = sorted({*eos, tokenizer.eos_token_id} - {None})
        self.no_text = tuple(
            i for i in (tokenizer.unk_token_id, tokenizer.pad_token_id)
            if i is not None and i not in self.stop_ids
        )  # fmt: skip
        self.prompts = []
        template = getattr(tokenizer, "chat_template", None)
        for a in asked:
            prompt = a.source.prompt
            if template:
                prompt = tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}],
                    tokenize=False,
                    add_generation_prompt=True,
                )
                self.thinking = thinking_of(template, prompt)
            ids = tokenizer(prompt, add_special_tokens=not template)["input_ids"]
            self.prompts.append(torch.tensor(ids))
        self._decode = tokenizer.decode

    def decode(self, ids: npt.NDArray[np.int32]) -> str:
        """Text of output ids."""
        return self._decode(ids.astype(np.int64))


def _eos(m: Any) -> list[int]:
    """Stop ids of the model's generation settings, else of its configuration."""
    found = getattr(getattr(m.model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = m.model.config.get_text_config().eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def _generate(
    directory: RunDirectory,
    spec: EvalSpec,
    m: Any,
    text: _Text,
    progress: Progress,
    checkpoint_seconds: float,
) -> None:
    """Make every generation that is not on disk yet; a kill costs what came after the last save."""
    import torch

    from quantlab.engine.generation import Arm, Generation, GenerationRun, Job, Question
    from quantlab.engine.sampling import Sampling

    state, base = _restore(directory)
    files = _parts(directory)
    columns = ["arm", "asked", "repetition"]
    parts = [
        [Job(*row.values()) for row in read_table(path).select(columns).to_pylist()]
        for path in files
    ]
    made = [job for part in parts for job in part]
    run = GenerationRun(
        m,
        arms=[Arm(policy=policy, seed=seed) for _, policy, seed in spec.arms],
        questions=[
            Question(id=i, tokens=tokens) for i, tokens in zip(text.ids, text.prompts, strict=True)
        ],
        sampling=Sampling(
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            presence_penalty=spec.presence_penalty,
        ),
        budget=spec.budget,
        stop_ids=text.stop_ids,
        seed=spec.seed,
        rows=spec.rows,
        repetitions=spec.repetitions,
        # a state counts its jobs among those that its own session had to make
        skip=[job for part in parts[:base] for job in part] if state else made,
    )
    if state:
        run.load_state_dict(state)
    else:
        base = len(files)
    done = len(made)
    progress.start(len(spec.arms) * len(text.ids) * spec.repetitions, done)
    waiting: list[Generation] = []
    margins_of = [name for name, _, _ in spec.arms].index("reference")
    count = len(files)
    due = time.monotonic() + checkpoint_seconds

    def save() -> None:
        nonlocal waiting, count
        if waiting:
            path = directory.part_file(0, count, count)
            directory.write_table(path, part_table(waiting, margins_of=margins_of))
            waiting, count = [], count + 1

    def stepped() -> None:
        nonlocal due
        progress.advance(int(done + run.under_way))
        if time.monotonic() < due:
            return
        save()
        if run.worth_saving:
            tensors = run.state_dict() | {
                "study.parts": torch.tensor(count),
                "study.base": torch.tensor(base),
            }
            problem = save_tensors(directory.state_file(0), tensors)
            if problem:
                progress.note(f"the state could not be saved ({problem})")
        due = time.monotonic() + checkpoint_seconds

    for generation in run.run(stepped):
        waiting.append(generation)
        done += 1
    save()
    directory.state_file(0).unlink(missing_ok=True)


def _parts(directory: RunDirectory) -> list[Path]:
    return sorted(directory.parts.glob("batch-0000-*.parquet"))


def _restore(directory: RunDirectory) -> tuple[dict[str, Any], int]:
    """Read the engine state and the number of parts its session began with; drop later parts.

    Without a usable state, what is in the parts stays and the rest is made again.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    if directory.state_file(0).exists():
        # a state that a kill cut short
        with suppress(SafetensorError, OSError):
            tensors = load_file(directory.state_file(0))
    files = _parts(directory)
    if "study.parts" not in tensors or len(files) < int(tensors["study.parts"]):
        return {}, 0
    for path in files[int(tensors["study.parts"]) :]:
        path.unlink()
    base = int(tensors.pop("study.base"))
    tensors.pop("study.parts")
    return tensors, base
