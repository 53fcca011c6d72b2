from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from quantlab.errors import RunError
from quantlab.models import LoadedModel, check, check_model, forward
from tests.models.tiny import FAMILY_NAMES, tiny

OLD = tuple(int(x) for x in transformers.__version__.split(".")[:2]) < (5, 24)
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
HISTORY = {f"prefill + {n}-token steps = full forward": n for n in check.STEP_SIZES}


def failed(m: LoadedModel) -> set[str]:
    return {row.name for row in check_model(m).rows if not row.passed}


@BOTH
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_passes(family, dtype):
    report = check_model(tiny(family, dtype=dtype))
    assert report.passed, "\n" + report.table()
    report.raise_if_failed()
    names = [row.name for row in report.rows]
    assert set(HISTORY) < set(names) and len(names) == len(set(names))


@BOTH
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "kimi_linear"])
def test_lost_history_of_multi_token_steps_is_caught(family, dtype):
    """Mutant: a mixer that drops its state when several tokens meet a filled cache (C01)."""
    m = tiny(family, dtype=dtype)

    def forget(mixer, args, kwargs):
        cache = kwargs.get("cache", kwargs.get("cache_params"))
        hidden = args[0] if args else kwargs["hidden_states"]
        if cache is not None and hidden.shape[1] > 1:
            state = cache.layers[mixer.layer_idx].recurrent_states[0]
            if state is not None:
                state.zero_()

    for mixer in m.recurrent_modules:
        mixer.register_forward_pre_hook(forget, with_kwargs=True)
    assert failed(m) == {name for name, n in HISTORY.items() if n > 1}


@BOTH
@pytest.mark.filterwarnings("ignore:Both `cache_params` and `cache`:FutureWarning")
@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])
def test_wrong_cache_keyword_is_caught(family, dtype, monkeypatch):
    """Mutant: the name of another version, swallowed by **kwargs without an error."""
    m = tiny(family, dtype=dtype)
    wrong = {"cache": "cache_params", "past_key_values": "cache", "cache_params": "cache"}
    right = forward.cache_keyword(m.model.base_model)
    if right == "cache" and family == "mamba2":
        wrong["cache"] = "past_key_values"
    monkeypatch.setattr(forward, "cache_keyword", lambda model: wrong[right])
    report = check_model(m)
    assert {row.name for row in report.rows if not row.passed} >= set(HISTORY)
    with pytest.raises(RunError, match="fails its self-test"):
        report.raise_if_failed()


@pytest.mark.parametrize("family", ["qwen3_5", "bamba", "falcon_h1"])
def test_forced_positions_are_caught(family, monkeypatch):
    """Mutant: every forward starts at position 0, as continued forwards do by default in Bamba."""
    m = tiny(family)
    own = forward.positions
    monkeypatch.setattr(forward, "positions", lambda start, ids: own(0, ids))
    assert failed(m) == set(HISTORY)


def test_bypassed_op_is_caught():
    """Mutant: one layer replaced as a whole, as hub kernels do."""
    m = tiny("qwen3_5")
    m.recurrent_modules[1].forward = lambda hidden_states, **_: hidden_states
    assert failed(m) == {"one op call per recurrent layer"}


@BOTH
def test_wrong_op_is_caught(dtype, monkeypatch):
    """Mutant: heads tiled instead of interleaved."""
    own = check.exact_op

    def tiled(call):
        i = call.inputs
        return own(
            replace(call, inputs=replace(i, q=i.q.repeat(1, 1, 2, 1), k=i.k.repeat(1, 1, 2, 1)))
        )

    monkeypatch.setattr(check, "exact_op", tiled)
    assert failed(tiny("qwen3_5", dtype=dtype)) == {"our op in its place"}


def test_B05_state_kept_in_16_bits_is_caught(monkeypatch):
    """Mutant: a cache that stores the state in the activations' dtype."""
    from transformers.cache_utils import LinearAttentionLayer

    own = LinearAttentionLayer.update_recurrent_state

    def narrow(self, recurrent_states, *args, **kwargs):
        return own(self, recurrent_states.bfloat16(), *args, **kwargs)

    monkeypatch.setattr(LinearAttentionLayer, "update_recurrent_state", narrow)
    assert "the cache keeps the state in FP32" in failed(tiny("qwen3_5"))


def test_wrong_write_gate_is_caught(monkeypatch):
    """Mutant: the factor 2 of negative eigenvalues forgotten."""
    m = tiny("olmo_hybrid", dtype=torch.bfloat16)
    from quantlab.models import adapters

    own_beta = adapters._beta
    monkeypatch.setattr(adapters, "_beta", lambda site, beta: own_beta(site, beta) / 2)
    assert "write gate formed in FP32 is the model's" in failed(m)


def test_falcon_h1_with_its_norm():
    """5.17 gives one-token steps at batch 2 the wrong shape without an error: refused by name."""
    report = check_model(tiny("falcon_h1", mamba_rms_norm=True))
    wrong = {row.name for row in report.rows if not row.passed}
    assert wrong == ({"prefill + 1-token steps = full forward"} if OLD else set())
    if OLD:
        with pytest.raises(RunError, match=r"falcon_h1|in memory"):
            report.raise_if_failed()


def test_report_reads_as_a_table():
    report = check_model(tiny("mamba2"))
    lines = report.table().splitlines()
    assert len(lines) == len(report.rows) and all(line.startswith("ok") for line in lines)
