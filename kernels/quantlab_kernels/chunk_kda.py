"""Chunked Kimi delta attention for training, a differentiable op over whole sequences.

The equations and rounding points are in `chunk_kda_forward` and `chunk_kda_backward`. The
reference is `quantlab.models.zoo.scan.sequential_scan` (plain torch, FP64-able).
"""

from typing import Any

import torch
from torch import Tensor

from quantlab_kernels.chunk_kda_backward import dqk_kernel, dstates_kernel, dv_kernel, dwy_kernel
from quantlab_kernels.chunk_kda_forward import (
    cumulate_kernel,
    intra_kernel,
    output_kernel,
    states_kernel,
)
from quantlab_kernels.chunk_train import ENOUGH_PROGRAMS, Launch
from quantlab_kernels.chunk_train_forward import SUB, C

LEVELS = C.bit_length() - 1
"""Halvings of a chunk."""

LAUNCH = {
    "cumulate": Launch(warps=4, stages=1, block=64),
    "intra": Launch(warps=8, stages=1, block=64),
    "states": Launch(warps=4, stages=3, block=64),
    "states-long": Launch(warps=4, stages=3, block=32),
    "output": Launch(warps=4, stages=1),
    "dv": Launch(warps=4, stages=1),
    "dstates": Launch(warps=4, stages=2, block=64),
    "dstates-long": Launch(warps=4, stages=2, block=16),
    "dwy": Launch(warps=8, stages=1, block=64),
    "dqk": Launch(warps=8, stages=1, block=64),
}
"""Launch of each kernel; `block` is of channels, of dv for the kernels of states and dwy. The two
sequential kernels have a second one, of more and smaller programs, for few long rows. Chosen so
that little is spilled: 42 words a thread in dqk, none elsewhere (sm_90, Triton 3.6). Not swept.
"""


def _meta(name: str) -> dict[str, int]:
    return {"num_warps": LAUNCH[name].warps, "num_stages": LAUNCH[name].stages}


def _sequential(name: str, rows: int, heads: int, dv: int) -> tuple[str, int]:
    """Pick launch and block of dv of a sequential kernel."""
    block = min(LAUNCH[name].block, dv)
    if rows * heads * (dv // block) < ENOUGH_PROGRAMS:
        name += "-long"
        block = min(LAUNCH[name].block, dv)
    return name, block


def _check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> None:
    if q.shape != k.shape or q.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"expected q, k of one 4-D shape and 4-D v, got {q.shape}, {k.shape}, {v.shape}"
        )
    rows, steps, heads, dk = q.shape
    dv = v.shape[3]
    if v.shape[:3] != (rows, steps, heads):
        raise ValueError(f"v {tuple(v.shape)} does not go with q {tuple(q.shape)}")
    if steps % C:
        raise ValueError(f"sequence length {steps} is not a multiple of {C}")
    if dk & (dk - 1) or dv & (dv - 1) or min(dk, dv) < 16:
        raise ValueError(f"dk = {dk} and dv = {dv} must be powers of two, at least 16")
    for name, x, shape in (
        ("log_decay", log_decay, (rows, steps, heads, dk)),
        ("beta", beta, (rows, steps, heads)),
    ):
        if x.shape != shape or x.dtype != torch.float32:
            raise ValueError(f"{name} must be FP32 {shape}, got {x.dtype} {tuple(x.shape)}")


