"""A watched Triton scan sees what a watched torch scan sees, cuts in open windows included.

Oracle: `ObservedScan` over the torch reference, whose own oracles are in tests/analysis.
"""

from __future__ import annotations

import pytest
import torch

from quantlab.analysis.observations import SERIES
from quantlab.analysis.observer import ObservedScan
from quantlab.recurrence import OpInputs
from quantlab.replay import WindowedScan, parse_policy
from quantlab.replay.seeded import by_seed
from tests.kernels.device import DEVICE, MARKS
from tests.recurrence.sampling import sample_inputs

from quantlab_kernels.triton_scan import TritonScan  # isort: skip

pytestmark = MARKS

TEXTS = (
    "conventional", "conventional:int6@row", "shared:nvfp4-sr L=8", "shared:int8@row-sr L=8 seed=5",
    "nvfp4 / fp16-sr L=4",
)  # fmt: skip
POLICIES = [parse_policy(text) for text in TEXTS]
STREAMS = torch.tensor([7])
PROMPT, STRIDE, STEPS = 5, 8, 16
# Two FP32 scans of 21 steps agree to 1e-6 of a state but for elements that lie at a rounding
# boundary, a share of 1e-3 at most (test_scan.FLIPS), each off by one step where an error of a
# write is a third of a step: 1e-2 of a mean square. Mutant: the other copy read changes all of it.
SEEN = 0.02


def watched(scan: object, inputs: OpInputs, device: str) -> ObservedScan:
    inputs = inputs._map(lambda x: x.to(device))
    found = ObservedScan(
        POLICIES, STREAMS.to(device), layer=1, seed=3, inner=by_seed(scan), stride=STRIDE
    )
    found.prefill(inputs.slice(0, PROMPT))
    found(inputs.slice(PROMPT, PROMPT + 11))  # ends inside a window
    found(inputs.slice(PROMPT + 11, PROMPT + STEPS))
    return found


@pytest.mark.parametrize("kind", ["gdn"])
def test_triton_and_torch_are_seen_alike(kind: str) -> None:
    one = sample_inputs(
        kind, rows=1, steps=PROMPT + STEPS, heads=2, key_heads=1, dv=16, dk=16,
        dtype=torch.float32,
    )  # fmt: skip
    inputs = one.rows(torch.zeros(len(POLICIES), dtype=torch.int64))
    ours, reference = watched(TritonScan, inputs, DEVICE), watched(WindowedScan, inputs, "cpu")
    assert ours.seen is not None and reference.seen is not None
    assert ours.seen.positions == reference.seen.positions == [8, 16]
    for name in SERIES:
        a, b = (x.seen.series[name].tensor().cpu() for x in (ours, reference))
        # the FP32 rows' own errors are the two orders of additions, nothing else
        a, b = a[:, 1:], b[:, 1:]
        size = b.abs()
        if name == "write_mean":  # of either sign: against the size of what is averaged
            size = reference.seen.series["write"].tensor()[:, 1:].sqrt()
        assert ((a - b).abs() <= SEEN * size).all(), name
    for name, counts in ours.seen.ranges.items():
        a, b = counts.tensor().cpu(), reference.seen.ranges[name].tensor()
        assert (a - b).abs().max() <= SEEN * 2 * 16 * 16, name
    for a, b in zip(ours.copies(), reference.copies(), strict=True):
        off = (a.cpu() - b).abs() > 1e-5 * torch.maximum(a.cpu().abs(), b.abs())
        assert off.float().mean() < SEEN
