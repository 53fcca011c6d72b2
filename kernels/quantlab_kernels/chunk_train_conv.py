"""Causal depthwise convolution of width 4 with SiLU, and the L2 norm of heads, for training.

    pre[t, c] = bias[c] + Σ_j weight[c, j] x[t − 3 + j, c]   (zero before the row's start)
    y = silu(pre);  for normalised channels, per head of D:  y ← scale · y / sqrt(Σ y² + 1e-6)

The input has all channels; each group of channels (query, key, value, or Mamba-2's x, B, C) gets an
output of its own, contiguous, so nothing is split or copied afterwards.

Rounding points: output, and d(pre) between the two backward kernels, in the inputs' dtype; all
arithmetic FP32. Bytes: forward reads and writes the channels once (2 · 2 bytes each in BF16);
backward reads x and dy, writes and reads d(pre), writes dx.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 4
TOKENS = 32
"""Tokens of a program's tile; rows are multiples of it, so a tile never spans two rows."""
TILES = 8
"""Tiles a backward program accumulates its weight gradient over: few, or too few programs run."""
L2_EPS = 1e-6
"""Added to the sum of squares. Source: transformers, qwen3_5 `l2norm`."""


@triton.jit
def _convolve(x_ptr, w_ptr, bias_ptr, tok, start, ch, CH: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Pre-activation [tokens, channels] in FP32; `start` is the row's first token."""
    acc = tl.zeros([tok.shape[0], ch.shape[0]], tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + ch).to(tl.float32)[None, :]
    for j in tl.static_range(4):
        src = tok - 3 + j
        x = tl.load(x_ptr + src[:, None] * CH + ch[None, :], mask=src[:, None] >= start, other=0.0)
        acc += x.to(tl.float32) * tl.load(w_ptr + ch * 4 + j).to(tl.float32)[None, :]
    return acc


@triton.jit
def forward_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, steps, scale,
    CH: tl.constexpr, FIRST: tl.constexpr, OUT: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Write one group's outputs [tokens, OUT] from channels FIRST on. Grid: (tiles, OUT / D)."""
    tok = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    start = (tl.program_id(0) * TOKENS // steps) * steps
    c = tl.program_id(1) * D + tl.arange(0, D)
    pre = _convolve(x_ptr, w_ptr, bias_ptr, tok, start, FIRST + c, CH, HAS_BIAS)
    y = pre * tl.sigmoid(pre)
    if NORM:
        y *= scale * tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None]
    tl.store(y_ptr + tok[:, None] * OUT + c[None, :], y.to(y_ptr.dtype.element_ty))


@triton.jit
def backward_pre_kernel(
    x_ptr, w_ptr, bias_ptr, dy_ptr, dpre_ptr, part_ptr, steps, tiles, scale,
    CH: tl.constexpr, FIRST: tl.constexpr, OUT: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, TILES: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Write d(pre) of one group and partial sums [5, CH] of d(weight), d(bias) per program.

    Grid: (ceil(tiles / TILES), OUT / D).
    """
    p = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    ch = FIRST + head * D + d
    dw0 = tl.zeros([D], tl.float32)
    dw1 = tl.zeros([D], tl.float32)
    dw2 = tl.zeros([D], tl.float32)
    dw3 = tl.zeros([D], tl.float32)
    dbias = tl.zeros([D], tl.float32)
    for i in range(0, TILES):
        tile = p * TILES + i
        inside = tile < tiles
        tok = tile * TOKENS + tl.arange(0, TOKENS)
        # A tile past the end reads nothing (start beyond every token) and writes nothing.
        start = tl.where(inside, (tile * TOKENS // steps) * steps, tile * TOKENS + TOKENS)
        pre = _convolve(x_ptr, w_ptr, bias_ptr, tok, start, ch, CH, HAS_BIAS)
        sig = tl.sigmoid(pre)
        at = dy_ptr + tok[:, None] * OUT + head * D + d[None, :]
        dy = tl.load(at, mask=(tok[:, None] >= start), other=0.0).to(tl.float32)
        if NORM:
            y = pre * sig
            inv = tl.rsqrt(tl.sum(y * y, 1) + 1e-6)
            along = tl.sum(y * dy, 1) * inv * inv
            dy = scale * inv[:, None] * (dy - y * along[:, None])
        dpre = dy * sig * (1.0 + pre * (1.0 - sig))
        low = dpre.to(dpre_ptr.dtype.element_ty)
        tl.store(dpre_ptr + tok[:, None] * CH + ch[None, :], low, mask=(tok[:, None] >= start))
        dbias += tl.sum(dpre, 0)
        for j in tl.static_range(4):
            src = tok - 3 + j
            x = tl.load(
                x_ptr + src[:, None] * CH + ch[None, :], mask=src[:, None] >= start, other=0.0
            )
            part = tl.sum(dpre * x.to(tl.float32), 0)
            if j == 0:
                dw0 += part
            elif j == 1:
                dw1 += part
            elif j == 2:
                dw2 += part
            else:
                dw3 += part
    at = part_ptr + p * 5 * CH + ch
    tl.store(at, dw0)
    tl.store(at + CH, dw1)
    tl.store(at + 2 * CH, dw2)
    tl.store(at + 3 * CH, dw3)
    tl.store(at + 4 * CH, dbias)


@triton.jit
def backward_input_kernel(
    dpre_ptr, w_ptr, dx_ptr, steps, CH: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr
):
    """Write dx[t] = Σ_j weight[:, j] d(pre)[t + 3 − j]. Grid: (tiles, CH / D)."""
    tok = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    end = (tl.program_id(0) * TOKENS // steps + 1) * steps
    ch = tl.program_id(1) * D + tl.arange(0, D)
    acc = tl.zeros([TOKENS, D], tl.float32)
    for j in tl.static_range(4):
        src = tok + 3 - j
        g = tl.load(dpre_ptr + src[:, None] * CH + ch[None, :], mask=src[:, None] < end, other=0.0)
        acc += g.to(tl.float32) * tl.load(w_ptr + ch * 4 + j).to(tl.float32)[None, :]
    tl.store(dx_ptr + tok[:, None] * CH + ch[None, :], acc.to(dx_ptr.dtype.element_ty))


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        steps: int,
        head: int,
        sizes: tuple[int, ...],
        scales: tuple[float | None, ...],
    ) -> tuple[Tensor, ...]:
        x, weight = x.contiguous(), weight.contiguous()
        tokens, channels = x.shape
        outputs, first = [], 0
        for size, scale in zip(sizes, scales, strict=True):
            y = x.new_empty(tokens, size)
            forward_kernel[(tokens // TOKENS, size // head)](
                x, weight, bias, y, steps, 1.0 if scale is None else scale,
                CH=channels, FIRST=first, OUT=size, D=head,
                TOKENS=TOKENS, HAS_BIAS=bias is not None, NORM=scale is not None,
            )  # fmt: skip
            outputs.append(y)
            first += size
        ctx.save_for_backward(x, weight, bias)
        ctx.layout = (steps, head, sizes, scales)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        steps, head, sizes, scales = ctx.layout
        tokens, channels = x.shape
        tiles = tokens // TOKENS
        programs = triton.cdiv(tiles, TILES)
        dpre = torch.empty_like(x)
        parts = torch.empty(programs, 5, channels, device=x.device, dtype=torch.float32)
        first = 0
        for dy, size, scale in zip(grads, sizes, scales, strict=True):
            backward_pre_kernel[(programs, size // head)](
                x, weight, bias, dy.contiguous(), dpre, parts, steps, tiles,
                1.0 if scale is None else scale,
                CH=channels, FIRST=first, OUT=size, D=head,
                TOKENS=TOKENS, TILES=TILES, HAS_BIAS=bias is not None, NORM=scale is not None,
                num_warps=8,
            )  # fmt: skip
            first += size
        dx = torch.empty_like(x)
        backward_input_kernel[(tiles, channels // head)](
            dpre, weight, dx, steps, CH=channels, D=head, TOKENS=TOKENS
        )
        sums = parts.sum(0)
        dweight = sums[:4].T.to(weight.dtype)
        dbias = None if bias is None else sums[4].to(bias.dtype)
        return dx, dweight, dbias, None, None, None, None


def conv_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    steps: int,
    head: int,
    sizes: Sequence[int],
    scales: Sequence[float | None],
) -> tuple[Tensor, ...]:
    """Convolve causally, apply SiLU, split channels into groups and normalise some per head.

    Args:
        x: [tokens, channels] — rows of `steps` tokens one after another.
        weight: [channels, 4] FP32 or as x; tap 3 is the token itself.
        bias: [channels] or None.
        steps: tokens of a row, a multiple of 32.
        head: channels of a head, a power of two dividing every size.
        sizes: channels of each group, summing to all channels.
        scales: per group None, or the factor applied after the L2 norm of each head.

    Returns:
        One [tokens, size] tensor a group, in x's dtype.

    Raises:
        ValueError: sizes that do not fit.
    """
    if x.shape[0] % steps or steps % TOKENS:
        raise ValueError(f"{x.shape[0]} tokens are not rows of {steps}, a multiple of {TOKENS}")
    if sum(sizes) != x.shape[1] or any(s % head for s in sizes) or weight.shape[1:] != (WIDTH,):
        raise ValueError(f"groups {tuple(sizes)} of heads of {head} do not fit {tuple(x.shape)}")
    out: tuple[Tensor, ...] = _Conv.apply(x, weight, bias, steps, head, tuple(sizes), tuple(scales))
    return out
