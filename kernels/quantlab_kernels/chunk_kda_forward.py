"""Forward kernels of chunked Kimi delta attention (decay per key channel), to train the zoo.

One head, one chunk of C tokens, state S [dk, dv] at its start, G [C, dk] the decay logs cumulated
within the chunk (inclusive), γ = exp(G), ⊙ per element:

    pairs          P_ij = Σ_d q_id k_jd exp(G_id − G_jd) (i ≥ j)
                   A_ij = β_i Σ_d k_id k_jd exp(G_id − G_jd) (i > j),  T = (I + A)^-1
                   U = T diag(β) V,  W = T diag(β) (γ ⊙ K),  V' = U − W S
    outputs        O  = (γ ⊙ Q) S + P V'
    next state     S' = exp(G_C) ⊙ S + (exp(G_C − G) ⊙ K)ᵀ V'

Source: Kimi Team 2025 (Kimi Linear), section 3. A per-channel decay cannot be taken out of the
pairs' sum, and K / γ overflows. Pairs are therefore formed by halving: at level s, blocks of 2s
tokens meet at the last token m of their first half, and a pair (i in the second half, j in the
first) is exp(G_i − G_m) · exp(G_m − G_j), both factors at most 1 whatever the decays. With E =
exp(−|G − G_m|) a level is one product (Q ⊙ E)(K ⊙ E)ᵀ under a mask; log2 C levels cover every pair
i > j once, and the diagonal needs no decay.

Rounding points: dot operands, stored tensors and the stored S in the inputs' dtype (BF16 in
training); accumulation, decays, the substitution and the running S in FP32; the inverse's products
in TF32 on a GPU (see `chunk_train_forward`). Under FP32 inputs nothing is rounded by the
interpreter, which is how the interpreter tests run.

Bytes per token and head of 128, BF16 (FP32 decays): about 3 KB forward, of which 512 are S. Not
covered: T not a multiple of C, packed sequences, an initial state, keys shared by heads (Kimi
Linear has none).
"""

import triton
import triton.language as tl

from quantlab_kernels.chunk_train_forward import unit_lower_inverse


