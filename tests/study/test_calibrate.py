"""Errors expected of a state that grows, against what is decoded."""

from dataclasses import replace

import pytest
import torch

from quantlab.recurrence import exact_scan
from quantlab.replay import WindowedScan, parse_policy
from quantlab.study.calibrate import Recording, estimate_layer
from tests.recurrence.sampling import sample_inputs

PROMPT, STEPS = 64, 1024


def growing():
    """Values with a mean, and gates that forget nothing: a state grows in proportion to time."""
    inputs = sample_inputs(
        "mamba2", rows=1, steps=PROMPT + STEPS, half_lives=(1e5, 1e6), heads=4, dv=64, dk=32,
        dtype=torch.float32, activation_dtype=torch.float32,
    )  # fmt: skip
    # keys and queries around a common direction, so that outputs grow with the state
    return replace(inputs, v=inputs.v + 1, k=inputs.k.abs(), q=inputs.q.abs())


@pytest.fixture(scope="module")
def grown():
    inputs = growing()
    _, state = exact_scan(inputs.slice(0, PROMPT))
    return Recording(state=state, inputs=inputs.slice(PROMPT, PROMPT + STEPS))


def test_relative_errors_of_a_growing_state_are_those_decoded(grown):
    # a window moves every element by many of FP16's steps, so that its errors keep their size
    policies = [parse_policy(t) for t in ("shared:fp16-sr", "fp8 / fp32")]
    found = estimate_layer(grown, policies, [64, 256, 1024], layer=0, seed=0, scan=WindowedScan)
    sizes = found.errors.states.sqrt()
    assert (sizes[-1] / sizes[0] > 10).all()
    # errors of stores that are taken as large as the last one come to half as much again
    ratio = found.here / found.decoded
    assert ((ratio.mean(1) - 1).abs() < 0.2).all()
    decoding = WindowedScan(policies, torch.tensor([0]), layer=0, seed=1)
    rows = torch.zeros(2, dtype=torch.int64)
    decoding.start(grown.state[rows], grown.inputs.rows(rows))
    right, _ = exact_scan(grown.inputs, grown.state)
    error = (decoding(grown.inputs.rows(rows)) - right).square().sum(-1)  # [2, T, H]
    size = right.square().sum(-1)
    for i, n in enumerate((64, 256, 1024)):
        window = slice(max(0, n - 256), n)
        decoded = error[:, window].sum(1) / size[:, window].sum(1)
        expected = found.kept[:, i] + found.fresh
        # a random walk of 4 heads' 64 value rows: its mean square is uncertain by a tenth
        assert ((expected / decoded).mean(1).log().abs() < 0.35).all(), n
