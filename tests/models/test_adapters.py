"""Each adapter against transformers' own function, at shapes that betray a swapped axis."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quantlab.errors import UsageError
from quantlab.models import OpCall, adapters, forward_hidden, new_cache, replaced
from quantlab.models.check import exact_op
from quantlab.models.dispatch import Site, original
from quantlab.models.identity import set_time_step_limit
from quantlab.models.load import quiet_transformers
from quantlab.models.registry import FAMILIES
from tests.models.exact import exact_handler
from tests.models.tiny import tiny, tokens

# FP32 sums of ≤ 70 products in two orders: ≤ 70 · 2⁻²⁴ = 4e-6 of the largest entry, typically
# 1e-6. A transposed state, a missing scale (a factor 2) or an epsilon on the mean exceed 1e-2.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _quiet():
    with quiet_transformers(), torch.inference_mode():
        torch.manual_seed(0)
        yield


def site(family: str, **attributes) -> Site:
    mixer = SimpleNamespace(time_step_limit=(0.0, float("inf")), **attributes)
    return Site(layer=0, mixer=mixer, family=FAMILIES[family], handler=exact_handler)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.shape == b.shape
    return float((a.float() - b.float()).abs().max() / b.float().abs().max()) < TOLERANCE


def delta_inputs(steps: int, per_channel: bool):
    rows, heads, dk, dv = 2, 4, 3, 5
    key_heads = heads if per_channel else 2
    g = -torch.rand(rows, steps, heads, dk if per_channel else 1)
    return {
        "query": torch.randn(rows, steps, key_heads, dk),
        "key": torch.randn(rows, steps, key_heads, dk),
        "value": torch.randn(rows, steps, heads, dv),
        "g": g if per_channel else g[..., 0],
        "beta": torch.rand(rows, steps, heads),
    }, torch.randn(rows, heads, dk, dv)


@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("steps", [1, 70])
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
@pytest.mark.parametrize("function", [0, 1], ids=["many", "one"])
def test_delta_rules(family, function, steps, with_state):
    name = FAMILIES[family].functions[function]
    own = original(FAMILIES[family], name)
    inputs, state = delta_inputs(steps, family == "kimi_linear")
    extra = {
        "initial_state": state if with_state else None,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    want_o, want_s = own(**_expanded(inputs), **extra)
    q, k, v = inputs["query"], inputs["key"], inputs["value"]
    got_o, got_s = adapters.ADAPTERS[name](
        site(family, num_k_heads=k.shape[2]), q, k, v, g=inputs["g"], beta=inputs["beta"],
        use_cache=True, output_router_logits=False, **extra,
    )  # fmt: skip
    assert close(got_o, want_o) and close(got_s, want_s)
    without = adapters.ADAPTERS[name](
        site(family, num_k_heads=k.shape[2]), q, k, v, g=inputs["g"], beta=inputs["beta"],
        **{**extra, "output_final_state": False},
    )  # fmt: skip
    assert torch.equal(without[0], got_o) and without[1] is None


def _expanded(inputs):
    """5.17's own op wants keys expanded to the value heads already; 5.24's accepts it."""
    repeat = inputs["value"].shape[2] // inputs["key"].shape[2]
    return {
        **inputs,
        "query": inputs["query"].repeat_interleave(repeat, dim=2),
        "key": inputs["key"].repeat_interleave(repeat, dim=2),
    }


def test_expanded_keys_are_contracted_again():
    inputs, _ = delta_inputs(7, False)
    seen: list[OpCall] = []

    def handler(c: OpCall):
        seen.append(c)
        return exact_handler(c)

    results = []
    for given in (inputs, _expanded(inputs)):
        s = site("qwen3_5", num_k_heads=2)
        s.handler = handler
        results.append(adapters.gated_delta_rule(s, **given, use_qk_l2norm_in_kernel=True)[0])
    assert torch.equal(*results)
    assert [c.inputs.k.shape[2] for c in seen] == [2, 2]


def mamba2_inputs(steps: int, heads: int = 4, groups: int = 2, dv: int = 5, dk: int = 3):
    return {
        "hidden_states": torch.randn(2, steps, heads, dv),
        "dt": torch.randn(2, steps, heads),
        "A": -torch.rand(heads) - 0.1,
        "B": torch.randn(2, steps, groups, dk),
        "C": torch.randn(2, steps, groups, dk),
    }, torch.randn(2, heads, dv, dk)


@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 1.0)], ids=["free", "clamped"])
def test_mamba2_chunk_scan(limit, skip, with_state):
    own = original(FAMILIES["nemotron_h"], "mamba2_chunk_scan")
    inputs, state = mamba2_inputs(37)
    extra = {
        "chunk_size": 16,
        "D": torch.randn(4) if skip else None,
        "dt_bias": torch.randn(4) if skip else None,
        "dt_softplus": True,
        "initial_states": state if with_state else None,
        "return_final_states": True,
        "dt_limit": limit,
    }
    want_y, want_s = own(**inputs, **extra)
    s = site("nemotron_h")
    s.mixer.time_step_limit = limit
    args = [inputs[n] for n in ("hidden_states", "dt", "A", "B", "C")]
    got_y, got_s = adapters.mamba2_chunk_scan(s, *args, **extra, use_cache=True)
    assert close(got_y, want_y) and close(got_s, want_s)
    alone = adapters.mamba2_chunk_scan(s, *args, **{**extra, "return_final_states": False})
    assert torch.equal(alone, got_y)


@pytest.mark.parametrize("gate", [False, True], ids=["plain", "z"])
@pytest.mark.parametrize("skip", [False, True], ids=["bare", "skip"])
def test_mamba2_selective_state_update(skip, gate):
    own = original(FAMILIES["nemotron_h"], "mamba2_selective_state_update")
    inputs, state = mamba2_inputs(1)
    x, dt, a = inputs["hidden_states"][:, 0], inputs["dt"], inputs["A"]
    args = (
        x,
        dt.transpose(1, 2).expand(-1, -1, 5),
        a[:, None, None].expand(-1, 5, 3),
        inputs["B"][:, 0],
        inputs["C"][:, 0],
    )
    extra = {
        "D": torch.randn(4)[:, None].expand(-1, 5) if skip else None,
        "dt_bias": torch.randn(4)[:, None].expand(-1, 5) if skip else None,
        "z": torch.randn(2, 4, 5) if gate else None,
        "dt_softplus": True,
    }
    want_s, got_s = state.clone(), state.clone()
    want = own(want_s, *args, **extra)
    got = adapters.mamba2_selective_state_update(site("nemotron_h"), got_s, *args, **extra)
    assert close(got, want) and close(got_s, want_s)
    assert not torch.equal(got_s, state), "the state is written in place"


def test_mamba2_step_leaves_the_state_to_a_handler_that_keeps_its_own():
    inputs, state = mamba2_inputs(1)
    s = site("nemotron_h")
    s.handler = lambda c: (exact_handler(c)[0], None)
    before = state.clone()
    adapters.mamba2_selective_state_update(
        s, state, inputs["hidden_states"][:, 0], inputs["dt"].transpose(1, 2).expand(-1, -1, 5),
        inputs["A"][:, None, None].expand(-1, 5, 3), inputs["B"][:, 0], inputs["C"][:, 0],
    )  # fmt: skip
    assert torch.equal(state, before)


def test_packed_sequences_are_refused():
    inputs, _ = delta_inputs(4, False)
    with pytest.raises(UsageError, match="packed"):
        adapters.gated_delta_rule(site("qwen3_5"), **inputs, cu_seqlens=torch.tensor([0, 4]))
    mamba, _ = mamba2_inputs(4)
    with pytest.raises(UsageError, match="packed"):
        adapters.mamba2_chunk_scan(site("mamba2"), **mamba, seq_idx=torch.zeros(2, 4))


def test_B11_l2_epsilon_is_on_the_sum():
    seen: list[OpCall] = []

    def handler(c: OpCall):
        seen.append(c)
        return exact_handler(c)

    s = site("qwen3_5", num_k_heads=1)
    s.handler = handler
    tiny_entries = torch.full((1, 1, 1, 128), 1e-4)
    adapters.gated_delta_rule(
        s, torch.zeros(1, 1, 1, 128), tiny_entries, torch.ones(1, 1, 1, 128),
        g=torch.zeros(1, 1, 1), beta=torch.ones(1, 1, 1), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    k, q = seen[0].inputs.k, seen[0].inputs.q
    assert torch.allclose(k, torch.full_like(k, 0.0662266), rtol=1e-5)  # 0.0087950 on the mean
    assert bool((q == 0).all())


def test_B16_state_axes_survive_a_round_trip():
    """K = V: k = e0, v = e1 writes S[k=0, v=1] = 1 in transformers' layout, and is read back so."""
    s = site("qwen3_5", num_k_heads=1)
    s.handler = exact_op
    e = torch.eye(4).view(4, 1, 1, 1, 4)
    gates = {"g": torch.zeros(1, 1, 1), "beta": torch.ones(1, 1, 1)}
    _, state = adapters.gated_delta_rule(
        s, e[0], e[0], e[1], **gates, output_final_state=True, use_qk_l2norm_in_kernel=False
    )
    assert float(state[0, 0, 0, 1]) == 1.0 and float(state.abs().sum()) == 1.0
    # Query e0 reads value e1 back, scaled by dk^-0.5 = 0.5; a transposed state would give 0.
    o, _ = adapters.gated_delta_rule(
        s, e[0], e[2], torch.zeros(1, 1, 1, 4), **gates, initial_state=state,
        use_qk_l2norm_in_kernel=False,
    )  # fmt: skip
    assert torch.equal(o[0, 0, 0], torch.tensor([0.0, 0.5, 0.0, 0.0]))


