"""Teacher forcing by the decoder measures what the stepwise engine measures, interrupted or not."""

import pytest
import torch

from quantlab.engine import DecodedForcing, TeacherForcing, decoded_forcing
from quantlab.replay import parse_policy
from tests.models.tiny import VOCAB, tiny

PROMPT, LAST = 5, 20
POLICIES = [parse_policy(p) for p in ("shared:nvfp4-sr L=4", "shared:fp16 L=3")]
SMALL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
ARGUMENTS = {
    "policies": POLICIES, "stream_ids": [6, 2], "positions": [1, 2, 9, 20], "prompt": PROMPT,
    "seed": 7,
}  # fmt: skip


def tokens(length=PROMPT + LAST + 1):
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(5))


def test_the_same_measurements_as_the_oracle(monkeypatch):
    monkeypatch.setattr(decoded_forcing, "STRIDE", 8)
    m = tiny("qwen3_5", dtype=torch.float64, **SMALL)
    oracle = TeacherForcing(m, tokens(), **ARGUMENTS, segment=1, engine="stepwise")
    want = {int(p): (x.logits[:, :, i], x.targets[:, i]) for x in oracle.run()
            for i, p in enumerate(x.positions)}  # fmt: skip
    saved, seen = {}, []

    def save(done, last):
        seen.append((done, last))
        if done == 8:
            saved.update(run.state_dict())

    run = DecodedForcing(m, tokens(), **ARGUMENTS)
    got = list(run.run(save))
    assert [x.positions.tolist() for x in got] == [[1, 2], [9], [20]]
    assert seen == [(8, 20), (16, 20), (20, 20)]
    for x in got:
        for i, p in enumerate(x.positions.tolist()):
            logits, targets = want[p]
            assert (x.logits[:, :, i] - logits).abs().max() < 1e-9
            assert torch.equal(x.targets[:, i], targets)
            assert (x.diverged_at == -1).all()
    again = DecodedForcing(m, tokens(), **ARGUMENTS)
    again.load_state_dict(saved)
    for x, y in zip(again.run(), got[1:], strict=True):
        assert torch.equal(x.logits, y.logits) and torch.equal(x.positions, y.positions)


def test_positions_and_tokens_are_checked():
    m = tiny("qwen3_5", **SMALL)
    with pytest.raises(ValueError, match="positions count from 1"):
        DecodedForcing(m, tokens(), **{**ARGUMENTS, "positions": [0, 3]})
    with pytest.raises(ValueError, match="prompt 5 and N 20 need 26"):
        DecodedForcing(m, tokens(25), **ARGUMENTS)
