"""Before an accuracy study: what it would generate, for how long, and the budget FP32 needs."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from quantlab.errors import UsageError
from quantlab.study.accuracy_generate import generation_run
from quantlab.study.accuracy_spec import EvalSpec, ask, expected_tokens
from quantlab.study.accuracy_text import Texts

if TYPE_CHECKING:
    from quantlab.models import LoadedModel

PILOT_QUESTIONS = 64
"""Questions of each task that a pilot asks."""
PERCENTILE = 99.0
ROUND_TO = 64
"""A budget is a multiple of this."""
TRIAL_LOOKS = 6
"""Looks at the rows that a trial waits for; the first two warm up."""


def find_budget(spec: EvalSpec, *, model: LoadedModel | None = None) -> int:
    """Find the 99th percentile of the lengths at which FP32 finishes.

    A pilot: the reference arm alone, on the first questions of each task, with sampling noise that
    no arm of the study has. Outputs that reach the spec's budget count as that long.

    Args:
        spec: the study; its budget is the most that is tried.
        model: a loaded model instead of the one the spec names.

    Returns:
        Tokens, a multiple of 64, at most the spec's budget.

    Raises:
        UsageError: fewer than half of the pilot's outputs finish within the spec's budget.
    """
    limit = PILOT_QUESTIONS if spec.limit is None else min(spec.limit, PILOT_QUESTIONS)
    pilot = replace(spec, limit=limit, repetitions=1, policies=(), seed=spec.seed + 2)
    m = _model(spec, model)
    run = generation_run(pilot, m, Texts(m, ask(pilot), pilot.room), arms=[1])
    found = list(run.run())
    finished = sum(g.finish == "stop" for g in found)
    if 2 * finished < len(found):
        raise UsageError(
            f"--budget auto: of {len(found)} outputs of FP32 {finished} finish within "
            f"{spec.budget:,} tokens; give a number"
        )
    lengths = np.array([g.length for g in found])
    # no output between two of the pilot's: the longer one
    budget = float(np.percentile(lengths, PERCENTILE, method="higher"))
    return min(spec.budget, math.ceil(budget / ROUND_TO) * ROUND_TO)


def plan_eval(spec: EvalSpec, *, model: LoadedModel | None = None) -> dict[str, Any]:
    """Say what a study would generate, and for how long, from a few steps of it.

    Returns:
        What would run, by readable names. `seconds` takes every output of an embedded problem for
        as long as its worked solution and every other one for half its budget.

    Raises:
        QuantlabError: whatever the study itself would refuse.
    """
    asked = ask(spec)
    m = _model(spec, model)
    text = Texts(m, asked, spec.room)
    asked = text.asked
    arms = len(spec.arms)
    generations = arms * len(asked) * spec.repetitions
    tokens = arms * spec.repetitions * sum(expected_tokens(a, spec) for a in asked)
    step, rows = _trial(spec, m, text)
    return {
        "arms": f"{arms}: FP32 three times, {len(spec.policies)} policies",
        "questions": ", ".join(
            f"{task} {sum(a.task == task for a in asked):,}" for task in spec.tasks
        ),
        "generations": generations,
        "tokens": tokens,
        "budget": spec.budget,
        "rows_of_a_forward": spec.rows,
        "device": spec.device,
        "tokens_per_second": round(rows / step, 1),
        "seconds": round(tokens / rows * step, 1),
    }


def _trial(spec: EvalSpec, m: LoadedModel, text: Texts) -> tuple[float, int]:
    """Seconds of a step, and how many rows are busy in it."""
    run = generation_run(spec, m, text)
    marks: list[tuple[int, float]] = []

    class Enough(Exception):
        pass

    def look() -> None:
        # the tokens have been read, so the steps before are over
        marks.append((run.steps, time.monotonic()))
        if len(marks) == TRIAL_LOOKS:
            raise Enough

    try:
        for _ in islice(run.run(look), None):
            pass
    except Enough:
        pass
    (first, begun), (last, ended) = marks[min(2, len(marks) - 1)], marks[-1]
    steps = max(1, last - first)
    return (ended - begun) / steps, min(spec.rows, len(run.jobs))


def _model(spec: EvalSpec, model: LoadedModel | None) -> LoadedModel:
    if model is not None:
        return model
    from quantlab.models import load_model

    return load_model(spec.model, device=spec.device, dtype=spec.dtype)