def test_B19_decay_first_then_predict_then_write():
    """The same pair twice, decay = beta = 0.5: S = 0.625 · k vᵀ.

    0.5 if the prediction came from the undecayed state.
    """
    s = site("qwen3_5", num_k_heads=1)
    s.handler = exact_op
    k = torch.tensor([0.6, 0.8]).view(1, 1, 1, 2).expand(1, 2, 1, 2)
    v = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 1, 3).expand(1, 2, 1, 3)
    half = torch.full((1, 2, 1), 0.5)
    _, state = adapters.gated_delta_rule(
        s, k, k, v, g=half.log(), beta=half, output_final_state=True, use_qk_l2norm_in_kernel=False
    )
    want = 0.625 * k[0, 0, 0, :, None] * v[0, 0, 0, None, :]
    assert torch.allclose(state[0, 0], want, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_B04_write_gate_is_formed_in_fp32(family):
    """b = 0.1 gives beta 0.5250; rounded to BF16 it is 0.5234, a separate arm."""
    m = tiny(family, dtype=torch.bfloat16)
    twice = 2.0 if family == "olmo_hybrid" else 1.0
    for mixer in m.recurrent_modules:
        projection = getattr(mixer, m.family.write_projection)
        projection.register_forward_hook(lambda mod, args, out: torch.full_like(out, 0.1))
    seen: list[torch.Tensor] = []

    def handler(c: OpCall):
        assert c.inputs.beta is not None
        seen.append(c.inputs.beta)
        return exact_op(c)

    b = torch.tensor(0.1).bfloat16().float()  # the projection's own output is BF16
    for gate, want in (("fp32", float(torch.sigmoid(b))), ("activation", 0.5234375)):
        seen.clear()
        with replaced(m, handler, write_gate=gate):
            forward_hidden(m, tokens(1, 5))
        for beta in seen:
            assert beta.dtype == torch.float32
            assert torch.allclose(beta, torch.full_like(beta, twice * want), rtol=1e-6)


def test_B04_interleaved_gate_logits_keep_their_heads():
    """Qwen3-Next packs b and a per key head: FP32 betas agree with the model's, head by head."""
    m = tiny("qwen3_next", dtype=torch.bfloat16)

    def handler(c: OpCall):
        given, formed = seen.sites[c.layer].given_beta, c.inputs.beta
        assert given is not None and formed is not None
        assert given.dtype == torch.bfloat16
        assert float(((formed - given.float()) / formed).abs().max()) < 2**-8
        return exact_op(c)

    with replaced(m, handler) as seen:
        forward_hidden(m, tokens(2, 9))


@pytest.mark.parametrize(
    "family", ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "nemotron_h", "bamba"]
)
def test_B01_readout_stays_finite_up_to_the_norm(family):
    """A read-out of 70,000 under FP16 activations: finite before and after the norm, counted."""
    m = tiny(family, dtype=torch.float16)
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    for mixer in m.recurrent_modules:
        norm = getattr(mixer, m.family.norm or "norm")
        norm.register_forward_pre_hook(lambda mod, args: before.append(args[0]))
        norm.register_forward_hook(lambda mod, args, out: after.append(out))
    with replaced(m, lambda c: (torch.full(c.inputs.v.shape, 70_000.0), None)) as seen:
        hidden = forward_hidden(m, tokens(1, 3))
    for x in before:
        # Mamba-2's D skip adds a few units.
        assert x.dtype == torch.float32 and bool((x > 69_000).all())
    assert all(bool(torch.isfinite(x).all()) and float(x.abs().max()) > 0 for x in after)
    assert bool(torch.isfinite(hidden).all())
    assert all(count > 0 for count in seen.readout_overflows)


