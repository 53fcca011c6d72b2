"""One token of the causal depthwise convolution in front of a recurrence, with its SiLU.

    window <- the newest K of (window, x);  y = silu(sum_k weight_k window_k + bias)

In place of the concatenation, copy, convolution and activation that transformers runs one by one,
each over the whole window.

Rounding points: the sum is rounded to the weights' type before the activation, and the result
again, as there.
Bytes, per row and channel: the window once in and once out, x, y. Floor: those over the bandwidth
of a copy.
Not covered: several tokens, activations other than SiLU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab_kernels.compiling import launch

BLOCK = 512


@triton.jit
def conv_step_kernel(
    x_ptr,
    window_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    channels,
    stride_x_row,
    stride_x_channel,
    stride_window_row,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """One program per (BLOCK channels, row)."""
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    k = tl.arange(0, WIDTH)
    x_ptrs = x_ptr + row * stride_x_row + channel * stride_x_channel
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(window_ptr.dtype.element_ty)
    places = window_ptr + row * stride_window_row + channel[:, None] * K + k[None, :]
    older = tl.load(places + 1, mask=inside[:, None] & (k < K - 1)[None, :], other=0.0)
    held = tl.where((k == K - 1)[None, :], x[:, None], older)
    tl.debug_barrier()  # all of the window is read before any of it moves up
    tl.store(places, held, mask=inside[:, None] & (k < K)[None, :])
    weights = tl.load(
        weight_ptr + channel[:, None] * K + k[None, :],
        mask=inside[:, None] & (k < K)[None, :],
        other=0.0,
    )
    total = tl.sum(weights.to(tl.float32) * held.to(tl.float32), axis=1)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    total = total.to(weight_ptr.dtype.element_ty).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + row * channels + channel, total.to(out_ptr.dtype.element_ty), mask=inside)


def conv_step(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Take one token of every row; transformers' `causal_conv1d_update`.

    Args:
        x: [rows, channels, 1].
        window: [rows, channels, K], the newest last, contiguous but for rows; updated in place.
        weight: [channels, K], contiguous.
        bias: [channels] or None.
        activation: "silu", "swish" or None.

    Returns:
        [rows, channels, 1] in x's dtype.

    Raises:
        ValueError: another activation, several tokens, or memory laid out otherwise.
    """
    rows, channels, steps = x.shape
    size = weight.shape[1]
    if steps != 1 or activation not in ("silu", "swish", None):
        raise ValueError(f"one token and silu, got {steps} tokens and {activation!r}")
    if window.shape != (rows, channels, size) or window.stride()[1:] != (size, 1):
        raise ValueError(f"the window is [{rows}, {channels}, {size}], got {tuple(window.shape)}")
    if not weight.is_contiguous():
        raise ValueError("weights are contiguous")
    out = torch.empty((rows, channels, 1), dtype=x.dtype, device=x.device)
    launch(
        conv_step_kernel,
        (triton.cdiv(channels, BLOCK), rows),
        x,
        window,
        weight,
        weight if bias is None else bias,
        out,
        channels,
        x.stride(0),
        x.stride(1),
        window.stride(0),
        K=size,
        WIDTH=triton.next_power_of_2(size),
        BLOCK=BLOCK,
        BIAS=bias is not None,
        SILU=activation is not None,
        num_warps=4,
    )
    return out
