"""Casts: FP32 states to stored codes and scales.

One program casts a tile of state rows, for NVFP4, whose FP32 scale spans a state, one whole state.
It reads each value once, forms scales and codes on chip and writes them. A lane owns groups of 16
elements along dk (8 of 16-bit formats): it reads them by 16-byte loads, four elements each, and
writes their codes as one vector of 16 bytes (8 for four-bit codes), so that an NVFP4 scale takes no
other lane and the four elements of a load take one Philox call. The loads of a warp touch quarters
(halves) of lines that are whole once all are done.

Rounding points: stores.py (scales), rounding.py (elements); random words as draws.py counts them.
NaN codes, NaN scales of poisoned blocks and signs of zeros are those of `quantlab.formats.encode`.

Bytes per element at 128 x 128: 6 (FP16, BF16), 5.03 (FP8, INT8), 4.56 (NVFP4), 4.53 (INT4). At an
H200's copy rate of 4.28 TB/s the floor of 2**30 elements is 1.51, 1.26, 1.14 and 1.14 ms. What else
binds is the rate of integer operations: reports/performance/README.md counts the compiled code.

Not covered: formats that `store_kind` refuses; strided inputs (refused).
Reference: quantlab.formats.encode.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from quantlab.formats import Format
from quantlab.formats.stored import StoredStates
from quantlab_kernels.codes import (
    block_codes,
    e4m3_size_codes,
    packed_codes,
    packed_halves,
    packed_pairs,
    unscaled_codes,
)
from quantlab_kernels.drawn import UNSEEN
from quantlab_kernels.draws import COPY_STRIDE, quad_words, single_words
from quantlab_kernels.rounding import largest_size
from quantlab_kernels.stores import (
    scales_of,
    signed_seed,
    store_kind,
    tile_shape,
)

SCALE_BLOCKS = {"fp8": 128, "nvfp4": 16, "int8": None, "int4": None}
"""Elements along dk that share a scale, by FORMAT; None for a whole state row."""
CODE_TYPES = {"fp16": torch.uint16, "bf16": torch.uint16, "int8": torch.int8}
"""Type of the codes where it is not uint8."""
CODE_BITS = {"fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "nvfp4": 4, "int4": 4}


@triton.jit
def _group_scales(size_bits, FORMAT: tl.constexpr, SHARE: tl.constexpr):
    """Find scales from the largest magnitudes of groups, SHARE of which share one.

    Returns:
        stored scales [groups / SHARE], state scale, and used scales [groups].
    """
    GROUPS: tl.constexpr = size_bits.shape[0]
    if SHARE == 1:
        stored, state, used = scales_of(size_bits, FORMAT, FUSED=False)
    else:
        shared_bits = tl.max(tl.reshape(size_bits, [GROUPS // SHARE, SHARE]), axis=1)
        stored, state, used = scales_of(shared_bits, FORMAT, FUSED=False)
        used = tl.broadcast_to(used[:, None], [GROUPS // SHARE, SHARE])
        used = tl.reshape(used, [GROUPS])
    return stored, state, used


@triton.jit(do_not_specialize=["seed", "layer_copy", "flush"])
def encode_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    state_scale_ptr,
    streams_ptr,
    seed,
    layer_copy,
    flush,
    state_rows,
    tile_rows,
    tiles,
    dk,
    code_width,
    scales_per_row,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    WHOLE: tl.constexpr,
    BITS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Cast `tile_rows` of the `state_rows` state rows of one row of the batch.

    WHOLE: dk is a multiple of 16, so that codes are written as 32-bit numbers; else one by one.
    SHARE groups share a scale; `code_width` is a state row's codes in what the pointer points at.
    """
    QUADS: tl.constexpr = 2 if BITS == 16 else 4
    PER_ROW: tl.constexpr = BLOCK_K // (4 * QUADS)
    GROUPS: tl.constexpr = BLOCK_R * PER_ROW
    row = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    first = tile * tile_rows
    start = row.to(tl.int64) * state_rows + first  # state rows before this tile
    group = tl.arange(0, GROUPS)
    inner = group // PER_ROW
    group_of_row = group % PER_ROW
    live = (inner < tile_rows) & (first + inner < state_rows)
    place = tl.arange(0, 4)[None, :]
    if SR:
        stream = tl.load(streams_ptr + row)

    amax = tl.zeros([GROUPS], tl.float32)
    values = ()
    for q in tl.static_range(QUADS):
        channel = (group_of_row * QUADS + q)[:, None] * 4 + place
        mask = live[:, None] & (channel < dk)
        x = tl.load(x_ptr + start * dk + inner[:, None] * dk + channel, mask=mask, other=0.0)
        if BITS < 16:
            even, odd = tl.split(tl.reshape(x, [GROUPS, 2, 2]))
            a, b = tl.split(largest_size(even, odd))
            amax = largest_size(amax, largest_size(a, b))
        values = values + (x,)  # noqa: RUF005 (kernels know no unpacking)

    after = tl.zeros([GROUPS], tl.int32)
    if BITS < 16:
        stored, state, used = _group_scales(amax.to(tl.int32, bitcast=True), FORMAT, SHARE)
        # 0, since scales are positive (of poisoned blocks no draw matters), but the compiler cannot
        # know: else draws are formed while values are being loaded, and fill the registers
        after = used.to(tl.int32, bitcast=True) >> 31
        scale = tl.arange(0, GROUPS // SHARE)
        scale_row = scale // (PER_ROW // SHARE)
        scale_of_row = scale % (PER_ROW // SHARE)
        scale_live = (scale_row < tile_rows) & (first + scale_row < state_rows)
        scale_live &= scale_of_row < scales_per_row
        if FORMAT == "nvfp4":
            tl.store(state_scale_ptr + row.to(tl.int64) * tiles + tile, state)
            stored = e4m3_size_codes(stored).to(tl.int8)
        scale_place = (start + scale_row) * scales_per_row + scale_of_row
        tl.store(scales_ptr + scale_place, stored, mask=scale_live)

    packed = ()
    for q in tl.static_range(QUADS):
        x = values[q]
        channel = (group_of_row * QUADS + q)[:, None] * 4 + place
        words = x
        if SR:
            if WHOLE:
                quad = (first + inner) * (dk // 4) + group_of_row * QUADS + q
                words = quad_words(seed, layer_copy, stream, flush, quad + after)
                words = tl.reshape(words, [GROUPS, 4])
            else:
                element = (first + inner)[:, None] * dk + channel
                words = single_words(seed, layer_copy, stream, flush, element)
        if BITS == 16:
            codes = unscaled_codes(x, words, FORMAT, SR)
        else:
            codes = block_codes(x, used, words, FORMAT, SR, FUSED=False)
        if WHOLE and BITS == 16:
            packed = packed + packed_halves(codes)
        elif WHOLE:
            number, last = packed_codes(codes, BITS)
            packed = packed + (number.to(tl.int32, bitcast=True),)  # noqa: RUF005
            if FORMAT == "nvfp4" and SR:
                # likewise 0, once these codes are formed
                after = (last >> UNSEEN).to(tl.int32) & 1
        elif BITS == 4:
            pair = packed_pairs(codes)
            byte = (group_of_row * QUADS + q)[:, None] * 2 + tl.arange(0, 2)[None, :]
            code_place = (start + inner)[:, None] * code_width + byte
            code_mask = live[:, None] & (byte < code_width)
            tl.store(codes_ptr + code_place, pair.to(tl.int8), mask=code_mask)
        else:
            low = codes if BITS == 16 else codes >> 24
            code_place = (start + inner)[:, None] * code_width + channel
            code_mask = live[:, None] & (channel < dk)
            tl.store(codes_ptr + code_place, low.to(codes_ptr.dtype.element_ty), mask=code_mask)

    if WHOLE:
        # code_width counts 32-bit numbers here
        if BITS == 4:
            out = tl.join(packed[0] | packed[1] << 16, packed[2] | packed[3] << 16)
        else:
            out = tl.join(tl.join(packed[0], packed[2]), tl.join(packed[1], packed[3]))
            out = tl.reshape(out, [GROUPS, 4])
        NUMBERS: tl.constexpr = out.shape[1]
        number = group_of_row[:, None] * NUMBERS + tl.arange(0, NUMBERS)[None, :]
        code_place = (start + inner)[:, None] * code_width + number
        tl.store(codes_ptr + code_place, out, mask=live[:, None] & (number < code_width))


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLaunch:
    """How a cast or decoder is cut and launched; changes no bit.

    Attributes:
        elements: padded elements of a program's tile, unless it holds a whole state.
        warps: warps of a program.
        state_warps: warps of a program that holds a state of 128 x 128; of other states in
            proportion, so that a lane holds as many values.
        state_registers: most registers of a lane then, so that two programs of 128 x 128 fit a
            multiprocessor: one loads while the other computes.
    """

    elements: int = 4096
    warps: int = 4
    state_warps: int = 16
    state_registers: int = 64

    def tile(self, dv: int, dk: int) -> tuple[int, int]:
        """Find the padded rows and columns of a tile."""
        _, block_k = tile_shape(dv, dk)
        return max(1, self.elements // block_k), block_k

    def state_tile(self, dv: int, dk: int) -> tuple[int, int, int]:
        """Find the padded rows and columns of a tile that holds a state, and warps.

        Raises:
            ValueError: a state that is too large for one program.
        """
        block_v, block_k = tile_shape(dv, dk)
        if block_v * block_k > 1 << 15:
            raise ValueError(
                f"a state scale needs the whole state in one program: {dv} x {dk} is too large "
                "(32,768 elements at most); use quantlab.formats.encode"
            )
        warps = self.state_warps * block_v * block_k // (128 * 128)
        return block_v, block_k, min(32, max(1, warps))


ENCODE_LAUNCHES = {
    ("fp16", False): TileLaunch(elements=2048, warps=8),
    ("bf16", False): TileLaunch(elements=2048, warps=8),
    ("fp16", True): TileLaunch(elements=1024, warps=2),
    ("bf16", True): TileLaunch(elements=2048),
    ("fp8", True): TileLaunch(elements=2048, warps=2),
}
"""Launch of a cast by FORMAT and SR, where it is not TileLaunch().

The fastest of sweeps of 2**28 elements on an H200 (`quantlab bench casts --sweep` measures them);
the last is reports/performance/launches/casts.json.
"""
DECODE_LAUNCHES = {
    "fp16": TileLaunch(elements=1024),
    "bf16": TileLaunch(elements=1024),
    "fp8": TileLaunch(elements=512, warps=2),
    "int8": TileLaunch(elements=512, warps=1),
    "nvfp4": TileLaunch(elements=1024, warps=2),
    "int4": TileLaunch(elements=1024, warps=1),
}
"""Launch of a decoder by FORMAT; likewise."""


def encode(
    x: Tensor,
    fmt: Format,
    *,
    seed: int,
    layer: int,
    copy: int,
    streams: Tensor,
    flush: int,
    launch: TileLaunch | None = None,
) -> StoredStates:
    """Cast states to their codes and scales.

    Args:
        x: [rows, H, dv, dk] FP32, contiguous.
        fmt: the format.
        seed: 64-bit seed.
        layer: ordinal of the recurrent layer.
        copy: 0 recurrence or shared, 1 read.
        streams: int64 [rows] global stream ids, on x's device.
        flush: number of the store.
        launch: how to cut the work; changes no bit.

    Returns:
        Codes and scales, bit for bit those of `quantlab.formats.encode`, four-bit codes packed.

    Raises:
        ValueError: a format without codes here, or a tensor of another shape, layout or device.
        TypeError: a tensor of another type.
    """
    kind = store_kind(fmt)
    if kind.name == "fp32":
        raise ValueError("float32 is what a state is computed in: there is nothing to cast")
    check_codes(fmt, kind.name)
    check_tensor("x", x, torch.float32, 4)
    check_tensor("streams", streams, torch.int64, 1)
    rows, heads, dv, dk = x.shape
    if streams.shape[0] != rows or streams.device != x.device:
        raise ValueError(
            f"streams are one id per row on {x.device}, got {tuple(streams.shape)} for "
            f"{rows} rows on {streams.device}"
        )
    out = empty_states(fmt, kind.name, rows, heads, dv, dk, x.device)
    if x.numel() == 0:
        return out
    whole_state = kind.name == "nvfp4"
    launch = launch or ENCODE_LAUNCHES.get((kind.name, kind.sr), TileLaunch())
    if whole_state:
        block_r, block_k, warps = launch.state_tile(dv, dk)
        limit = {"maxnreg": launch.state_registers}
    else:
        (block_r, block_k), warps, limit = launch.tile(dv, dk), launch.warps, {}
    tile_rows = dv if whole_state else block_r
    tiles = heads if whole_state else triton.cdiv(heads * dv, block_r)
    bits = fmt.element.bits
    group = 8 if bits == 16 else 16
    whole = dk % 16 == 0
    codes = out.codes.view(torch.int32) if whole else signed_view(out.codes)
    scales = out.scales
    encode_kernel[(rows * tiles,)](
        x,
        codes,
        codes if scales is None else signed_view(scales),
        codes if out.state_scale is None else out.state_scale,
        streams,
        signed_seed(seed),
        layer + copy * COPY_STRIDE.value,
        flush,
        heads * dv,
        tile_rows,
        tiles,
        dk,
        codes.shape[-1],
        0 if scales is None else scales.shape[-1],
        FORMAT=kind.name,
        SR=kind.sr,
        WHOLE=whole,
        BITS=bits,
        SHARE=min(SCALE_BLOCKS.get(kind.name) or block_k, block_k) // group,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        num_warps=warps,
        enable_fp_fusion=False,
        **limit,
    )
    return out


def empty_states(
    fmt: Format, name: str, rows: int, heads: int, dv: int, dk: int, device: torch.device
) -> StoredStates:
    """Allocate codes and scales."""
    packed = fmt.element.bits == 4
    width = -(-dk // 2) if packed else dk
    code_type = CODE_TYPES.get(name, torch.uint8)
    scales = state_scale = None
    if name in SCALE_BLOCKS:
        block = SCALE_BLOCKS[name]
        per_row = 1 if block is None else -(-dk // block)
        scale_type = torch.uint8 if name == "nvfp4" else torch.float32
        scales = torch.empty((rows, heads, dv, per_row), dtype=scale_type, device=device)
        if name == "nvfp4":
            state_scale = torch.empty((rows, heads, 1, 1), dtype=torch.float32, device=device)
    codes = torch.empty((rows, heads, dv, width), dtype=code_type, device=device)
    return StoredStates(fmt=fmt, dk=dk, codes=codes, scales=scales, state_scale=state_scale)


def check_codes(fmt: Format, name: str) -> None:
    """Refuse a format whose codes have no layout here.

    Raises:
        ValueError: it has none.
    """
    if name not in CODE_BITS:
        raise ValueError(
            f"the kernels have no codes of {fmt.short}; they have those of {', '.join(CODE_BITS)}"
        )


def check_tensor(name: str, x: Tensor, dtype: torch.dtype, ndim: int) -> None:
    """Refuse a tensor that the kernels would misread.

    Raises:
        ValueError: wrong axes, strides or device.
        TypeError: wrong type.
    """
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {x.dtype}")
    if x.ndim != ndim:
        raise ValueError(f"{name} has {ndim} axes, got shape {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got strides {x.stride()}: a copy is the caller's to make"
        )
    if not x.is_cuda and isinstance(encode_kernel, JITFunction):
        raise ValueError(
            f"the Triton casts need a CUDA device, {name} is on {x.device} "
            "(TRITON_INTERPRET=1 runs them on the CPU, slowly)"
        )


def signed_view(x: Tensor) -> Tensor:
    """View unsigned codes as the integers that Triton stores."""
    views = {torch.uint16: torch.int16, torch.uint8: torch.int8}
    return x.view(views[x.dtype]) if x.dtype in views else x