def test_one_time_step_limit_in_prefill_and_decode():
    """Nemotron-H with steps below its limit of 0.001: our decode obeys it as prefill does.

    transformers' own decode does not (the reason for the rule): its error is far above ours.
    """
    m, x = tiny("nemotron_h"), tokens(2, 24)
    for mixer in m.recurrent_modules:
        mixer.dt_bias.fill_(-9.0)  # softplus(-9) = 1.2e-4

    def stepwise() -> torch.Tensor:
        cache = new_cache(m)
        parts = [forward_hidden(m, x[:, :12], cache=cache)]
        parts += [forward_hidden(m, x[:, t : t + 1], cache=cache, start=t) for t in range(12, 24)]
        return torch.cat(parts, 1)

    with replaced(m, exact_op):
        ours, full = stepwise(), forward_hidden(m, x)
    assert close(ours, full)
    theirs = stepwise()
    assert float((theirs - full).abs().max()) > 100 * float((ours - full).abs().max())


def test_time_step_limit_can_be_replaced_and_is_recorded():
    m = tiny("nemotron_h")
    assert m.identity["time_step_limit"] == [0.001, "inf"]
    set_time_step_limit(m, (0.0, 0.1))
    assert m.identity["time_step_limit"] == [0.0, 0.1]
    with pytest.raises(UsageError, match="interval"):
        set_time_step_limit(m, (0.2, 0.1))
    with pytest.raises(UsageError, match="no time step"):
        set_time_step_limit(tiny("qwen3_5"), (0.0, 1.0))