@triton.jit
def cumulate_kernel(
    x_ptr, y_ptr, N: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr
):
    """Sum [tokens, N] FP32 along the tokens of every chunk. Grid: (chunks of all rows, N / BLOCK).

    REVERSE sums from the chunk's end, which is the gradient.
    """
    tok = tl.program_id(0) * C + tl.arange(0, C)
    at = tok[:, None] * N + (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    tl.store(y_ptr + at, tl.cumsum(tl.load(x_ptr + at), 0, reverse=REVERSE))


@triton.jit
def level_decay(b, b_ptr, first, r, h, d, level, H: tl.constexpr, DK: tl.constexpr):
    """E [C, channels] of one level: exp(−|G − G_m|), m the end of the first half of r's block.

    `first` is the chunk's first token; b holds G of the chunk's channels d.
    """
    half = 1 << level
    middle = ((r >> (level + 1)) << (level + 1)) + half - 1
    m = tl.load(b_ptr + ((first + middle)[:, None] * H + h) * DK + d[None, :])
    return tl.exp(-tl.abs(b - m))


@triton.jit
def level_pairs(r, level):
    """Mask [C, C] of a level: i in the second half, j in the first half of one block."""
    same = (r[:, None] >> (level + 1)) == (r[None, :] >> (level + 1))
    return same & (((r[:, None] >> level) & 1) == 1) & (((r[None, :] >> level) & 1) == 0)


@triton.jit
def intra_kernel(
    # tensors
    q_ptr, k_ptr, v_ptr, b_ptr, beta_ptr, t_ptr, w_ptr, u_ptr, p_ptr, qg_ptr, kd_ptr,
    # dimensions
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr, LEVELS: tl.constexpr, SUB: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write T, W, U, P, γ ⊙ Q and exp(G_C − G) ⊙ K of one chunk. Grid: (chunks of all rows, H)."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    r = tl.arange(0, C)
    tok = n * C + r
    beta = tl.load(beta_ptr + tok * H + h)
    a = tl.zeros([C, C], tl.float32)
    p = tl.zeros([C, C], tl.float32)
    for ik in tl.static_range(0, DK // BK):
        d = ik * BK + tl.arange(0, BK)
        at = (tok[:, None] * H + h) * DK + d[None, :]
        b = tl.load(b_ptr + at)
        last = tl.load(b_ptr + ((n * C + C - 1) * H + h) * DK + d)
        q_low = tl.load(q_ptr + at)
        q = q_low.to(tl.float32)
        k = tl.load(k_ptr + at).to(tl.float32)
        tl.store(qg_ptr + at, (q * tl.exp(b)).to(q_low.dtype))
        tl.store(kd_ptr + at, (k * tl.exp(last[None, :] - b)).to(q_low.dtype))
        p += tl.where(r[:, None] == r[None, :], tl.sum(q * k, 1)[:, None], 0.0)
        for level in range(0, LEVELS):
            decay = level_decay(b, b_ptr, n * C, r, h, d, level, H, DK)
            pairs = level_pairs(r, level)
            ke = (k * decay).to(q_low.dtype)
            qe = (q * decay).to(q_low.dtype)
            a += tl.where(pairs, tl.dot(ke, tl.trans(ke), input_precision="ieee"), 0.0)
            p += tl.where(pairs, tl.dot(qe, tl.trans(ke), input_precision="ieee"), 0.0)
    square = ((n * H + h) * C + r[:, None]) * C + r[None, :]
    tl.store(p_ptr + square, p.to(p_ptr.dtype.element_ty))
    t = unit_lower_inverse(beta[:, None] * a, r, C, SUB).to(t_ptr.dtype.element_ty)
    tl.store(t_ptr + square, t)
    for ik in tl.static_range(0, DK // BK):
        at = (tok[:, None] * H + h) * DK + (ik * BK + tl.arange(0, BK))[None, :]
        kb = tl.load(k_ptr + at).to(tl.float32) * beta[:, None] * tl.exp(tl.load(b_ptr + at))
        tl.store(w_ptr + at, tl.dot(t, kb.to(t.dtype), input_precision="ieee").to(t.dtype))
    e = tl.arange(0, DV)
    at = (tok[:, None] * H + h) * DV + e[None, :]
    vb = tl.load(v_ptr + at).to(tl.float32) * beta[:, None]
    tl.store(u_ptr + at, tl.dot(t, vb.to(t.dtype), input_precision="ieee").to(t.dtype))


@triton.jit
def states_kernel(
    # tensors
    kd_ptr, w_ptr, u_ptr, b_ptr, s_ptr, vn_ptr,
    # dimensions
    chunks, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write S at every chunk's start and V'. Grid: (DV / BV, rows · H); `chunks` is per row."""
    row = tl.program_id(1) // H
    h = tl.program_id(1) % H
    r = tl.arange(0, C)
    d = tl.arange(0, DK)
    e = tl.program_id(0) * BV + tl.arange(0, BV)
    s = tl.zeros([DK, BV], tl.float32)
    for i in range(0, chunks):
        n = row * chunks + i
        tok = n * C + r
        key = (tok[:, None] * H + h) * DK + d[None, :]
        value = (tok[:, None] * H + h) * DV + e[None, :]
        kd = tl.load(kd_ptr + key)
        w = tl.load(w_ptr + key)
        u = tl.load(u_ptr + value)
        last = tl.load(b_ptr + ((n * C + C - 1) * H + h) * DK + d)
        s_low = s.to(kd.dtype)
        tl.store(s_ptr + ((n * H + h) * DK + d[:, None]) * DV + e[None, :], s_low)
        vn = (u.to(tl.float32) - tl.dot(w, s_low, input_precision="ieee")).to(kd.dtype)
        tl.store(vn_ptr + value, vn)
        s = s * tl.exp(last)[:, None] + tl.dot(tl.trans(kd), vn, input_precision="ieee")


@triton.jit
def output_kernel(
    # tensors
    qg_ptr, p_ptr, vn_ptr, s_ptr, o_ptr,
    # dimensions
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr,
):  # fmt: skip
    """Write O of one chunk and head. Grid: (chunks of all rows, H)."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    r = tl.arange(0, C)
    d = tl.arange(0, DK)
    e = tl.arange(0, DV)
    tok = n * C + r
    qg = tl.load(qg_ptr + (tok[:, None] * H + h) * DK + d[None, :])
    s = tl.load(s_ptr + ((n * H + h) * DK + d[:, None]) * DV + e[None, :])
    o = tl.dot(qg, s, input_precision="ieee")
    p = tl.load(p_ptr + ((n * H + h) * C + r[:, None]) * C + r[None, :])
    at = (tok[:, None] * H + h) * DV + e[None, :]
    o += tl.dot(p, tl.load(vn_ptr + at), input_precision="ieee")
    tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty))
