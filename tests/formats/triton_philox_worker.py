"""Draw words with Triton's own Philox under its interpreter and save them; run as a script.

A process of its own: the interpreter must be chosen before Triton is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def words_kernel(out, seed, flush, stream, place, quads, ROUNDS: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    quad = tl.program_id(0) * N + tl.arange(0, N)
    # All four counter words must be uint32 tensors: an int64 one silently selects Philox-4x64.
    zero = tl.zeros([N], tl.uint32)
    c0 = quad.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        seed,
        c0,
        zero + tl.load(flush).to(tl.uint32),
        zero + tl.load(stream).to(tl.uint32),
        zero + tl.load(place).to(tl.uint32),
        n_rounds=ROUNDS,
    )
    at = out + quad * 4
    mask = quad < quads
    tl.store(at, w0.to(tl.int64), mask=mask)
    tl.store(at + 1, w1.to(tl.int64), mask=mask)
    tl.store(at + 2, w2.to(tl.int64), mask=mask)
    tl.store(at + 3, w3.to(tl.int64), mask=mask)


def main(path: str, cases: list[list[int]]) -> None:
    """Save one int64 array of words per case (seed, flush, stream, place, quads, rounds)."""
    found = {}
    for i, (seed, flush, stream, place, quads, rounds) in enumerate(cases):
        out = torch.zeros(quads * 4, dtype=torch.int64)
        words = [torch.tensor([c], dtype=torch.int64) for c in (flush, stream, place)]
        words_kernel[(-(-quads // 4096),)](out, seed, *words, quads, ROUNDS=rounds, N=4096)
        found[str(i)] = out.numpy()
    np.savez(path, **found)


if __name__ == "__main__":
    import json

    main(sys.argv[1], json.loads(sys.argv[2]))
