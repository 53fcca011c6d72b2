"""Rows of an accuracy study: one a generation.

While a run goes on its parts hold what was generated (`PART`). When all is there, outputs are
decoded, graded and compared with their FP32 counterparts: `rows.parquet` follows `SCHEMA`, sorted
by arm (in the spec's order), task, question and repetition. The outputs themselves are apart, in
`outputs.parquet` (`OUTPUTS`), those of one question and repetition side by side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quantlab.data.benchmarks.extraction import Thinking, final_text
from quantlab.data.ruler import RulerItem
from quantlab.data.tasks import Problem, extract
from quantlab.metrics.collapse import collapse
from quantlab.study.accuracy_spec import Asked, EvalSpec

if TYPE_CHECKING:
    from quantlab.engine.generation import Generation

SCHEMA_VERSION = "2"

PART = pa.schema(
    [
        pa.field("arm", pa.int32(), nullable=False),
        pa.field("asked", pa.int32(), nullable=False),
        pa.field("repetition", pa.int32(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("margins", pa.list_(pa.float32()), nullable=False),
        pa.field("finish", pa.string(), nullable=False),
        pa.field("stop_id", pa.int32()),
        pa.field("diverged_at", pa.int32(), nullable=False),
    ]
)


def _field(name: str, kind: pa.DataType, meaning: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"meaning": meaning})


SCHEMA = pa.schema(
    [
        _field("arm", pa.string(), "bins, reference, repeat (all FP32), or the policy"),
        _field("policy", pa.string(), "policy in its long form"),
        _field("task", pa.string(), "task"),
        _field("question", pa.int32(), "index within the task"),
        _field("repetition", pa.int32(), "of the question, from 0"),
        _field("length", pa.int32(), "output tokens, the stop token included"),
        _field("finish", pa.string(), "stop, budget (cut, counts as wrong) or diverged"),
        _field("stop_id", pa.int32(), "id that ended the output", nullable=True),
        _field("answer", pa.string(), "answer found in the output", nullable=True),
        _field("graded", pa.bool_(), "the answer is right, whatever the finish"),
        _field("verdict", pa.string(), "right, wrong, none, timeout or error"),
        _field("share", pa.float32(), "of the answers asked for that are in the output"),
        _field("correct", pa.bool_(), "right and finished by itself: what accuracy counts"),
        _field("collapse", pa.string(), "loop, run or no text at the end", nullable=True),
        _field("collapse_start", pa.int32(), "token where it begins", nullable=True),
        _field("left_at", pa.int32(), "token that first differs from FP32's", nullable=True),
        _field("left_margin", pa.float32(), "nats, FP32's margin there", nullable=True),
        _field("diverged_at", pa.int32(), "token whose stored state was not finite; -1: none"),
    ]
)

OUTPUTS = pa.schema(
    [
        _field("task", pa.string(), "task"),
        _field("question", pa.int32(), "index within the task"),
        _field("repetition", pa.int32(), "of the question, from 0"),
        _field("arm", pa.string(), "as in rows.parquet"),
        _field("tokens", pa.list_(pa.int32()), "output ids without the stop token"),
        _field("margins", pa.list_(pa.float32()), "reference only: nats to each runner-up"),
    ]
)

_LISTS = ("tokens", "margins")

# Grades (gold, answer) pairs of mathematics.
Grader = Callable[[Sequence[tuple[str, str]]], Sequence[str]]


def part_table(generations: Sequence[Generation], *, margins_of: int) -> pa.Table:
    """Rows of a part.

    Args:
        generations: what it holds.
        margins_of: the arm whose margins are kept, since others are measured against them.
    """
    jobs = [g.job for g in generations]
    margins = [g.margins if g.job.arm == margins_of else [] for g in generations]
    columns = [
        [job.arm for job in jobs],
        [job.question for job in jobs],
        [job.repetition for job in jobs],
        _lists([g.tokens for g in generations], pa.int32()),
        _lists(margins, pa.float32()),
        [g.finish for g in generations],
        [g.stop_id for g in generations],
        [g.diverged_at for g in generations],
    ]
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for column, field in zip(columns, PART, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=PART)


def _lists(values: Sequence[npt.ArrayLike], kind: pa.DataType) -> pa.ListArray:
    dtype = kind.to_pandas_dtype()
    arrays = [np.asarray(v, dtype) for v in values]
    offsets = np.cumsum([0, *map(len, arrays)]).astype(np.int32)
    flat = np.concatenate([np.empty(0, dtype), *arrays])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


@dataclass(frozen=True, slots=True)
class _Output:
    """One generation of a part."""

    arm: int
    asked: int
    repetition: int
    tokens: npt.NDArray[np.int32]
    margins: npt.NDArray[np.float32]
    finish: str
    stop_id: int | None
    diverged_at: int

    @property
    def whole(self) -> npt.NDArray[np.int32]:
        """Tokens with the stop token."""
        if self.stop_id is None:
            return self.tokens
        return np.append(self.tokens, np.int32(self.stop_id))

    @property
    def key(self) -> tuple[int, int]:
        """What it shares with its counterparts."""
        return self.asked, self.repetition


def _outputs(parts: Sequence[pa.Table]) -> list[_Output]:
    """Collect the generations of all parts by arm, question and repetition."""
    found = []
    for part in parts:
        for batch in part.to_batches():
            lists = [
                np.split(
                    array.flatten().to_numpy(),
                    array.offsets.to_numpy()[1:-1] - array.offsets[0].as_py(),
                )
                for array in (batch["tokens"], batch["margins"])
            ]
            plain = [batch[name].to_pylist() for name in PART.names if name not in _LISTS]
            arm, asked, repetition, finish, stop_id, diverged_at = plain
            found += [
                _Output(*row)
                for row in zip(
                    arm, asked, repetition, *lists, finish, stop_id, diverged_at, strict=True
                )
            ]
    return sorted(found, key=lambda g: (g.arm, g.asked, g.repetition))


def first_difference(reference: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int | None:
    """Index of the first token that differs, ends included; None for equal outputs."""
    shared = min(len(reference), len(other))
    differ = np.flatnonzero(reference[:shared] != other[:shared])
    if len(differ):
        return int(differ[0])
    return None if len(reference) == len(other) else shared


def finish_rows(
    parts: Sequence[pa.Table],
    spec: EvalSpec,
    asked: Sequence[Asked],
    *,
    decode: Callable[[npt.NDArray[np.int32]], str],
    thinking: Thinking | None,
    grader: Grader,
    no_text: Sequence[int] = (),
) -> tuple[pa.Table, pa.Table]:
    """Decode, grade and compare all generations of a run.

    Args:
        parts: what was generated.
        spec: the study.
        asked: its questions.
        decode: ids to text.
        thinking: of the model's chat template.
        grader: of mathematics.
        no_text: ids that stand for no text.

    Returns:
        Rows of `SCHEMA` and of `OUTPUTS`.
    """
    outputs = _outputs(parts)
    arms = spec.arms
    reference = {g.key: g for g in outputs if arms[g.arm][0] == "reference"}
    found: list[dict[str, Any]] = []
    answers = []
    for g in outputs:
        question = asked[g.asked]
        answer, verdict, share = _graded(decode(g.tokens), question, thinking)
        answers.append(answer)
        name, policy, _ = arms[g.arm]
        broken = collapse(g.tokens, no_text)
        left_at, left_margin = _left(reference.get(g.key), g)
        found.append(
            {
                "arm": name,
                "policy": str(policy),
                "task": question.task,
                "question": question.question,
                "repetition": g.repetition,
                "length": len(g.whole),
                "finish": g.finish,
                "stop_id": g.stop_id,
                "answer": answer,
                "verdict": verdict,
                "share": share,
                "collapse": None if broken is None else broken.kind,
                "collapse_start": None if broken is None else broken.start,
                "left_at": left_at,
                "left_margin": left_margin,
                "diverged_at": g.diverged_at,
            }
        )
    open_cases = [i for i, row in enumerate(found) if row["verdict"] is None]
    pairs = [(asked[outputs[i].asked].gold, str(answers[i])) for i in open_cases]
    for i, verdict in zip(open_cases, grader(pairs) if pairs else [], strict=True):
        found[i]["verdict"] = verdict
    for row in found:
        row["graded"] = row["verdict"] == "right"
        if row["share"] is None:
            row["share"] = float(row["graded"])
        row["correct"] = row["graded"] and row["finish"] == "stop"
    metadata = {"quantlab.schema": SCHEMA_VERSION, "quantlab.spec": json.dumps(spec.to_json())}
    rows = pa.Table.from_pylist(found, schema=SCHEMA.with_metadata(metadata))
    return rows, _outputs_table(outputs, spec, asked).replace_schema_metadata(metadata)


def _outputs_table(outputs: Sequence[_Output], spec: EvalSpec, asked: Sequence[Asked]) -> pa.Table:
    names = [name for name, _, _ in spec.arms]
    beside = sorted(outputs, key=lambda g: (g.asked, g.repetition, g.arm))
    arrays = [
        pa.array([asked[g.asked].task for g in beside], pa.string()),
        pa.array([asked[g.asked].question for g in beside], pa.int32()),
        pa.array([g.repetition for g in beside], pa.int32()),
        pa.array([names[g.arm] for g in beside], pa.string()),
        _lists([g.tokens for g in beside], pa.int32()),
        _lists([g.margins for g in beside], pa.float32()),
    ]
    return pa.Table.from_arrays(arrays, schema=OUTPUTS)


def _graded(
    text: str, question: Asked, thinking: Thinking | None
) -> tuple[str | None, str | None, float | None]:
    """(answer, verdict, share) of an output.

    A verdict of None is mathematics, to be graded; a share of None is that of the verdict.
    """
    source = question.source
    if isinstance(source, Problem):
        answer = extract(text)
    else:
        final = final_text(text, thinking)
        if isinstance(source, RulerItem):
            found = source.found(final or "")
            share = source.share(found)
            verdict = "right" if share == 1 else "wrong" if found else "none"
            return ", ".join(found) or None, verdict, share
        answer = None if final is None else source.extract(final)
        if answer is not None and not source.options:
            return answer, None, None
    if answer is None:
        return None, "none", None
    return answer, "right" if answer == question.gold else "wrong", None


def _left(reference: _Output | None, g: _Output) -> tuple[int | None, float | None]:
    """Where an output leaves its counterpart, and the counterpart's margin there."""
    at = None if reference is None else first_difference(reference.whole, g.whole)
    if reference is None or at is None:
        return None, None
    return at, float(reference.margins[at]) if at < len(reference.margins) else float("nan")
