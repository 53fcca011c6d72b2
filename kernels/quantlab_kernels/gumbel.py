"""Sampling noise of one step of every row: `quantlab.engine.sampling.gumbel` in one launch.

The words are those of the plain version, and so is the arithmetic on them, in FP64; logarithms may
differ in their last bit between math libraries.

Bytes: 8 a row and token, written once. Floor: those over the write bandwidth; at a vocabulary of
hundreds the launch is all there is to it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab_kernels.draws import COPY_STRIDE, philox

SAMPLING = tl.constexpr(255)
"""Copy index of sampling noise, `quantlab.engine.sampling.SAMPLING` (a test holds them equal)."""
BLOCK = 256
"""Quads of tokens of a program."""


@triton.jit
def _gumbel(word):
    # the middle of each of 2^32 equal cells: never 0 or 1
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(u))


@triton.jit
def gumbel_kernel(
    seed_ptr, question_ptr, repetition_ptr, step_ptr, out_ptr, vocabulary, BLOCK: tl.constexpr
):
    """One program per (block of quads, row). out [rows, vocabulary] FP64."""
    row = tl.program_id(1).to(tl.int64)
    quad = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(step_ptr + row).to(tl.uint32)
    question = tl.load(question_ptr + row).to(tl.uint32)
    place = (tl.load(repetition_ptr + row) + COPY_STRIDE * SAMPLING).to(tl.uint32)
    c0 = quad.to(tl.uint32)
    w0, w1, w2, w3 = philox(
        tl.load(seed_ptr + row),
        c0,
        tl.full(c0.shape, step, tl.uint32),
        tl.full(c0.shape, question, tl.uint32),
        tl.full(c0.shape, place, tl.uint32),
    )
    token = 4 * quad
    out = out_ptr + row * vocabulary + token
    tl.store(out, _gumbel(w0), mask=token < vocabulary)
    tl.store(out + 1, _gumbel(w1), mask=token + 1 < vocabulary)
    tl.store(out + 2, _gumbel(w2), mask=token + 2 < vocabulary)
    tl.store(out + 3, _gumbel(w3), mask=token + 3 < vocabulary)


def gumbel_rows(
    *, seed: Tensor, question: Tensor, repetition: Tensor, step: Tensor, vocabulary: int
) -> Tensor:
    """Draw the noise of one step of every row.

    Args:
        seed: [rows] int64, the bit patterns of 64-bit seeds; as all, contiguous.
        question: [rows] int64 ids.
        repetition: [rows] int64.
        step: [rows] int64 tokens of output before this one.
        vocabulary: V.

    Returns:
        [rows, V] FP64 standard Gumbel values.
    """
    rows = len(seed)
    out = torch.empty((rows, vocabulary), dtype=torch.float64, device=seed.device)
    gumbel_kernel[(triton.cdiv(vocabulary, 4 * BLOCK), rows)](
        seed, question, repetition, step, out, vocabulary, BLOCK=BLOCK
    )
    return out
