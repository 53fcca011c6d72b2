"""The same proofs on a CUDA device, where ops, casts and the head's product are other code."""

from __future__ import annotations

import pytest
import torch

from quantlab.models import adapt, check_model, forward_hidden, head, load_model
from quantlab.models.forward import product_fp32
from quantlab.models.load import quiet_transformers
from tests.models.tiny import FAMILY_NAMES, tiny, tiny_hf, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def _quiet():
    with quiet_transformers(), torch.inference_mode():
        yield


@DTYPES
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_self_test_passes_on_the_device(family, dtype):
    m = adapt(tiny_hf(family).to("cuda", dtype))
    assert m.identity["device_type"] == "cuda"
    report = check_model(m)
    assert report.passed, "\n" + report.table()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_head_accumulates_and_keeps_fp32(dtype):
    """Against FP64 products of the same factors: FP32 accumulation over 512 terms is within
    512 · 2⁻²⁴ = 3e-5 of the largest; an output rounded to 16 bits is off by 2⁻¹² or more."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 512, generator=generator).to("cuda", dtype)
    w = torch.randn(384, 512, generator=generator).to("cuda", dtype)
    exact = x.double() @ w.double().t()
    got = product_fp32(x, w)
    assert got.dtype == torch.float32
    assert float((got - exact).abs().max() / exact.abs().max()) < 3e-5
    rounded = torch.nn.functional.linear(x, w)
    assert float((rounded - exact).abs().max() / exact.abs().max()) > 1e-4


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_logits_agree_with_the_cpu(family):
    cpu, x = tiny(family), tokens(2, 70)
    gpu = adapt(tiny_hf(family).to("cuda"))
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        a, b = head(cpu, forward_hidden(cpu, x)), head(gpu, forward_hidden(gpu, x.cuda())).cpu()
    finally:
        torch.backends.cudnn.allow_tf32 = tf32
    assert float((a - b).abs().max() / a.abs().max()) < 2e-5


def test_a_checkpoint_loads_onto_the_device(tmp_path):
    tiny_hf("qwen3_5").bfloat16().save_pretrained(tmp_path)
    m = load_model(str(tmp_path), device="cuda")
    assert m.device.type == "cuda" and m.activation_dtype == torch.bfloat16
    assert all(p.is_cuda for p in m.model.parameters())
