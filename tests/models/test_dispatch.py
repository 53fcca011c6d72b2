from __future__ import annotations

import threading

import pytest
import torch

from quantlab.errors import UsageError
from quantlab.models import OpCall, counted, forward_hidden, head, new_cache, replaced
from quantlab.models.dispatch import _ACTIVE
from quantlab.models.forward import call
from quantlab.models.load import quiet_transformers
from tests.models.exact import exact_handler
from tests.models.tiny import FAMILY_NAMES, tiny, tokens


@pytest.fixture(autouse=True)
def _quiet():
    with quiet_transformers(), torch.inference_mode():
        yield


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


# Two orders of the same FP32 sums: a few hundred products a logit path, each rounded to 2⁻²⁴ of
# its size, through 3 recurrent layers; 6e-7 to 1.5e-6 is seen. The faults it must catch (tiled
# heads, transposed state, scale on k, missing D skip, norm on the mean) move logits by > 1e-2.
OWN_OP = 2e-5


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_pass_through_is_bit_identical_with_one_call_per_layer(family):
    m, x = tiny(family), tokens(2, 20)
    own = call(m.model, x).logits
    with counted(m) as seen:
        same = call(m.model, x).logits
    assert torch.equal(own, same)
    assert seen.calls == [1] * m.layers
    assert torch.equal(own, call(m.model, x).logits)
    assert seen.calls == [1] * m.layers, "calls outside the block are not counted"


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_own_op_in_its_place(family):
    m, x = tiny(family), tokens(2, 37)
    own = call(m.model, x).logits
    with replaced(m, exact_handler) as seen:
        ours = call(m.model, x).logits
    assert relative(ours, own) < OWN_OP
    assert seen.calls == [1] * m.layers
    # The comparison has power: without the recurrence the logits are others altogether.
    with replaced(m, lambda c: (torch.zeros(c.inputs.v.shape), None)):
        assert relative(call(m.model, x).logits, own) > 0.1


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_state_reaches_the_cache_in_transformers_layout(family):
    """B16: after a prefill with our op the cache holds what transformers' op would have put there,
    state compared entry by entry, and transformers' own decode continues from it."""
    m, x = tiny(family), tokens(2, 13)
    caches = []
    for ours in (False, True):
        cache = new_cache(m)
        if ours:
            with replaced(m, exact_handler):
                forward_hidden(m, x[:, :12], cache=cache)
        else:
            forward_hidden(m, x[:, :12], cache=cache)
        caches.append(cache)
    for mixer in m.recurrent_modules:
        a, b = (c.layers[mixer.layer_idx].recurrent_states[0] for c in caches)
        assert a.dtype == b.dtype == torch.float32  # B05: the baseline's state is FP32
        assert a.shape == b.shape
        assert relative(b, a) < OWN_OP
    after = [
        head(m, forward_hidden(m, x[:, 12:], cache=cache, start=12)).clone() for cache in caches
    ]
    assert relative(after[1], after[0]) < OWN_OP


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_calls_are_canonical(family):
    """Shapes, dtypes and flags of every call of a prefill, a 3-token and a 1-token step."""
    m, x = tiny(family), tokens(2, 12)
    seen: list[OpCall] = []

    def handler(c: OpCall):
        seen.append(c)
        return exact_handler(c)

    cache = new_cache(m)
    with replaced(m, handler):
        for start, stop in ((0, 8), (8, 11), (11, 12)):
            forward_hidden(m, x[:, start:stop], cache=cache, start=start)
    assert [c.layer for c in seen] == list(range(m.layers)) * 3
    for c, steps, first in zip(
        seen,
        [8] * m.layers + [3] * m.layers + [1] * m.layers,
        [True] * m.layers + [False] * 2 * m.layers,
        strict=True,
    ):
        heads, dv, dk = m.recurrent_shapes[c.layer]
        i = c.inputs
        assert i.v.shape == (2, steps, heads, dv) and i.dk == dk
        assert i.log_decay.dtype == torch.float32 and bool((i.log_decay <= 0).all())
        assert c.wants_state
        assert (c.initial_state is None) == first
        if not first:
            assert c.initial_state is not None
            assert c.initial_state.shape == (2, heads, dv, dk)
            # A mutant that drops the history hands over zeros.
            assert float(c.initial_state.abs().amax()) > 0
        if m.family.op == "mamba2":
            assert i.beta is None and i.dt is not None and i.dt.dtype == torch.float32
        else:
            assert i.dt is None and i.beta is not None
            assert i.per_channel == (m.family.op == "kda")
            norms = i.k.norm(dim=-1)
            assert torch.allclose(norms, torch.ones_like(norms), atol=1e-3)
            assert torch.allclose(i.q.norm(dim=-1) * dk**0.5, norms, atol=2e-3)
            assert i.q.shape[2] == (4 if m.family.op == "kda" else 2), "keys are not expanded"


