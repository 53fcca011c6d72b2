"""What an unfinished accuracy study has of whole questions, as a run of its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quantlab.data.tasks import Problem
from quantlab.data.tokenize import ByteTokenizer
from quantlab.engine.generation import question_order
from quantlab.errors import UsageError
from quantlab.study.accuracy import EvalResult, load_eval, write_rows
from quantlab.study.accuracy_rows import finish_rows
from quantlab.study.accuracy_spec import EvalSpec, ask, describe
from quantlab.study.session import require_same
from quantlab.study.store import RunDirectory


def cut_eval(path: Path, out: Path) -> EvalResult:
    """Take the first questions of an unfinished run, up to the first that lacks a generation.

    Questions are asked in an order that is fixed before anything is generated, those with the
    longest prompts first. So none is kept or left out for what was written. The run itself stays
    as it is and can be gone on with.

    Args:
        path: the unfinished run, of embedded tasks.
        out: directory of the new run.

    Raises:
        UsageError: there is no such run, it is finished, or not even its first question is whole.
    """
    source, target = RunDirectory(path), RunDirectory(out)
    record = source.read_json(source.spec_file)
    if record.get("study") != "eval":
        raise UsageError(f"{path} holds no run of eval")
    if source.finished:
        raise UsageError(f"{path} is finished: there is nothing to cut")
    spec = EvalSpec.from_json(record["spec"])
    asked = ask(spec)
    if not all(isinstance(a.source, Problem) for a in asked):
        raise UsageError("only runs of embedded tasks can be cut: others need the model to be read")
    require_same(source, "data", record["data"], describe(asked))
    parts = source.read_parts()
    made = Counter(q for part in parts for q in part["asked"].to_pylist())
    own = ByteTokenizer()
    order = question_order([len(own.encode(a.source.prompt)) for a in asked])
    kept: list[int] = []
    for question in order:
        if made[question] < len(spec.arms) * spec.repetitions:
            break
        kept.append(question)
    if not kept:
        raise UsageError(f"{path}: not even the first question has all of its generations")
    inside = pa.array(kept, pa.int32())
    rows, outputs = finish_rows(
        [part.filter(pc.is_in(part["asked"], inside)) for part in parts],
        spec,
        asked,
        decode=lambda ids: own.decode(ids.astype(np.int64)),
        thinking=None,
        grader=lambda pairs: ["error"] * len(pairs),
    )
    target.prepare(resume=False)
    cut = {"questions": len(kept), "of": len(asked)}
    target.write_json(target.spec_file, record | {"cut": cut})
    target.write_json(target.run_file, source.read_json(source.run_file) | {"state": "cut"})
    write_rows(target, spec, rows, outputs)
    target.drop_parts()
    return load_eval(out)
