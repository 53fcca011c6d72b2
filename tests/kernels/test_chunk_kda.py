"""The training op with decay per key channel against the FP64 token-by-token recurrence.

Under the interpreter inputs are FP32, so nothing is rounded and the tolerance is that of FP32 sums
over a few hundred terms. On a GPU the same cases run in BF16 against the FP64 reference of the same
BF16 inputs; 2 % of the norm is five BF16 roundings in a row.
"""

import pytest
import torch

from quantlab.models.zoo.scan import sequential_scan
from tests.kernels.device import DEVICE, MARKS, ON_GPU

from quantlab_kernels.chunk_any import chunk_any  # isort: skip
from quantlab_kernels.chunk_kda import chunk_kda  # isort: skip
from quantlab_kernels.chunk_train import chunk_scan  # isort: skip

pytestmark = MARKS

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# At most 1.6e-6 was measured; logs cumulated to 120 keep 2^-24 of that, 7e-6.
TOLERANCE = 2e-2 if ON_GPU else 8e-6
NAMES = ("o", "q", "k", "v", "log_decay", "beta")

# rows, T, H, dk, dv and the span of log10(−log decay). Three chunks where it matters: the term of a
# decay that goes through the state needs a state before the chunk and a gradient after it.
CASES = {
    "mixed": (2, 192, 2, 32, 32, (-5.0, 0.5)),
    "blocks-of-channels": (1, 128, 1, 128, 16, (-4.0, 0.0)),
    "blocks-of-dv": (1, 128, 1, 16, 128, (-4.0, 0.0)),
    "one-chunk": (1, 64, 1, 16, 16, (-3.0, 0.0)),
    "hard": (1, 192, 1, 32, 16, (-3.0, 2.5)),
}


def inputs(case: str) -> list[torch.Tensor]:
    rows, steps, heads, dk, dv, (low, high) = CASES[case]
    gen = torch.Generator().manual_seed(1)
    q, k = (torch.randn(rows, steps, heads, dk, generator=gen) for _ in range(2))
    # Correlated keys: with independent ones A is small and a wrong inverse would pass.
    k = k + 1.5 * torch.randn(1, 1, heads, dk, generator=gen)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    v = torch.randn(rows, steps, heads, dv, generator=gen)
    # Channels of every speed side by side, some of which forget everything now and then.
    speed = low + (high - low) * torch.rand(1, 1, heads, dk, generator=gen)
    log_decay = -(10.0 ** (speed + 0.3 * torch.randn(rows, steps, heads, dk, generator=gen)))
    log_decay[:, ::17, :, :4] = -30.0
    beta = torch.rand(rows, steps, heads, generator=gen)
    # A token that writes nothing: dβ is not formed by a division by β.
    beta[:, 5] = 0.0
    return [x.to(DEVICE) for x in (q.to(DTYPE), k.to(DTYPE), v.to(DTYPE), log_decay, beta)]


def run(fn, args, dtype):
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in args]
    out = fn(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.device)
    (out.double() * weight.double()).sum().backward()
    return [out.detach()] + [x.grad for x in leaves]


def errors(got, want):
    return {
        name: ((g.double() - w).norm() / w.norm()).item()
        for name, g, w in zip(NAMES, got, want, strict=True)
    }


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    args = inputs(case)
    found = errors(run(chunk_kda, args, None), run(sequential_scan, args, torch.float64))
    assert max(found.values()) < TOLERANCE, found


def test_equal_decays_of_all_channels_are_the_op_of_one_decay_per_head():
    args = inputs("one-chunk")
    one = args[3][..., 0].contiguous()
    scalar = run(chunk_scan, [*args[:3], one, args[4]], None)
    args[3] = one[..., None].expand_as(args[3]).contiguous()
    vector = run(chunk_kda, args, None)
    vector[4] = vector[4].sum(-1)
    found = errors(vector, [x.double() for x in scalar])
    assert max(found.values()) < TOLERANCE, found


def test_shapes_that_do_not_fit_are_named():
    args = inputs("one-chunk")
    with pytest.raises(ValueError, match="multiple of 64"):
        chunk_kda(*(x[:, :63] for x in args))
    with pytest.raises(ValueError, match="log_decay must be FP32"):
        chunk_kda(*args[:3], args[3][..., 0], args[4])
    with pytest.raises(ValueError, match="powers of two"):
        chunk_kda(args[0][..., :12], args[1][..., :12], *args[2:])


def test_the_decays_shape_chooses_the_op():
    args = inputs("one-chunk")
    one = args[3][..., 0].contiguous()
    assert torch.equal(chunk_any(*args), chunk_kda(*args))
    assert torch.equal(chunk_any(*args[:3], one, args[4]), chunk_scan(*args[:3], one, args[4]))
    with pytest.raises(ValueError, match="give beta"):
        chunk_any(*args[:4])