def test_B15_heads_share_keys_by_interleaving():
    """Value heads 2g, 2g+1 use key head g: tiling instead gives other logits."""
    m, x = tiny("qwen3_5"), tokens(2, 20)
    own = call(m.model, x).logits

    def tiled(c: OpCall):
        from dataclasses import replace

        i = c.inputs
        return exact_handler(
            replace(c, inputs=replace(i, q=i.q.repeat(1, 1, 2, 1), k=i.k.repeat(1, 1, 2, 1)))
        )

    with replaced(m, exact_handler):
        assert relative(call(m.model, x).logits, own) < OWN_OP
    with replaced(m, tiled):
        assert relative(call(m.model, x).logits, own) > 0.05


def test_handler_that_keeps_its_own_state():
    """With None for the state the cache slot exists, holds zeros, and the next call sees it."""
    for family in ("qwen3_5", "nemotron_h"):
        m, x = tiny(family), tokens(2, 9)
        states: dict[int, torch.Tensor] = {}

        def handler(c: OpCall, states: dict[int, torch.Tensor] = states):
            from dataclasses import replace

            o, states[c.layer] = exact_handler(replace(c, initial_state=states.get(c.layer)))
            return o, None

        cache = new_cache(m)
        with replaced(m, handler):
            parts = [
                forward_hidden(m, x[:, a:b], cache=cache, start=a)
                for a, b in ((0, 5), (5, 8), (8, 9))
            ]
        slot = cache.layers[m.recurrent_modules[0].layer_idx].recurrent_states[0]
        assert float(slot.abs().max()) == 0.0
        with replaced(m, exact_handler):
            whole = forward_hidden(m, x)
        assert relative(torch.cat(parts, 1), whole) < OWN_OP


def test_other_models_and_threads_are_untouched():
    a, b, x = tiny("qwen3_5"), tiny("qwen3_5", seed=5), tokens(2, 10)
    want = call(b.model, x).logits
    got = []

    def elsewhere():
        with torch.inference_mode():
            got.append(call(b.model, x).logits)

    def handler(c: OpCall):
        if not got:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        return exact_handler(c)

    with replaced(a, handler):
        call(a.model, x)
        assert torch.equal(call(b.model, x).logits, want)
    assert torch.equal(got[0], want)


def test_blocks_nest_and_clean_up_after_errors():
    m, x = tiny("nemotron_h"), tokens(2, 10)
    own = call(m.model, x).logits

    def broken(c: OpCall):
        raise ValueError("on purpose")

    with replaced(m, exact_handler) as outer:
        with counted(m) as inner:
            assert torch.equal(call(m.model, x).logits, own)
        assert inner.calls == [1] * m.layers and outer.calls == [0] * m.layers
        with pytest.raises(ValueError, match="on purpose"), replaced(m, broken):
            call(m.model, x)
        assert _ACTIVE.get() is None
    assert torch.equal(call(m.model, x).logits, own)
    assert not any(mixer._forward_pre_hooks for mixer in m.recurrent_modules)


def test_wrong_output_shape_is_named():
    m, x = tiny("qwen3_5"), tokens(2, 10)

    def transposed(c: OpCall):
        o, s = exact_handler(c)
        return o.transpose(1, 2), s

    wrong = pytest.raises(ValueError, match=r"recurrent layer 0 must return o of shape")
    with wrong, replaced(m, transposed):
        call(m.model, x)


def test_training_mode_is_refused():
    m, x = tiny("nemotron_h"), tokens(1, 4)
    m.model.train()
    with pytest.raises(UsageError, match="eval"), counted(m):
        call(m.model, x)
