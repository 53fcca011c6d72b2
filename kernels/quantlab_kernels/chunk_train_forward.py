"""Forward kernels of the chunked gated linear recurrence used to train the zoo.

One head, one chunk of C tokens, state S [dk, dv] at its start, b the decay logs cumulated within
the chunk (inclusive), γ = exp(b), Γ_ij = exp(b_i − b_j) for i ≥ j:

    delta rule     A_ij = β_i Γ_ij k_i·k_j (i > j),  T = (I + A)^-1
                   U = T diag(β) V,  W = T diag(β γ) K,  V' = U − W S
    otherwise      V' = V
    outputs        O  = diag(γ) Q S + (Q Kᵀ ⊙ Γ) V'
    next state     S' = exp(b_C) S + (diag(exp(b_C − b)) K)ᵀ V'

Source: Yang, Kautz, Hatamizadeh 2024 (Gated Delta Networks), section 3.3; Dao, Gu 2024 (Mamba-2),
section 6. Kernels: `wy_kernel` (T, U, W; parallel over chunks), `states_kernel` (V' and S at every
chunk's start; sequential, parallel over rows, heads and blocks of dv), `output_kernel` (parallel).

Rounding points: dot operands, U, W, T, V', O and the stored S are in the inputs' dtype (BF16 in
training); accumulation, decays, the substitution and the running S in FP32; the inverse's three
products in TF32 on a GPU, whose 2^-11 is below the rounding of T to BF16. Under FP32 inputs
nothing is rounded by the interpreter, which is how the interpreter tests run (its BF16 cast
truncates).

Bytes per token and GDN layer (2 key, 4 value heads of 128, C = 64), BF16: 12 KB, of which 4 KB are
S written and read. Not covered: T not a multiple of C, packed sequences, an initial state.
"""

import triton
import triton.language as tl

C = 64
"""Tokens in a chunk. 64 keeps T's tile and its inverse in registers."""

SUB = 16
"""Block of the inverse's first stage, by substitution; the rest is three products of [C, C]
tiles.
"""


@triton.jit
def decay_tile(b, r, STRICT: tl.constexpr):
    """Γ [C, C]: exp(b_i − b_j) on and below the diagonal (below it only if STRICT), else 0."""
    lower = r[:, None] > r[None, :] if STRICT else r[:, None] >= r[None, :]
    # The difference is masked before the exponential: above the diagonal it may overflow.
    return tl.where(lower, tl.exp(tl.where(lower, b[:, None] - b[None, :], 0.0)), 0.0)


@triton.jit
def unit_lower_inverse(a, r, C: tl.constexpr, SUB: tl.constexpr):
    """(I + a)^-1 of a strictly lower [C, C] FP32 tile, C / SUB ≤ 4.

    Diagonal blocks of SUB rows by substitution, all at once; then, with D their block-diagonal
    inverse and N = a_off D (block strictly lower, N⁴ = 0), the inverse is D (I − N)(I + N²).
    Powers of the whole tile would need fewer lines, but their entries reach C(63, 32) and cancel.
    """
    NB: tl.constexpr = C // SUB
    blk = r // SUB
    same = blk[:, None] == blk[None, :]
    eye = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    nb = tl.arange(0, NB)
    s = tl.arange(0, SUB)
    same4 = nb[:, None, None, None] == nb[None, None, :, None]
    a4 = tl.reshape(tl.where(same, a, 0.0), [NB, SUB, NB, SUB])
    d = tl.sum(a4, axis=2)  # [NB, SUB, SUB]: off-diagonal blocks are zero
    t = tl.zeros([NB, SUB, SUB], tl.float32) + tl.where(
        s[None, :, None] == s[None, None, :], 1.0, 0.0
    )
    for i in tl.static_range(1, SUB):
        pick = s[None, :, None] == i
        row = tl.sum(tl.where(pick, d, 0.0), axis=1)  # [NB, SUB]: row i of each block of a
        upd = tl.sum(
            row[:, :, None] * t, axis=1
        )  # row i of a · t, rows below i of t still identity
        t = tl.where(pick, t - upd[:, None, :], t)
    wide = tl.where(same4, tl.broadcast_to(t[:, :, None, :], [NB, SUB, NB, SUB]), 0.0)
    inv = tl.reshape(wide, [C, C])
    n = tl.dot(tl.where(same, 0.0, a), inv, input_precision="tf32")
    n2 = tl.dot(n, n, input_precision="tf32")
    right = tl.dot(eye - n, eye + n2, input_precision="tf32")
    return tl.dot(inv, right, input_precision="tf32")


