"""Rows of an accuracy study: one a generation.

While a run goes on its parts hold what was generated (`PART`). When all is there, outputs are
decoded, graded and compared with their FP32 counterparts: `rows.parquet` follows `SCHEMA`, sorted
by arm (in the spec's order), task, question and repetition.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quantlab.data.benchmarks.extraction import Thinking, final_text
from quantlab.data.tasks import Problem, extract
from quantlab.metrics.collapse import collapse
from quantlab.study.accuracy_spec import Asked, EvalSpec

if TYPE_CHECKING:
    from quantlab.engine.generation import Generation

SCHEMA_VERSION = "1"

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
        _field("correct", pa.bool_(), "right and finished by itself: what accuracy counts"),
        _field("collapse", pa.string(), "loop, run or no text at the end", nullable=True),
        _field("collapse_start", pa.int32(), "token where it begins", nullable=True),
        _field("left_at", pa.int32(), "token that first differs from FP32's", nullable=True),
        _field("left_margin", pa.float32(), "nats, FP32's margin there", nullable=True),
        _field("diverged_at", pa.int32(), "token whose stored state was not finite; -1: none"),
        _field("tokens", pa.list_(pa.int32()), "output ids without the stop token"),
        _field("margins", pa.list_(pa.float32()), "nats to the runner-up, token by token"),
    ]
)

# Grades (gold, answer) pairs of mathematics.
Grader = Callable[[Sequence[tuple[str, str]]], Sequence[str]]


def part_table(generations: Sequence[Generation]) -> pa.Table:
    """Rows of a part."""
    return pa.Table.from_pylist(
        [
            {
                "arm": g.job.arm,
                "asked": g.job.question,
                "repetition": g.job.repetition,
                "tokens": g.tokens,
                "margins": g.margins,
                "finish": g.finish,
                "stop_id": g.stop_id,
                "diverged_at": g.diverged_at,
            }
            for g in generations
        ],
        schema=PART,
    )


def finish_rows(
    parts: Sequence[pa.Table],
    spec: EvalSpec,
    asked: Sequence[Asked],
    *,
    decode: Callable[[list[int]], str],
    thinking: Thinking | None,
    grader: Grader,
    no_text: Sequence[int] = (),
) -> pa.Table:
    """Decode, grade and compare all generations of a run.

    Args:
        parts: what was generated.
        spec: the study.
        asked: its questions.
        decode: ids to text.
        thinking: of the model's chat template.
        grader: of mathematics.
        no_text: ids that stand for no text.
    """
    raw = pa.concat_tables(parts).to_pylist() if parts else []
    raw.sort(key=lambda g: (g["arm"], g["asked"], g["repetition"]))
    arms = spec.arms
    reference = {(g["asked"], g["repetition"]): g for g in raw if arms[g["arm"]][0] == "reference"}
    found, answers = [], []
    for g in raw:
        question = asked[g["asked"]]
        answer, verdict = _graded(decode(g["tokens"]), question, thinking)
        answers.append(answer)
        name, policy, _ = arms[g["arm"]]
        broken = collapse(g["tokens"], no_text)
        left = _left(reference.get((g["asked"], g["repetition"])), g)
        found.append(
            {
                "arm": name,
                "policy": str(policy),
                "task": question.task,
                "question": question.question,
                "length": len(g["tokens"]) + (g["stop_id"] is not None),
                "answer": answer,
                "verdict": verdict,
                "collapse": None if broken is None else broken.kind,
                "collapse_start": None if broken is None else broken.start,
                "left_at": None if left is None else left[0],
                "left_margin": None if left is None else left[1],
                **{
                    key: g[key]
                    for key in (
                        "repetition", "finish", "stop_id", "diverged_at", "tokens", "margins",
                    )
                },
            }
        )  # fmt: skip
    open_cases = [i for i, row in enumerate(found) if row["verdict"] is None]
    pairs = [(asked[raw[i]["asked"]].gold, str(answers[i])) for i in open_cases]
    for i, verdict in zip(open_cases, grader(pairs) if pairs else [], strict=True):
        found[i]["verdict"] = verdict
    for row in found:
        row["graded"] = row["verdict"] == "right"
        row["correct"] = row["graded"] and row["finish"] == "stop"
    metadata = {"quantlab.schema": SCHEMA_VERSION, "quantlab.spec": json.dumps(spec.to_json())}
    return pa.Table.from_pylist(found, schema=SCHEMA.with_metadata(metadata))


def _graded(text: str, question: Asked, thinking: Thinking | None) -> tuple[str | None, str | None]:
    """(answer, verdict) of an output; a verdict of None is mathematics, to be graded."""
    source = question.source
    if isinstance(source, Problem):
        answer = extract(text)
    else:
        final = final_text(text, thinking)
        answer = None if final is None else source.extract(final)
        if answer is not None and not source.options:
            return answer, None
    if answer is None:
        return None, "none"
    return answer, "right" if answer == question.gold else "wrong"


def _left(reference: dict[str, Any] | None, g: dict[str, Any]) -> tuple[int, float] | None:
    from quantlab.engine.generation import Generation, Job, first_divergence

    if reference is None:
        return None
    one, two = (
        Generation(job=Job(0, 0, 0), tokens=x["tokens"], margins=x["margins"], stop_id=x["stop_id"])
        for x in (reference, g)
    )
    return first_divergence(one, two)
