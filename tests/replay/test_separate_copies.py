"""Proof 2: read error never enters the recurrence copy, unless cached corrections are folded.

For fixed op inputs. In a model it holds for the first recurrent layer only: later layers' inputs
feel the read error.
"""

from __future__ import annotations

import pytest
import torch

from quantlab.replay import StepwiseCache, WindowedScan, parse_policy
from tests.recurrence.sampling import KINDS, sample_inputs
from tests.replay.decoding import PROMPT, Engine, decode, for_policies

READS = ("fp32", "fp16", "fp8", "nvfp4", "nvfp4-sr")
STEPS = PROMPT + 16 * 5 + 3


@pytest.mark.parametrize("engine", [WindowedScan, StepwiseCache])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("records", ["bf16", "fp32"])
@pytest.mark.parametrize("corrections", ["rederive", "fold"])
def test_recurrence_copy_is_bit_identical_across_read_formats(
    engine: type[Engine], kind: str, records: str, corrections: str
) -> None:
    texts = [f"{fmt} / fp16-sr" for fmt in READS]
    policies = [
        parse_policy(f"{text} records={records} corrections={corrections}") for text in texts
    ]
    inputs = sample_inputs(kind, steps=STEPS, dv=32, dk=128, dtype=torch.float32)
    o, scan = decode(engine, policies, for_policies(inputs, len(policies)), [PROMPT, 40])
    state = scan.state().unflatten(0, (len(policies), 2))
    o = o.unflatten(0, (len(policies), 2))
    for p in range(1, len(policies)):
        same = torch.equal(state[p], state[0])
        assert same == (corrections == "rederive" or kind == "mamba2"), policies[p].short
        assert not torch.equal(o[p], o[0])


def test_shared_copy_equals_the_recurrence_copy_of_a_pair() -> None:
    # What is stored for the recurrence does not depend on whether a read copy lies beside it.
    policies = [parse_policy("shared:fp8-sr"), parse_policy("nvfp4 / fp8-sr")]
    inputs = sample_inputs("gdn", steps=STEPS)
    _, scan = decode(WindowedScan, policies, for_policies(inputs, 2))
    assert torch.allclose(scan.state()[:2], scan.state()[2:], rtol=1e-12, atol=0)


@pytest.mark.parametrize("engine", [WindowedScan, StepwiseCache])
def test_steps_before_the_flush_read_the_read_copy(engine: type[Engine]) -> None:
    # The recurrence copy of the windows is FP64; all error comes from reading FP8.
    policies = [parse_policy("fp8 / fp64 L=8"), parse_policy("shared:fp64 L=8")]
    inputs = sample_inputs("gdn", steps=PROMPT + 24, half_lives=(500.0, 2000.0))
    o, _ = decode(engine, policies, for_policies(inputs, 2))
    error = (o[:2] - o[2:]).abs().amax((0, 2, 3))[PROMPT:].view(-1, 8)
    assert (error[:, :-1] > 1e-6).all()
    assert (error[:, -1] < 1e-12).all()  # the flush step's output comes from the recurrence copy
