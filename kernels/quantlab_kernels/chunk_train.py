"""The chunked gated linear recurrence for training, a differentiable op over whole sequences.

The equations and rounding points are in `chunk_train_forward` and `chunk_train_backward`. The
reference is `quantlab.models.zoo.scan.sequential_scan` (plain torch, FP64-able).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantlab_kernels.chunk_train_backward import (
    dqk_kernel,
    dstates_kernel,
    dv_kernel,
    dwy_kernel,
)
from quantlab_kernels.chunk_train_forward import (
    SUB,
    C,
    output_kernel,
    states_kernel,
    wy_kernel,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Warps and pipeline stages of a kernel, and its block of dv where it has one."""

    warps: int
    stages: int
    block: int = 0


LAUNCH = {
    "wy": Launch(warps=4, stages=1),
    "states": Launch(warps=4, stages=4, block=64),
    "states-long": Launch(warps=4, stages=3, block=32),
    "output": Launch(warps=4, stages=1),
    "dv": Launch(warps=4, stages=1),
    "dstates": Launch(warps=4, stages=2, block=64),
    "dstates-long": Launch(warps=4, stages=2, block=16),
    "dqk": Launch(warps=4, stages=1, block=64),
    "dwy": Launch(warps=4, stages=1),
}
"""Launch of each kernel, from the sweep in reports/zoo (one H200, Triton 3.6). The two sequential
kernels have a second one, of more and smaller programs, for few long rows.
"""

ENOUGH_PROGRAMS = 128
"""Below this many programs a sequential kernel takes its `-long` launch; about the chip's 132
multiprocessors.
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


def _check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None) -> None:
    if q.shape != k.shape or q.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"expected q, k of one 4-D shape and 4-D v, got {q.shape}, {k.shape}, {v.shape}"
        )
    rows, steps, key_heads, dk = q.shape
    heads, dv = v.shape[2:]
    if v.shape[:2] != (rows, steps) or heads % key_heads:
        raise ValueError(f"v {tuple(v.shape)} does not go with q {tuple(q.shape)}")
    if steps % C:
        raise ValueError(f"sequence length {steps} is not a multiple of {C}")
    if dk & (dk - 1) or dv & (dv - 1) or min(dk, dv) < 16:
        raise ValueError(f"dk = {dk} and dv = {dv} must be powers of two, at least 16")
    for name, x in (("log_decay", log_decay), ("beta", beta)):
        if x is not None and (x.shape != (rows, steps, heads) or x.dtype != torch.float32):
            raise ValueError(
                f"{name} must be FP32 {(rows, steps, heads)}, got {x.dtype} {tuple(x.shape)}"
            )


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        rows, steps, key_heads, dk = q.shape
        heads, dv = v.shape[2:]
        chunks = steps // C
        b = log_decay.view(rows, chunks, C, heads).cumsum(2)
        dims = {"H": heads, "HK": key_heads, "DK": dk, "DV": dv, "C": C}
        per_chunk = (rows * chunks, heads)
        t = w = None
        u = v
        vn = v
        if beta is not None:
            beta = beta.contiguous()
            t = q.new_empty(rows * chunks, heads, C, C)
            w = q.new_empty(rows, steps, heads, dk)
            u = torch.empty_like(v)
            vn = torch.empty_like(v)
            wy_kernel[per_chunk](k, v, b, beta, t, w, u, **dims, SUB=SUB, **_meta("wy"))
        s = q.new_empty(rows * chunks, heads, dk, dv)
        launch, block = _sequential("states", rows, heads, dv)
        states_kernel[(dv // block, rows * heads)](
            k, w, u, b, s, vn, chunks,
            **dims, BV=block, IS_DELTA=beta is not None, **_meta(launch),
        )  # fmt: skip
        o = torch.empty_like(v)
        output_kernel[per_chunk](q, k, vn, b, s, o, **dims, **_meta("output"))
        ctx.save_for_backward(q, k, v, b, beta, t, w, s, vn)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, b, beta, t, w, s, vn = ctx.saved_tensors
        do = do.contiguous()
        rows, steps, key_heads, dk = q.shape
        heads, dv = v.shape[2:]
        chunks = steps // C
        dims = {"H": heads, "HK": key_heads, "DK": dk, "DV": dv, "C": C}
        per_chunk = (rows * chunks, heads)
        delta = beta is not None
        dv0 = torch.empty_like(v)
        dv_kernel[per_chunk](q, k, b, do, dv0, **dims, **_meta("dv"))
        ds = torch.empty_like(s)
        dvn = torch.empty_like(v)
        launch, block = _sequential("dstates", rows, heads, dv)
        dstates_kernel[(dv // block, rows * heads)](
            q, k, w, b, do, dv0, ds, dvn, chunks,
            **dims, BV=block, IS_DELTA=delta, **_meta(launch),
        )  # fmt: skip
        dq = q.new_empty(rows, steps, heads, dk)
        dkh = torch.empty_like(dq)
        dw = torch.empty_like(dq) if delta else None
        db = torch.empty_like(b)
        block = min(LAUNCH["dqk"].block, dv)
        dqk_kernel[per_chunk](
            q, k, vn, b, s, do, ds, dvn, dq, dkh, dw, db,
            **dims, BV=block, IS_DELTA=delta, **_meta("dqk"),
        )  # fmt: skip
        dbeta = None
        if delta:
            dbeta = torch.empty_like(beta)
            # dU is dV' (dvn); dV takes dv0's place, which is no longer needed.
            dwy_kernel[per_chunk](
                k, v, b, beta, t, dvn, dw, dkh, dv0, dbeta, db, **dims, **_meta("dwy")
            )
            dvn = dv0
        dg = db.view(rows, chunks, C, heads).flip(2).cumsum(2).flip(2).reshape(rows, steps, heads)
        if heads != key_heads:
            group = (rows, steps, key_heads, heads // key_heads, dk)
            dq, dkh = dq.view(group).sum(3), dkh.view(group).sum(3)
        return dq, dkh, dvn, dg, dbeta


def chunk_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None = None
) -> Tensor:
    """Run a gated linear recurrence over whole sequences from a zero state, differentiably.

    Args:
        q: [rows, T, Hk, dk] — queries, normalised and scaled already (Mamba-2: C).
        k: [rows, T, Hk, dk] — keys, normalised already (Mamba-2: B); Hk divides H.
        v: [rows, T, H, dv] — values (Mamba-2: Δ · x).
        log_decay: [rows, T, H] FP32 — natural log, ≤ 0.
        beta: [rows, T, H] FP32 — write strength; present if and only if the delta rule applies.

    Returns:
        [rows, T, H, dv] in q's dtype. T must be a multiple of 64; dk, dv powers of two.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(q, k, v, log_decay, beta)
    out: Tensor = _ChunkScan.apply(q, k, v, log_decay, beta)
    return out
