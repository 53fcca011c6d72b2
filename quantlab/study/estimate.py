"""What a study would do, take and cost, before it runs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantlab.metrics.positions import measured_positions
from quantlab.study.backend import Backend
from quantlab.study.run import open_streams
from quantlab.study.spec import KlSpec

if TYPE_CHECKING:
    from torch import Tensor

    from quantlab.engine import Plan
    from quantlab.models import LoadedModel

# The trial on a CPU: long enough that windows, not the forward's fixed cost, decide.
TRIAL_PROMPT = 64
TRIAL_SEGMENT = 128


def estimate(spec: KlSpec, backend: Backend | None = None) -> dict[str, Any]:
    """Plan a study and time a small piece of it.

    Args:
        spec: the study.
        backend: models and engine.

    Returns:
        What would run, by readable names; `seconds` is the time of the whole, from a trial of
        two short segments with all rows of a batch. Attention's growth with N is left out.

    Raises:
        QuantlabError: whatever the study itself would refuse.
    """
    backend = backend or Backend()
    m, streams = open_streams(spec, backend)
    plan = backend.plan(m, spec, len(streams.streams))
    positions = measured_positions(spec.tokens)
    batches = len(plan.stream_batches)
    return {
        "cells": f"{len(spec.policies) + 1} policies (the reference included) × "
        f"{len(streams.streams)} streams in {batches} batch{'es' if batches != 1 else ''}",
        "rows_in_a_batch": plan.rows,
        "segment": plan.segment,
        "memory": f"{plan.bytes / 2**30:.2f} GiB beside the weights",
        "measured_positions": len(positions),
        "rows_of_results": len(positions) * len(spec.policies) * len(streams.streams),
        "device": spec.device,
        "seconds": round(trial(m, spec, plan, streams.tokens, backend), 3),
    }


def trial(m: LoadedModel, spec: KlSpec, plan: Plan, tokens: Tensor, backend: Backend) -> float:
    """Seconds of the whole study, from two segments of the largest batch."""
    from quantlab.models.load import quiet_transformers

    batch = max(plan.stream_batches, key=len)
    segment = plan.segment
    if spec.device == "cpu" and spec.engine == "windowed":
        segment = min(segment, TRIAL_SEGMENT)
    last = min(2 * segment, spec.tokens)
    prompt = min(TRIAL_PROMPT, spec.prompt)
    short = replace(spec, prompt=prompt, tokens=last)
    forcing = backend.forcing(
        m,
        short,
        tokens[batch][:, : prompt + last + 1],
        streams=batch,
        positions=[last],
        segment=segment,
    )
    marks = [(0, time.monotonic())]
    with quiet_transformers():
        for _ in forcing.run(lambda done, _: marks.append((done, time.monotonic()))):
            pass
    # the first segment also pays for the prompt and for warming up
    (begin, since), (end, until) = marks[-2:]
    rate = (end - begin) / (until - since)
    return len(plan.stream_batches) * (spec.prompt + spec.tokens) / rate
