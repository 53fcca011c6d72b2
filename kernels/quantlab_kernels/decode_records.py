"""Records of a window's tokens: loading and appending them. BF16 is kept as int16 bit patterns."""

import triton
import triton.language as tl

from quantlab_kernels.rounding import round_bf16


@triton.jit
def load_record(ptrs, mask, RECORD: tl.constexpr):
    """Load records as FP32."""
    x = tl.load(ptrs, mask=mask, other=0)
    return record_value(x, RECORD)


@triton.jit
def record_value(x, RECORD: tl.constexpr):
    """Widen a loaded record to FP32."""
    if RECORD == "bf16":
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def store_record(ptrs, x, mask, RECORD: tl.constexpr):
    """Round FP32 to a record and append it."""
    if RECORD == "bf16":
        bits = round_bf16(x, x, False).to(tl.int32, bitcast=True) >> 16
        tl.store(ptrs, bits.to(tl.int16), mask=mask)
    elif RECORD == "fp16":
        tl.store(ptrs, x.to(tl.float16), mask=mask)
    else:
        tl.store(ptrs, x, mask=mask)
