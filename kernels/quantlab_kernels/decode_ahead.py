"""Asking for what a program will load next: it comes to the second-level cache meanwhile.

A program whose registers are full of one tile cannot have another one in flight, and few such
programs fit a multiprocessor: while they compute, memory would idle. A line asked for takes an
instruction and no register. Flushes with an FP32 or an NVFP4 copy gain by it, steps do not: many of
their programs fit (reports/performance/launches/ahead.json).
"""

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction


@triton.constexpr_function
def record_bytes(name):
    """Count the bytes of an element of a record."""
    return {"fp32": 4}.get(name, 2)


@triton.jit
def ask_ahead(addresses, mask):
    """Ask for the lines at int64 addresses where mask is set; it changes nothing."""
    mask = tl.broadcast_to(mask, addresses.shape).to(tl.int32)
    if COMPILED:
        tl.inline_asm_elementwise(
            "{ .reg .pred wanted; setp.ne.s32 wanted, $2, 0;"
            " @wanted prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [addresses, mask],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


LINE = tl.constexpr(128)
"""Bytes that a request brings; four requests of 32 bytes in its place measured no faster."""
COMPILED = tl.constexpr(isinstance(ask_ahead, JITFunction))
"""The interpreter has no caches and no assembly."""


@triton.jit
def ask_rows(start_ptr, row0, inside, ROW_BYTES: tl.constexpr, APART: tl.constexpr):
    """Ask for rows of memory.

    Args:
        start_ptr: of the pool.
        row0: int64 index of the first row.
        inside: [N] which of N rows exist; others are not asked for.
        ROW_BYTES: of a row that are wanted.
        APART: bytes from one row to the next.
    """
    LINES: tl.constexpr = triton.cdiv(ROW_BYTES, LINE)
    row = tl.arange(0, inside.shape[0])
    line = tl.arange(0, LINES)
    place = (row0 + row) * APART
    addresses = start_ptr.to(tl.int64) + place[:, None] + (line * LINE)[None, :]
    ask_ahead(addresses, inside[:, None])
