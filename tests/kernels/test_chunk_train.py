"""The training op against the token-by-token recurrence in FP64, values and every gradient.

Under the interpreter inputs are FP32, so nothing is rounded and the tolerance is that of FP32 sums
over a few hundred terms (at most 6e-7 was measured). On a GPU the same cases run in BF16 against
the FP64 reference of the same BF16 inputs; 2 % of the norm is five BF16 roundings in a row. Ten
mutants, each a term left out of the backward or of the inverse, move at least one gradient of
gdn-grouped by 10 %.
"""

import pytest
import torch

from quantlab.models.zoo.scan import sequential_scan
from tests.kernels.device import DEVICE, MARKS, ON_GPU

from quantlab_kernels.chunk_train import chunk_scan  # isort: skip

pytestmark = MARKS

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 2e-2 if ON_GPU else 3e-6

# Three chunks where it matters: the term of a decay that goes through the state needs a state
# before the chunk and a gradient after it.
CASES = {
    "gdn-grouped": (2, 192, 1, 2, 32, 32, True),
    "gdn-two-blocks-of-dv": (1, 128, 1, 1, 32, 64, True),
    "mamba2-grouped": (2, 192, 1, 2, 32, 16, False),
    "one-chunk": (1, 64, 1, 1, 16, 16, True),
}


def inputs(case: str, dtype: torch.dtype) -> list[torch.Tensor | None]:
    rows, steps, hk, h, dk, dv, delta = CASES[case]
    gen = torch.Generator().manual_seed(1)
    q, k = (torch.randn(rows, steps, hk, dk, generator=gen) for _ in range(2))
    # Correlated keys: with independent ones A is small and a wrong inverse would pass.
    k = k + 1.5 * torch.randn(1, 1, hk, dk, generator=gen)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    v = torch.randn(rows, steps, h, dv, generator=gen)
    # A head that forgets everything now and then, and one that carries its state over chunks.
    log_decay = -(10.0 ** (torch.rand(rows, steps, h, generator=gen) * 3 - 5))
    log_decay[:, ::17, 0] *= 3000
    beta = torch.rand(rows, steps, h, generator=gen) if delta else None
    out: list[torch.Tensor | None] = [x.to(dtype).to(DEVICE) for x in (q, k, v)]
    out.append(log_decay.to(DEVICE))
    out.append(beta.to(DEVICE) if beta is not None else None)
    return out


def run(fn, args, dtype):
    leaves = [None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in args]
    out = fn(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.device)
    (out.double() * weight.double()).sum().backward()
    return [out.detach()] + [None if x is None else x.grad for x in leaves]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    args = inputs(case, DTYPE)
    got = run(chunk_scan, args, None)
    want = run(sequential_scan, args, torch.float64)
    for name, g, w in zip(["o", "q", "k", "v", "log_decay", "beta"], got, want, strict=True):
        if w is None:
            assert g is None
            continue
        error = ((g.double() - w).norm() / w.norm()).item()
        assert error < TOLERANCE, f"{name}: relative error {error:.2e}"


def test_rejects_a_length_off_the_chunk():
    args = inputs("one-chunk", DTYPE)
    with pytest.raises(ValueError, match="multiple of 64"):
        chunk_scan(*(x[:, :63] for x in args))
