"""Decoders: stored codes and scales to FP32 states.

One program decodes a tile of state rows. Each code is read once and each value written once; a
value is the element's value times the stored scale, rounded to FP32 once (for NVFP4 the block scale
times the state scale is rounded first, as `quantlab.formats.decode` does).

Bytes per element: those of the cast (casts.py), which are the floor.
Not covered: strided inputs (refused).
Reference: quantlab.formats.decode.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab.formats.stored import StoredStates
from quantlab_kernels.casts import (
    DECODE_LAUNCHES,
    SCALE_BLOCKS,
    TileLaunch,
    check_codes,
    check_tensor,
    signed_view,
)
from quantlab_kernels.codes import e4m3_size_values, scaled_values, unpacked_pairs
from quantlab_kernels.stores import store_kind


@triton.jit
def decode_kernel(
    codes_ptr,
    scales_ptr,
    state_scale_ptr,
    out_ptr,
    all_rows,
    dv,
    dk,
    code_bytes,
    scales_per_row,
    FORMAT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode BLOCK_R of all state rows; BLOCK elements along dk share a scale."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    inner = tl.arange(0, BLOCK_R)
    channel = tl.arange(0, BLOCK_K)
    live = first + inner < all_rows
    place = inner[:, None] * dk + channel[None, :]
    mask = live[:, None] & (channel < dk)[None, :]
    if FORMAT == "fp16" or FORMAT == "bf16":
        codes = tl.load(codes_ptr + first * dk + place, mask=mask, other=0)
        if FORMAT == "fp16":
            values = codes.to(tl.float16, bitcast=True).to(tl.float32)
        else:
            values = (codes.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        PACKED: tl.constexpr = FORMAT == "nvfp4" or FORMAT == "int4"
        byte = tl.arange(0, BLOCK_K // 2 if PACKED else BLOCK_K)
        code_place = first * code_bytes + inner[:, None] * code_bytes + byte[None, :]
        code_mask = live[:, None] & (byte < code_bytes)[None, :]
        codes = tl.load(codes_ptr + code_place, mask=code_mask, other=0).to(tl.int32) & 0xFF
        if PACKED:
            codes = unpacked_pairs(codes)
        N: tl.constexpr = BLOCK_K // BLOCK
        block = tl.arange(0, N)
        scale_place = (first + inner[:, None]) * scales_per_row + block[None, :]
        scale_mask = live[:, None] & (block < scales_per_row)[None, :]
        scales = tl.load(scales_ptr + scale_place, mask=scale_mask, other=0)
        if FORMAT == "nvfp4":
            state = tl.load(state_scale_ptr + (first + inner) // dv, mask=live, other=0.0)
            scales = e4m3_size_values(scales.to(tl.int32) & 0xFF) * state[:, None]
        values = tl.reshape(scaled_values(codes, FORMAT), [BLOCK_R, N, BLOCK])
        values = tl.reshape(values * scales[:, :, None], [BLOCK_R, BLOCK_K])
    tl.store(out_ptr + first * dk + place, values, mask=mask)


def decode(stored: StoredStates, *, launch: TileLaunch | None = None) -> Tensor:
    """Load stored states.

    Args:
        stored: what `encode` returned, contiguous.
        launch: how to cut the work; changes no bit.

    Returns:
        [rows, H, dv, dk] FP32, bit for bit `quantlab.formats.decode` (NaN is some NaN).

    Raises:
        ValueError: a format without codes here, or a tensor of another layout or device.
    """
    name = store_kind(stored.fmt).name
    if name == "fp32":
        raise ValueError("float32 states have no codes: there is nothing to decode")
    check_codes(stored.fmt, name)
    codes, scales, dk = stored.codes, stored.scales, stored.dk
    check_tensor("codes", codes, codes.dtype, 4)
    if scales is not None:
        check_tensor("scales", scales, scales.dtype, 4)
    rows, heads, dv, width = codes.shape
    out = torch.empty((rows, heads, dv, dk), dtype=torch.float32, device=codes.device)
    if out.numel() == 0:
        return out
    launch = launch or DECODE_LAUNCHES.get(name, TileLaunch())
    block_r, block_k = launch.tile(dv, dk)
    all_rows = rows * heads * dv
    share = SCALE_BLOCKS.get(name)
    decode_kernel[(triton.cdiv(all_rows, block_r),)](
        signed_view(codes),
        signed_view(codes if scales is None else scales),
        codes if stored.state_scale is None else stored.state_scale,
        out,
        all_rows,
        dv,
        dk,
        width,
        0 if scales is None else scales.shape[-1],
        FORMAT=name,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        BLOCK=block_k if share is None else min(share, block_k),
        num_warps=launch.warps,
        enable_fp_fusion=False,
    )
    return out