def _cumulate(x: Tensor, *, reverse: bool) -> Tensor:
    """Sum [rows, T, H, dk] along the tokens of every chunk."""
    rows, steps, heads, dk = x.shape
    width = heads * dk
    block = min(LAUNCH["cumulate"].block, dk)
    out = torch.empty_like(x)
    cumulate_kernel[(rows * steps // C, width // block)](
        x, out, N=width, C=C, BLOCK=block, REVERSE=reverse, **_meta("cumulate")
    )
    return out


class _ChunkKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
    ) -> Tensor:
        q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
        rows, steps, heads, dk = q.shape
        dv = v.shape[3]
        chunks = steps // C
        b = _cumulate(log_decay.contiguous(), reverse=False)
        dims = {"H": heads, "DK": dk, "DV": dv, "C": C}
        per_chunk = (rows * chunks, heads)
        t, p = (q.new_empty(rows * chunks, heads, C, C) for _ in range(2))
        w, qg, kd = (torch.empty_like(q) for _ in range(3))
        u, vn, o = (torch.empty_like(v) for _ in range(3))
        intra_kernel[per_chunk](
            q, k, v, b, beta, t, w, u, p, qg, kd,
            **dims, LEVELS=LEVELS, SUB=SUB, BK=min(LAUNCH["intra"].block, dk), **_meta("intra"),
        )  # fmt: skip
        s = q.new_empty(rows * chunks, heads, dk, dv)
        launch, block = _sequential("states", rows, heads, dv)
        states_kernel[(dv // block, rows * heads)](
            kd, w, u, b, s, vn, chunks, **dims, BV=block, **_meta(launch)
        )
        output_kernel[per_chunk](qg, p, vn, s, o, **dims, **_meta("output"))
        ctx.save_for_backward(q, k, v, b, beta, t, w, p, qg, kd, s, vn)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v, b, beta, t, w, p, qg, kd, s, vn = ctx.saved_tensors
        do = do.contiguous()
        rows, steps, heads, dk = q.shape
        dv = v.shape[3]
        chunks = steps // C
        dims = {"H": heads, "DK": dk, "DV": dv, "C": C}
        per_chunk = (rows * chunks, heads)
        dvalue = torch.empty_like(v)
        dv_kernel[per_chunk](p, do, dvalue, H=heads, DV=dv, C=C, **_meta("dv"))
        ds = torch.empty_like(s)
        du = torch.empty_like(v)
        launch, block = _sequential("dstates", rows, heads, dv)
        dstates_kernel[(dv // block, rows * heads)](
            qg, kd, w, b, do, dvalue, ds, du, chunks, **dims, BV=block, **_meta(launch)
        )
        dp, da = torch.empty_like(p), torch.empty_like(t)
        dw, dq, dkey = (torch.empty_like(q) for _ in range(3))
        db = torch.empty_like(b)
        block = min(LAUNCH["dqk"].block, dk)
        dbeta = torch.empty(1 + dk // block, *beta.shape, device=q.device)
        # dV takes dV'₀'s place, which is no longer needed.
        dwy_kernel[per_chunk](
            k, v, b, beta, t, s, vn, do, du, dp, da, dw, dvalue, dbeta[0],
            **dims, BV=min(LAUNCH["dwy"].block, dv), **_meta("dwy"),
        )  # fmt: skip
        dqk_kernel[(*per_chunk, dk // block)](
            q, k, b, beta, t, s, vn, do, ds, dp, da, dw, dq, dkey, db, dbeta[1:], rows * steps,
            **dims, LEVELS=LEVELS, BK=block, BV=min(64, dv), **_meta("dqk"),
        )  # fmt: skip
        return dq, dkey, dvalue, _cumulate(db, reverse=True), dbeta.sum(0)


def chunk_kda(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Run Kimi delta attention over whole sequences from a zero state, differentiably.

    Args:
        q: [rows, T, H, dk] — queries, normalised and scaled already.
        k: [rows, T, H, dk] — keys, normalised already.
        v: [rows, T, H, dv] — values.
        log_decay: [rows, T, H, dk] FP32 — natural log per key channel, ≤ 0.
        beta: [rows, T, H] FP32 — write strength.

    Returns:
        [rows, T, H, dv] in q's dtype. T must be a multiple of 64; dk, dv powers of two.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(q, k, v, log_decay, beta)
    out: Tensor = _ChunkKDA.apply(q, k, v, log_decay, beta)
    return out
