"""The decoder: the stepwise engine's logits, rows started and replaced at any time.

Compared with teacher forcing by `StepwiseCache`, which shares no code with the decoder. The same on
the decode kernels: tests/kernels/test_decode_states.py.
"""

import pytest
import torch

from quantlab.engine import TeacherForcing, fixed_cache
from quantlab.engine.decoder import Decoder, prefill
from quantlab.engine.prompt import gathered
from quantlab.replay import parse_policy
from tests.models.tiny import VOCAB, tiny

PROMPT = 7
SMALL = {
    "qwen3_5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {"hybrid_override_pattern": "M*"},
    "falcon_h1": {"num_hidden_layers": 1},
}
FP32 = "conventional:fp32"
# In FP64, of logits up to 4: sums in another order. Mutants: records left unrounded 1e-3, the wrong
# copy 1e-2.
CLOSE = 1e-9


def tokens(streams, length):
    return torch.randint(VOCAB, (streams, length), generator=torch.Generator().manual_seed(3))


def forced(m, ids, policies, streams, prompt=PROMPT, last=None):
    """[policies, streams, n, V] logits of the oracle, without its reference."""
    last = ids.shape[1] - prompt - 1 if last is None else last
    run = TeacherForcing(
        m, ids, policies=policies, stream_ids=streams, positions=range(1, last + 1),
        prompt=prompt, segment=1, seed=5, engine="stepwise",
    )  # fmt: skip
    return torch.cat([part.logits for part in run.run()], 2)[1:]


def decoded(decoder, ids, steps, start=PROMPT):
    """[rows, steps, V] of rows that are fed columns of ids [rows, ..]."""
    return torch.stack([decoder.step(ids[:, start + t]).clone() for t in range(steps)], 1)


@pytest.mark.parametrize("family", list(SMALL))
def test_rows_of_several_policies_are_the_stepwise_engines(family):
    m = tiny(family, dtype=torch.float64, **SMALL[family])
    policies = [parse_policy(p) for p in (FP32, "nvfp4 / fp16-sr L=4", "shared:fp8-sr L=3 seed=9")]
    ids = tokens(2, PROMPT + 12)
    want = forced(m, ids, policies, [4, 8])
    decoder = Decoder(m, policies, rows=7, capacity=64, seed=5)
    order = [(p, s) for s in (1, 0) for p in (2, 0, 1)]
    decoder.start(
        range(1, 7), prefill(m, ids[:, :PROMPT]), of=[s for _, s in order],
        policies=[p for p, _ in order], streams=[(4, 8)[s] for _, s in order],
    )  # fmt: skip
    fed = torch.cat([ids[:1], *(ids[s : s + 1] for _, s in order)])
    got = decoded(decoder, fed, 11)
    for row, (p, s) in enumerate(order, 1):
        assert (got[row] - want[p, s]).abs().max() < CLOSE, (p, s)
    # rounding is there to be seen
    assert (want[1] - want[0]).abs().max() > 1e-3
    assert decoder.lengths.tolist() == [0] + [PROMPT + 11] * 6


def test_a_replaced_row_is_a_fresh_one(monkeypatch):
    monkeypatch.setattr(fixed_cache, "BLOCK", 8)
    m = tiny("qwen3_5", dtype=torch.float64, **SMALL["qwen3_5"])
    policies = [parse_policy("shared:nvfp4-sr L=4"), parse_policy("fp8 / fp16-sr L=3")]
    ids = tokens(3, 26)
    want = forced(m, ids, policies, [0, 1, 2], last=18)
    decoder = Decoder(m, policies, rows=2, capacity=26, seed=5)
    decoder.start([0, 1], prefill(m, ids[:2, :PROMPT]), of=[0, 1], policies=[0, 1], streams=[0, 1])
    first = decoded(decoder, ids[:2], 5)
    assert (first[1] - want[1, 1, :5]).abs().max() < CLOSE
    saved = decoder.state_dict()
    for _ in range(2):
        decoder.start([1], prefill(m, ids[2:, :PROMPT]), of=[0], policies=[0], streams=[2])
        for t in range(13):
            step = decoder.step(torch.stack([ids[0, PROMPT + 5 + t], ids[2, PROMPT + t]]))
            assert (step[1] - want[0, 2, t]).abs().max() < CLOSE
            assert (step[0] - want[0, 0, 5 + t]).abs().max() < CLOSE  # across an attention block
        decoder.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"rows \[0, 1\] are full: they hold 26 tokens"):
        for t in range(15):
            decoder.step(ids[:2, t])


def test_rows_behind_prompts_of_several_lengths_begin_together():
    m = tiny("nemotron_h", **SMALL["nemotron_h"])
    policy = parse_policy("shared:nvfp4-sr L=4")
    ids = tokens(3, 30)
    prompts = [prefill(m, ids[:2, :PROMPT]), prefill(m, ids[2:, :12])]
    found = []
    for together in (False, True):
        decoder = Decoder(m, [policy], rows=3, capacity=40, seed=5)
        places = [(prompts[0], 1), (prompts[1], 0), (prompts[0], 1)]
        given = [(gathered(places), [0, 1, 2], [0, 1, 2])] if together else [
            (prompt, [row], [i]) for row, (prompt, i) in enumerate(places)
        ]  # fmt: skip
        for prompt, rows, of in given:
            streams = [8 + row for row in rows]
            decoder.start(rows, prompt, of=of, policies=[0] * len(rows), streams=streams)
        assert decoder.lengths.tolist() == [PROMPT, 12, PROMPT]
        found.append(decoded(decoder, ids, 9, start=12))
    assert torch.equal(*found)


@pytest.mark.parametrize("stopped", [False, True])
def test_divergence_is_marked_where_it_is_stored(stopped):
    m = tiny("qwen3_5", **SMALL["qwen3_5"])
    policy = parse_policy("shared:fp16 L=4")
    decoder = Decoder(m, [policy], rows=2, capacity=32, seed=5)
    prompt = prefill(m, tokens(2, PROMPT))
    with torch.inference_mode():
        prompt.states[0][1, 0, 2, 3] = 1e5  # beyond FP16
    decoder.start([0, 1], prompt, of=[0, 1], policies=[0, 0], streams=[0, 1])
    decoder.step(torch.tensor([3, 4]))
    if stopped:
        decoder.stop([1])
    assert decoder.diverged_at.tolist() == [-1, -1 if stopped else 0]


def test_wrong_use_is_refused():
    m = tiny("qwen3_5", **SMALL["qwen3_5"])
    policy = parse_policy("shared:fp16 L=4")
    with pytest.raises(ValueError, match="captured on a CUDA device"):
        Decoder(m, [policy], rows=2, capacity=8, seed=5, graphs=True)
    with pytest.raises(ValueError, match="places"):
        Decoder(m, [policy], rows=2, capacity=8, seed=5, places=[1, 1])
    decoder = Decoder(m, [policy], rows=2, capacity=8, seed=5)
    prompt = prefill(m, tokens(1, 9))
    with pytest.raises(ValueError, match="a row holds 8 tokens, the prompt has 9"):
        decoder.start([0], prompt, of=[0], policies=[0], streams=[0])
    with pytest.raises(ValueError, match="each once"):
        decoder.start([0, 0], prompt, of=[0, 0], policies=[0, 0], streams=[0, 1])
    with pytest.raises(ValueError, match="one token a row"):
        decoder.step(torch.zeros(3, dtype=torch.int64))
