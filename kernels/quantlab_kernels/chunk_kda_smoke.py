"""Check and time the KDA training kernels on a GPU: `python -m quantlab_kernels.chunk_kda_smoke`.

1. Values and gradients in BF16 against the FP64 token-by-token recurrence of the same inputs, at
   the zoo's head size, through both launches of the sequential kernels and under decays from 1e-5
   to 300 a token.
2. Device time of every kernel at the shapes of training.

The exit code is 1 if a comparison failed. About 20 seconds, mostly compilation; `--no-times` stops
after the comparisons.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from quantlab.models.zoo.scan import sequential_scan
from quantlab_kernels.chunk_kda import chunk_kda

HEADS, DIM = 4, 128
BOUND = 2e-2
"""Of the norm: five BF16 roundings in a row. In FP16, whose interpreter rounds as a GPU does, 1e-3
was measured, which is 8e-3 in BF16."""
CASES = {
    "many rows": (32, 128, (-5.0, 0.0)),
    "one row": (1, 512, (-5.0, 0.5)),
    "hard decays": (2, 256, (-3.0, 2.5)),
}
"""Rows, T, span of log10(−log decay)."""
SHAPES = ((32, 4_096), (1, 131_072))
NAMES = ("o", "dq", "dk", "dv", "dlog_decay", "dbeta")


def make_inputs(rows: int, steps: int, span: tuple[float, float], seed: int = 0) -> list[Tensor]:
    """Draw q, k, v in BF16, log decays and write strengths in FP32, as leaves on the GPU."""
    gen = torch.Generator("cuda").manual_seed(seed)
    shape = (rows, steps, HEADS, DIM)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen, device="cuda")

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=gen, device="cuda")

    q, k, v = normal(*shape), normal(*shape) + 1.5 * normal(1, 1, HEADS, DIM), normal(*shape)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    low, high = span
    speed = low + (high - low) * uniform(1, 1, HEADS, DIM)
    log_decay = -(10.0 ** (speed + 0.3 * normal(*shape)))
    leaves = [x.bfloat16() for x in (q, k, v)] + [log_decay, uniform(rows, steps, HEADS)]
    return [x.requires_grad_() for x in leaves]


def gradients(op: Callable[..., Tensor], args: list[Tensor], do: Tensor) -> list[Tensor]:
    """Run forward and backward: output and gradients."""
    for x in args:
        x.grad = None
    out = op(*args)
    out.backward(do.to(out.dtype))  # type: ignore[no-untyped-call]
    return [out.detach(), *(x.grad for x in args if x.grad is not None)]


def compare(name: str) -> bool:
    """Print the relative errors of one case, and whether all are within `BOUND`."""
    rows, steps, span = CASES[name]
    args = make_inputs(rows, steps, span)
    do = torch.randn(rows, steps, HEADS, DIM, device="cuda").bfloat16()
    got = gradients(chunk_kda, args, do)
    want = gradients(sequential_scan, [x.detach().double().requires_grad_() for x in args], do)
    errors = [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True)]
    # A NaN is not below the bound.
    good = all(error < BOUND for error in errors)
    text = " ".join(f"{n}={e:.1e}" for n, e in zip(NAMES, errors, strict=True))
    _say(f"{'ok  ' if good else 'FAIL'} {name}: {text}")
    return good


def times(rows: int, steps: int) -> None:
    """Print the device time of every kernel of one forward and backward, microseconds."""
    from torch.profiler import ProfilerActivity, profile

    args = make_inputs(rows, steps, (-4.0, 0.0))
    do = torch.randn(rows, steps, HEADS, DIM, device="cuda").bfloat16()
    gradients(chunk_kda, args, do)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            gradients(chunk_kda, args, do)
        torch.cuda.synchronize()
    found = sorted(prof.key_averages(), key=lambda e: -e.device_time_total)
    text = " ".join(f"{e.key[:24]}={e.device_time_total / 3:.0f}" for e in found[:14])
    _say(f"us {rows}x{steps}: total={sum(e.device_time_total for e in found) / 3:.0f} {text}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run all cases, then the times."""
    begun = time.monotonic()
    results = [compare(name) for name in CASES]
    _say(f"compared after {time.monotonic() - begun:.0f} s")
    if not all(results):
        sys.exit(1)
    if "--no-times" not in sys.argv:
        for rows, steps in SHAPES:
            times(rows, steps)


if __name__ == "__main__":
    main()
