"""Drive either engine over random op inputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from quantlab.recurrence import OpInputs
from quantlab.replay import Policy, StepwiseCache, WindowedScan
from tests.recurrence.sampling import relative

# FP64: the engines differ by the order of additions, some 1e-15 relative per window, also where
# states and records are rounded: a value lies that close to a rounding boundary with a probability
# of about 1e-9 per element, and none does for these seeds. 1e-10 leaves room for long runs.
FP64 = 1e-10
STREAMS = torch.tensor([3, 8])
PROMPT = 9

Engine = WindowedScan | StepwiseCache


def for_policies(inputs: OpInputs, count: int) -> OpInputs:
    """Repeat the streams' inputs for every policy."""
    return inputs.rows(torch.arange(inputs.n_rows).repeat(count))


def decode(
    engine: type[Engine],
    policies: Sequence[Policy],
    inputs: OpInputs,
    cuts: Sequence[int] = (PROMPT,),
    *,
    streams: torch.Tensor = STREAMS,
    seed: int = 7,
) -> tuple[torch.Tensor, Engine]:
    """Prefill with the steps before the first cut, then decode segment by segment."""
    scan = engine(policies, streams, layer=2, seed=seed)
    outputs = [scan.prefill(inputs.slice(0, cuts[0]))]
    for start, stop in pairwise([*cuts, inputs.steps]):
        outputs.append(scan(inputs.slice(start, stop)))
    return torch.cat(outputs, 1), scan


def compare(policies: Sequence[Policy], inputs: OpInputs, cuts: Sequence[int] = (PROMPT,)) -> None:
    """Assert that the windowed scan equals the stepwise cache, policy by policy."""
    n = inputs.n_rows
    inputs = for_policies(inputs, len(policies))
    o_ref, cache = decode(StepwiseCache, policies, inputs)
    o, scan = decode(WindowedScan, policies, inputs, cuts)
    for p, policy in enumerate(policies):
        rows = slice(n * p, n * p + n)
        assert relative(o[rows], o_ref[rows]) < FP64, policy
        assert relative(scan.state()[rows], cache.state()[rows]) < FP64, policy
    assert torch.equal(scan.diverged_at, cache.diverged_at)
