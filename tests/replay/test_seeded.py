"""Policies with seeds of their own draw as a study with that seed does, in one batch."""

import pytest
import torch

from quantlab.replay import StepwiseCache, WindowedScan, parse_policy
from quantlab.replay.policy import PolicyError
from quantlab.replay.seeded import SeededScan, by_seed
from tests.recurrence.sampling import sample_inputs

STREAMS = torch.tensor([3, 7])
TEXTS = (
    "conventional",
    "shared:fp8-sr seed=5",
    "shared:fp8",
    "shared:fp8-sr",
    "fp8/fp16-sr seed=5",
)


def inputs_of(policies, steps=40):
    one = sample_inputs("gdn", steps=steps, dtype=torch.float32)
    return one.rows(torch.arange(2).repeat(len(policies)))


@pytest.mark.parametrize("scan", [WindowedScan, StepwiseCache])
def test_every_policy_draws_by_its_own_seed(scan):
    policies = [parse_policy(text) for text in TEXTS]
    inputs = inputs_of(policies)
    mixed = by_seed(scan)(policies, STREAMS, layer=1, seed=0)
    assert isinstance(mixed, SeededScan)
    first, then = inputs.slice(0, 7), inputs.slice(7, 40)
    outputs = torch.cat([mixed.prefill(first), mixed(then)], 1)
    for p, policy in enumerate(policies):
        rows = slice(2 * p, 2 * p + 2)
        alone = scan([policy], STREAMS, layer=1, seed=0 if policy.seed is None else policy.seed)
        expected = torch.cat([alone.prefill(first.rows(rows)), alone(then.rows(rows))], 1)
        assert torch.equal(outputs[rows], expected), policy
        assert torch.equal(mixed.state()[rows], alone.state())
    # the same policy under another seed is another run
    assert not torch.equal(outputs[2:4], outputs[6:8])


def test_state_round_trip_and_divergence():
    policies = [parse_policy(text) for text in TEXTS]
    inputs = inputs_of(policies)
    whole, half = (by_seed(WindowedScan)(policies, STREAMS, layer=0, seed=0) for _ in range(2))
    whole.prefill(inputs.slice(0, 4))
    half.prefill(inputs.slice(0, 4))
    whole(inputs.slice(4, 20))
    saved = whole.state_dict()
    half.load_state_dict(saved)
    assert torch.equal(whole(inputs.slice(20, 40)), half(inputs.slice(20, 40)))
    assert (whole.diverged_at == -1).all() and whole.diverged_at.shape == (10,)


def test_one_seed_needs_no_composite():
    policies = [parse_policy("conventional"), parse_policy("shared:fp8-sr seed=9")]
    alone = by_seed(WindowedScan)(policies, STREAMS, layer=0, seed=0)
    assert type(alone) is WindowedScan and alone.seed == 9
    assert by_seed(WindowedScan).__name__ == "WindowedScan"


def test_seed_in_the_text_of_a_policy():
    policy = parse_policy("nvfp4 / fp16-sr L=4 seed=18446744073709551615")
    assert policy.seed == 2**64 - 1 and parse_policy(str(policy)) == policy
    assert policy.short.endswith("seed=18446744073709551615")
    for text, message in (
        ("shared:fp8 seed=1", "nothing of shared fp8"),
        ("shared:fp8-sr seed=x", "not a whole number"),
        ("shared:fp8-sr seed=18446744073709551616", "2\\^64"),
    ):
        with pytest.raises(PolicyError, match=message):
            parse_policy(text)
