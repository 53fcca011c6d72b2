"""The training convolution against torch's conv1d, SiLU and norm in FP64: values, gradients."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.device import DEVICE, MARKS

from quantlab_kernels.chunk_train_conv import conv_silu  # isort: skip

pytestmark = MARKS

# Forward sums 4 terms, weight gradients a few hundred, in FP32; a tap off by one is an error of
# order 1.
TOLERANCE = 1e-5


def reference(x, weight, bias, *, steps, head, sizes, scales):
    rows = x.view(-1, steps, x.shape[1]).transpose(1, 2)
    y = F.conv1d(rows, weight[:, None], bias, padding=3, groups=x.shape[1])[..., :steps]
    parts = F.silu(y).transpose(1, 2).reshape(x.shape).split(sizes, 1)
    out = []
    for part, scale in zip(parts, scales, strict=True):
        if scale is not None:
            heads = part.view(len(x), -1, head)
            part = (scale * heads * (heads.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).flatten(
                1
            )
        out.append(part)
    return tuple(out)


@pytest.mark.parametrize(
    ("bias", "rows"), [(False, 2), (True, 2), (True, 35)], ids=["plain", "bias", "tiles-left-over"]
)
def test_values_and_gradients(bias, rows):
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(rows * 32, 64, generator=gen)
    leaves = [
        x,
        torch.randn(64, 4, generator=gen),
        torch.randn(64, generator=gen) if bias else None,
    ]
    layout = {"steps": 32, "head": 16, "sizes": (16, 16, 32), "scales": (0.25, 1.0, None)}
    probes = [torch.randn(len(x), s, generator=gen) for s in layout["sizes"]]

    def run(fn, dtype):
        mine = [None if a is None else a.clone().to(DEVICE, dtype).requires_grad_() for a in leaves]
        out = fn(*mine, **layout)
        sum((o * p.to(o)).sum() for o, p in zip(out, probes, strict=True)).backward()
        return [o.detach() for o in out] + [a.grad for a in mine if a is not None]

    got, want = run(conv_silu, torch.float32), run(reference, torch.float64)
    names = ["query", "key", "value", "dx", "dweight", "dbias"]
    for name, g, w in zip(names, got, want, strict=False):
        assert ((g.double() - w).norm() / w.norm()).item() < TOLERANCE, name