@triton.jit
def wy_kernel(
    # tensors
    k_ptr, v_ptr, b_ptr, beta_ptr, t_ptr, w_ptr, u_ptr,
    # dimensions
    H: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Write T, W, U of one chunk and value head. Grid: (chunks of all rows, H)."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    r = tl.arange(0, C)
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    tok = n * C + r
    hk = h // (H // HK)
    k = tl.load(k_ptr + (tok[:, None] * HK + hk) * DK + dk[None, :])
    b = tl.load(b_ptr + tok * H + h)
    beta = tl.load(beta_ptr + tok * H + h)
    kk = tl.dot(k, tl.trans(k), input_precision="ieee")
    a = beta[:, None] * kk * decay_tile(b, r, True)
    t = unit_lower_inverse(a, r, C, SUB).to(k.dtype)
    tl.store(t_ptr + ((n * H + h) * C + r[:, None]) * C + r[None, :], t)
    kb = (k.to(tl.float32) * (beta * tl.exp(b))[:, None]).to(k.dtype)
    w = tl.dot(t, kb, input_precision="ieee")
    tl.store(w_ptr + (tok[:, None] * H + h) * DK + dk[None, :], w.to(k.dtype))
    v = tl.load(v_ptr + (tok[:, None] * H + h) * DV + dv[None, :])
    vb = (v.to(tl.float32) * beta[:, None]).to(k.dtype)
    u = tl.dot(t, vb, input_precision="ieee")
    tl.store(u_ptr + (tok[:, None] * H + h) * DV + dv[None, :], u.to(k.dtype))


@triton.jit
def states_kernel(
    # tensors
    k_ptr, w_ptr, u_ptr, b_ptr, s_ptr, vn_ptr,
    # dimensions
    chunks, H: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr, BV: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    """Write S at every chunk's start and V'. Grid: (DV / BV, rows · H); `chunks` is per row."""
    iv = tl.program_id(0)
    row = tl.program_id(1) // H
    h = tl.program_id(1) % H
    hk = h // (H // HK)
    r = tl.arange(0, C)
    dk = tl.arange(0, DK)
    dv = iv * BV + tl.arange(0, BV)
    s = tl.zeros([DK, BV], tl.float32)
    for i in range(0, chunks):
        n = row * chunks + i
        tok = n * C + r
        k = tl.load(k_ptr + (tok[:, None] * HK + hk) * DK + dk[None, :])
        u = tl.load(u_ptr + (tok[:, None] * H + h) * DV + dv[None, :])
        b = tl.load(b_ptr + tok * H + h)
        last = tl.load(b_ptr + (n * C + C - 1) * H + h)
        s_low = s.to(k.dtype)
        tl.store(s_ptr + ((n * H + h) * DK + dk[:, None]) * DV + dv[None, :], s_low)
        if IS_DELTA:
            w = tl.load(w_ptr + (tok[:, None] * H + h) * DK + dk[None, :])
            vn = (u.to(tl.float32) - tl.dot(w, s_low, input_precision="ieee")).to(k.dtype)
            tl.store(vn_ptr + (tok[:, None] * H + h) * DV + dv[None, :], vn)
        else:
            vn = u
        kd = (k.to(tl.float32) * tl.exp(last - b)[:, None]).to(k.dtype)
        s = s * tl.exp(last) + tl.dot(tl.trans(kd), vn, input_precision="ieee")


@triton.jit
def output_kernel(
    # tensors
    q_ptr, k_ptr, vn_ptr, b_ptr, s_ptr, o_ptr,
    # dimensions
    H: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr,
):  # fmt: skip
    """Write O of one chunk and value head. Grid: (chunks of all rows, H)."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    hk = h // (H // HK)
    r = tl.arange(0, C)
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    tok = n * C + r
    q = tl.load(q_ptr + (tok[:, None] * HK + hk) * DK + dk[None, :])
    k = tl.load(k_ptr + (tok[:, None] * HK + hk) * DK + dk[None, :])
    b = tl.load(b_ptr + tok * H + h)
    s = tl.load(s_ptr + ((n * H + h) * DK + dk[:, None]) * DV + dv[None, :])
    vn = tl.load(vn_ptr + (tok[:, None] * H + h) * DV + dv[None, :])
    p = tl.dot(q, tl.trans(k), input_precision="ieee") * decay_tile(b, r, False)
    o = tl.dot(q, s, input_precision="ieee") * tl.exp(b)[:, None]
    o += tl.dot(p.to(k.dtype), vn, input_precision="ieee")
    tl.store(o_ptr + (tok[:, None] * H + h) * DV + dv[None, :], o.to(k.dtype))
