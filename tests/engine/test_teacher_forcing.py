"""Teacher forcing: rows are comparable, and a saved run goes on bit for bit.

That both engines agree is shown in `test_proofs`.
"""

import pytest
import torch

from quantlab.engine import TeacherForcing
from quantlab.replay import parse_policy
from tests.models.tiny import VOCAB, tiny

PROMPT, LAST = 13, 150
POLICIES = [parse_policy(p) for p in ("conventional:fp32", "shared:fp32", "shared:nvfp4-sr")]


def tokens(streams=2, length=PROMPT + LAST + 1):
    return torch.randint(VOCAB, (streams, length), generator=torch.Generator().manual_seed(5))


def forcing(m, data=None, **changes):
    arguments = {
        "policies": POLICIES,
        "stream_ids": [0, 1],
        "positions": range(1, LAST + 1),
        "prompt": PROMPT,
        "segment": 64,
        "seed": 11,
    } | changes
    return TeacherForcing(m, tokens() if data is None else data, **arguments)


def logits(run):
    parts = list(run.run())
    return torch.cat([part.logits for part in parts], 2), parts


def kl(logits):
    """KL from policy 0, [policies, streams, n], FP64."""
    log = logits.double().log_softmax(-1)
    return (log[0].exp() * (log[0] - log)).sum(-1)


def test_every_row_sees_its_own_stream_and_the_reference_is_its_own_floor():
    m = tiny("qwen3_5")
    all_logits, _ = logits(forcing(m))
    divergence = kl(all_logits)
    # Policy 1 repeats the reference, so what is left is a row's place in the matrix products.
    assert divergence[1].max() < 1e-9
    assert divergence[3].mean() > 1e-6
    swapped, _ = logits(forcing(m, data=tokens().flip(0), stream_ids=[1, 0]))
    # Rows moved and draws followed their stream: nothing but the products' rows may differ.
    assert (kl(swapped).flip(1)[3] - divergence[3]).abs().mean() < 0.3 * divergence[3].mean()
    fp32 = slice(0, 3)
    scale = all_logits.abs().max()
    assert (swapped.flip(1)[fp32] - all_logits[fp32]).abs().max() < 1e-4 * scale


def test_logits_score_the_next_token():
    """D08: position t has consumed t tokens beyond the prompt and predicts the one after."""
    m = tiny("nemotron_h")
    data = tokens()
    _, parts = logits(forcing(m, data, positions=[1, 7, 64, 65, LAST]))
    got = torch.cat([part.targets for part in parts], 1)
    assert torch.equal(got, data[:, [PROMPT + p for p in (1, 7, 64, 65, LAST)]])
    whole = m.model(input_ids=data).logits
    want = whole[:, [PROMPT + p - 1 for p in (1, 7, 64, 65, LAST)]]
    reference = torch.cat([part.logits[0] for part in parts], 1)
    assert (reference - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_saved_state_continues_bit_for_bit(family):
    m = tiny(family)
    unbroken, _ = logits(forcing(m))
    saved = {}
    first = forcing(m)

    def keep(done, last):
        if done == 64:
            saved.update({k: v.clone() for k, v in first.state_dict().items()})

    for _ in first.run(keep):
        pass
    second = forcing(m)
    second.load_state_dict(saved)
    rest, parts = logits(second)
    assert parts[0].positions[0] == 65
    assert torch.equal(rest, unbroken[:, :, 64:])


def test_progress_and_divergence():
    m = tiny("qwen3_5")
    seen = []
    run = forcing(m, policies=[parse_policy("shared:fp8-sr")])
    for measurement in run.run(lambda done, last: seen.append((done, last))):
        assert (measurement.diverged_at == -1).all()
    assert seen == [(64, LAST), (128, LAST), (150, LAST)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": [0]}, "count from 1"),
        ({"positions": [LAST + 1]}, "need 165"),
        ({"engine": "fast"}, "windowed"),
        ({"prompt": 0}, "at least 1"),
    ],
)
def test_refuses_what_it_cannot_run(changes, message):
    with pytest.raises(ValueError, match=message):
        forcing(tiny("qwen3_5"), **changes)
