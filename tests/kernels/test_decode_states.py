"""A decoder on the decode kernels, and its attention, against the torch forms of both."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quantlab.engine.decoder import Decoder, prefill
from quantlab.replay import parse_policy
from tests.kernels.device import DEVICE, MARKS, ON_GPU
from tests.models.tiny import tiny

from quantlab_kernels import decode_states  # isort: skip
from quantlab_kernels.compiling import compiling  # isort: skip
from quantlab_kernels.decode import LayerCache  # isort: skip
from quantlab_kernels.decode_attention import DecodeAttention  # isort: skip
from quantlab_kernels.decode_conv import conv_step  # isort: skip

pytestmark = MARKS
PROMPT = 6
SMALL = {
    "qwen3_5": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
    "nemotron_h": {"hybrid_override_pattern": "M*", "mamba_num_heads": 2, "ssm_state_size": 16},
    "kimi_linear": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 2,
    },
}
POLICIES = [parse_policy(p) for p in ("conventional:fp32", "nvfp4 / fp16-sr L=3")]


def tokens(streams, length):
    return torch.randint(96, (streams, length), generator=torch.Generator().manual_seed(3))


def run(m, implementation, graphs=None, steps=5):
    """Two rows of each policy, one of them replaced after two steps, and a free row."""
    ids = tokens(3, PROMPT + steps).to(m.device)
    decoder = Decoder(
        m, POLICIES, rows=4, capacity=40, seed=2**63 + 1, places=[1, 2],
        implementation=implementation, graphs=graphs,
    )  # fmt: skip
    decoder.start(
        [0, 1, 3], prefill(m, ids[:, :PROMPT]), of=[0, 1, 1], policies=[0, 1, 1], streams=[0, 1, 6]
    )
    out = []
    for t in range(steps):
        if t == 2:
            decoder.start([1], prefill(m, ids[2:, :4]), of=[0], policies=[1], streams=[2**31 + 2])
        if t == 3:
            decoder.load_state_dict(decoder.state_dict())
        out.append(decoder.step(ids[[0, 1, 1, 1], PROMPT + t]).clone())
    assert decoder.diverged_at.tolist() == [-1] * 4
    return torch.stack(out, 1)[[0, 1, 3]].cpu()


# Logits over the largest: FP32 sums in another order, and code flips that follow (2e-5 each).
# Mutants: draws by slot instead of stream 1e-2; a row's records left behind by its predecessor 0.1.
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_kernels_are_the_torch_states(family: str) -> None:
    m = tiny(family, **SMALL[family])
    want = run(m, "torch")
    if ON_GPU:
        m.model.to(DEVICE)
    got = run(m, "triton")
    assert (got - want).abs().max() < 3e-4 * want.abs().max()
    if ON_GPU:
        assert torch.equal(run(m, "triton", graphs=False), got)


@pytest.mark.parametrize(
    "heads, key_heads, d, dv, dtype",
    [(4, 2, 16, 16, torch.float32), (3, 1, 24, 16, torch.float32), (8, 8, 64, 32, torch.float32)],
)
def test_attention_to_each_rows_own_length(
    heads: int, key_heads: int, d: int, dv: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(2)
    rows, capacity = 3, 256
    q = torch.randn(rows, heads, d, generator=g).to(DEVICE, dtype)
    k = torch.randn(rows, key_heads, capacity, d, generator=g).to(DEVICE, dtype)
    v = torch.randn(rows, key_heads, capacity, dv, generator=g).to(DEVICE, dtype)
    lengths = torch.tensor([0, 70, 255], device=DEVICE)
    for row, length in enumerate(lengths.tolist()):
        k[row, :, length + 1 :] = float("nan")  # what lies beyond is not looked at
        v[row, :, length + 1 :] = float("nan")
    ours = DecodeAttention(rows, capacity, torch.device(DEVICE))(q, k, v, lengths, 0.3)
    for row, length in enumerate(lengths.tolist()):
        keys, values = (x[row, :, : length + 1] for x in (k, v))
        group = heads // key_heads
        score = 0.3 * q[row].view(key_heads, group, d) @ keys.mT
        want = (score.softmax(-1) @ values).view(heads, dv)
        assert (ours[row] - want).abs().max() < 2e-6 * values.abs().max()


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
@pytest.mark.parametrize("size, bias, activation", [(4, True, "silu"), (3, False, None)])
def test_convolution_is_transformers(
    family: str, size: int, bias: bool, activation: str | None
) -> None:
    module = importlib.import_module(tiny(family, **SMALL[family]).family.module)
    g = torch.Generator().manual_seed(4)
    rows, channels = 3, 700
    wide = torch.randn(rows, 1, 2 * channels, generator=g)
    x = wide[..., 5 : 5 + channels].transpose(1, 2).to(DEVICE)  # as projections come
    window = torch.randn(rows, channels, size, generator=g).to(DEVICE)
    weight = torch.randn(channels, size, generator=g).to(DEVICE)
    own = torch.randn(channels, generator=g).to(DEVICE) if bias else None
    theirs = window.clone()
    want = module.causal_conv1d_update(x, theirs, weight, own, activation)
    got = conv_step(x, window, weight, own, activation)
    assert torch.equal(window, theirs)
    assert (got - want).abs().max() < 1e-6 * want.abs().max()
    with pytest.raises(ValueError, match="one token and silu"):
        conv_step(x, window, weight, own, "gelu")


class Asked(TorchDispatchMode):
    """Operations that wait for a number of the device, or bring one there."""

    names = (
        "item",
        "_local_scalar",
        "is_nonzero",
        "nonzero",
        "equal",
        "masked_select",
        "lift_fresh",
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.__name__.startswith(self.names):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", list(SMALL))
def test_a_step_asks_nothing_of_the_host(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it could not be captured; kernels, whose interpreter does ask, are left out."""
    monkeypatch.setattr(LayerCache, "step", lambda *_: None)
    monkeypatch.setattr(LayerCache, "start", lambda *_: None)
    monkeypatch.setattr(decode_states, "advance", lambda *_, **__: None)
    m = tiny(family, **SMALL[family])
    decoder = Decoder(
        m, POLICIES, rows=2, capacity=8, seed=0, implementation="triton", graphs=False
    )
    decoder.cache._attend = lambda q, k, v, *_: q.new_empty(*q.shape[:2], v.shape[3])
    decoder.start([0, 1], prefill(m, tokens(1, 3)), of=[0, 0], policies=[0, 1], streams=[0, 1])
    with torch.inference_mode(), Asked() as asked:
        decoder._forward()
    assert asked.found == []
    with torch.inference_mode(), Asked() as asked:
        int(decoder.diverged_at[0])
    assert asked.found  # the ear hears


def test_places_run_out() -> None:
    m = tiny("qwen3_5", **SMALL["qwen3_5"])
    if ON_GPU:
        m.model.to(DEVICE)
    decoder = Decoder(
        m, POLICIES, rows=3, capacity=8, seed=0, places=[1, 1], implementation="triton"
    )
    prompt = prefill(m, tokens(1, 3))
    keys = {"of": [0, 0], "streams": [0, 1]}
    with pytest.raises(ValueError, match="conventional fp32: 2 rows more, 1 places left of 1"):
        decoder.start([0, 1], prompt, policies=[0, 0], **keys)


def test_nothing_runs_while_compiling() -> None:
    window = torch.ones(1, 4, 4, device=DEVICE)
    x, weight = torch.ones(1, 4, 1, device=DEVICE), torch.ones(4, 4, device=DEVICE)
    with compiling(2):
        conv_step(2 * x, window, weight)
    assert (window == 1).all()
    conv_step(2 * x, window, weight)
    assert (window[..., -1] == 2).all()
