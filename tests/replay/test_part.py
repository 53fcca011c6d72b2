"""Policies whose formats apply to some heads: names, and rows against the plain policies."""

import pytest
import torch

from quantlab.recurrence import exact_scan
from quantlab.replay import StepwiseCache, WindowedScan, parse_policy
from quantlab.replay.lane import applied
from quantlab.replay.part import Part, PartError, parse_part
from quantlab.replay.rowwise import RowwiseCache
from tests.recurrence.sampling import sample_inputs
from tests.replay.decoding import FP64, STREAMS, compare, decode, for_policies

LAYER = 2  # of the scans in tests.replay.decoding
HEADS = 4
BODIES = (
    "conventional:int8@row",
    "shared:nvfp4-sr",
    "shared:fp8-sr records=bf16",
    "nvfp4-sr / fp16-sr L=4",
    "nvfp4 / fp32 corrections=fold",
)


def inputs_of(kind="gdn", dtype=torch.float32, steps=60):
    return sample_inputs(kind, steps=steps, dtype=dtype, heads=HEADS, key_heads=2)


def outputs(texts, engine=WindowedScan, **options):
    policies = [parse_policy(text) for text in texts]
    inputs = for_policies(inputs_of(**options), len(policies))
    o, scan = decode(engine, policies, inputs, (9, 20, 41))
    n = STREAMS.numel()
    return [(o[n * p : n * p + n], scan.state()[n * p : n * p + n]) for p in range(len(policies))]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", ["gdn", "mamba2", "kda"])
def test_no_head_is_float32_and_all_heads_are_the_plain_policy(body, kind):
    nothing = body
    for name in ("nvfp4-sr", "nvfp4", "fp8-sr", "fp16-sr", "int8@row"):
        nothing = nothing.replace(name, "fp32")
    none, fp32, every, layer, plain = outputs(
        [f"{body} except=2", nothing, f"{body} only=2.0,2.1,2.2,2.3", f"{body} except=0", body],
        kind=kind,
    )
    for a, b in ((none, fp32), (every, plain), (layer, plain)):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert not torch.equal(plain[0], fp32[0])


@pytest.mark.parametrize("body", BODIES)
def test_heads_are_independent_of_each_other(body):
    """Nothing mixes the heads of one op: inside are the plain policy's, outside FP32's."""
    some, others, plain, none = outputs(
        [f"{body} only=2.1,2.3", f"{body} except=2.1,2.3", body, f"{body} only=0"]
    )
    inside = torch.tensor([1, 3])
    outside = torch.tensor([0, 2])
    for index in (0, 1):
        axis = 2 if index == 0 else 1
        for part, here, there in ((some, inside, outside), (others, outside, inside)):
            assert torch.equal(
                part[index].index_select(axis, here), plain[index].index_select(axis, here)
            )
            assert torch.equal(
                part[index].index_select(axis, there), none[index].index_select(axis, there)
            )


@pytest.mark.parametrize("kind", ["gdn", "mamba2", "kda"])
def test_the_oracle_agrees(kind):
    texts = [
        f"{body} {part}" for body in BODIES for part in ("only=2.1", "except=2.0,2.3", "only=0")
    ]
    compare([parse_policy(text) for text in texts], inputs_of(kind, torch.float64), (9, 13, 37))


def test_generation_stores_the_same_heads():
    texts = ("shared:nvfp4-sr only=2.1", "nvfp4 / fp16-sr L=4 except=2.0", "shared:fp8 only=0")
    policies = [parse_policy(text) for text in texts]
    inputs = inputs_of(dtype=torch.float64, steps=40).rows(torch.zeros(3, dtype=torch.int64))
    rows = RowwiseCache(policies, 3, layer=LAYER, seed=7)
    caches = [StepwiseCache([p], torch.tensor([5]), layer=LAYER, seed=7) for p in policies]
    for p, cache in enumerate(caches):
        prompt = inputs.slice(0, 5).rows(torch.tensor([p]))
        cache.prefill(prompt)
        rows.start(p, exact_scan(prompt)[1][0], policy=p, stream=5)
    for t in range(5, 40):
        piece = inputs.slice(t, t + 1)
        expected = torch.cat([c(piece.rows(torch.tensor([p]))) for p, c in enumerate(caches)])
        assert (rows(piece) - expected).abs().max() < FP64 * expected.abs().max()


def test_mutants_are_seen(monkeypatch):
    """Heads turned round, and the wrong layer's heads."""
    import quantlab.replay.lane as lane

    policies = [parse_policy("shared:nvfp4-sr only=2.1,2.2,1.0")]
    inputs = inputs_of(dtype=torch.float64)
    compare(policies, inputs)
    for wrong in (
        lambda s, x, applies: applied(s, x, ~applies),
        lambda s, x, applies: applied(s, x, applies.roll(1, 1)),
        lambda s, x, applies: s,
    ):
        monkeypatch.setattr(lane, "applied", wrong)
        with pytest.raises(AssertionError):
            compare(policies, inputs)
    monkeypatch.setattr(lane, "applied", applied)
    whole = Part.heads
    # the oracle asks for layer 2 by itself
    monkeypatch.setattr(
        type(policies[0]), "at", lambda self, layer, heads: (
            parse_policy("shared:nvfp4-sr"), whole(self.part, layer - 1, heads)
        )
    )  # fmt: skip
    with pytest.raises(AssertionError):
        compare(policies, inputs)


def test_a_saved_scan_goes_on():
    policies = [parse_policy(t) for t in ("shared:nvfp4-sr only=2.1", "shared:nvfp4-sr")]
    inputs = for_policies(inputs_of(), 2)
    _, scan = decode(WindowedScan, policies, inputs.slice(0, 30), (9,))
    again = WindowedScan(policies, STREAMS, layer=LAYER, seed=7)
    again.load_state_dict(scan.state_dict())
    rest = inputs.slice(30, 60)
    assert torch.equal(again(rest), scan(rest))


@pytest.mark.parametrize(
    "text", ["shared:nvfp4-sr only=2.3", "nvfp4 / fp16-sr L=4 except=0,1.2,3", "shared:fp8 only=7"]
)
def test_names(text):
    policy = parse_policy(text)
    assert parse_policy(str(policy)) == policy
    assert policy.short.endswith(text.split()[-1])
    assert parse_policy(text.replace("0,1.2,3", "3,0,1.2")) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shared:fp8 only=", "neither a layer such as 2"),
        ("shared:fp8 only=2.x", "'2.x' is neither"),
        ("shared:fp8 only=2,2", "each once"),
        ("shared:fp8 only=2,2.1", "listed whole and by head"),
        ("shared:fp8 only=2 except=3", "not both"),
    ],
)
def test_what_makes_no_part(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policy(text)


def test_a_model_must_have_it():
    parse_part("only", "0,1.3").require([2, 4])
    with pytest.raises(PartError, match=r"layers 0 … 1, not 2"):
        parse_part("only", "0,2").require([2, 4])
    with pytest.raises(PartError, match=r"layer 0 has heads 0 … 1, not 2"):
        parse_part("except", "0.2").require([2, 4])
