"""Backward kernels of chunked Kimi delta attention (forward: `chunk_kda_forward`).

With the forward's symbols, D the gradient of what follows it, K_d = exp(G_C − G) ⊙ K:

    dv_kernel        dV'₀ = Pᵀ dO                                          parallel over chunks
    dstates_kernel   dV' = dV'₀ + K_d dS_next                              sequential, in reverse
                     dS = exp(G_C) ⊙ dS_next + (γ ⊙ Q)ᵀ dO − Wᵀ dV'
    dwy_kernel       dP = dO V'ᵀ (lower), dW = −dV' Sᵀ, and through U = T diag(β) V and
                     W = T diag(β) (γ ⊙ K) with dU = dV':
                     dV, dT = dU (βV)ᵀ + dW (βγK)ᵀ,  dA = −Tᵀ dT Tᵀ (strictly lower)
    dqk_kernel       dQ, dK, dG of everything, parallel over chunks and blocks of channels

Decays enter only as q exp(G), k exp(G) (rows of P, A, W, γ ⊙ Q) and k exp(−G) (columns of P, A;
K_d), so dG = q ⊙ (rows' dq) + k ⊙ (rows' dk) − k ⊙ (columns' dk); on the last token of the chunk
comes what K_d's exp(G_C) and the state's, exp(G_C) ⊙ rowsum(dS_next ⊙ S), add. The gradient of a
log decay is the reverse sum of dG within the chunk (`cumulate_kernel`).

Rounding points as in the forward: dot operands and stored tensors in the inputs' dtype (dP, dA
too), sums and dG in FP32.
"""

import triton
import triton.language as tl

from quantlab_kernels.chunk_kda_forward import level_decay, level_pairs


@triton.jit
def dv_kernel(
    # tensors
    p_ptr, do_ptr, dv_ptr,
    # dimensions
    H: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr,
):  # fmt: skip
    """Write Pᵀ dO of one chunk and head. Grid: (chunks of all rows, H)."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    r = tl.arange(0, C)
    p = tl.load(p_ptr + ((n * H + h) * C + r[:, None]) * C + r[None, :])
    at = ((n * C + r)[:, None] * H + h) * DV + tl.arange(0, DV)[None, :]
    dv = tl.dot(tl.trans(p), tl.load(do_ptr + at), input_precision="ieee")
    tl.store(dv_ptr + at, dv.to(p.dtype))


@triton.jit
def dstates_kernel(
    # tensors
    qg_ptr, kd_ptr, w_ptr, b_ptr, do_ptr, dv0_ptr, ds_ptr, dv_ptr,
    # dimensions
    chunks, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write dS after every chunk and dV'. Grid: (DV / BV, rows · H)."""
    row = tl.program_id(1) // H
    h = tl.program_id(1) % H
    r = tl.arange(0, C)
    d = tl.arange(0, DK)
    e = tl.program_id(0) * BV + tl.arange(0, BV)
    ds = tl.zeros([DK, BV], tl.float32)
    for i in range(0, chunks):
        n = row * chunks + chunks - 1 - i
        tok = n * C + r
        key = (tok[:, None] * H + h) * DK + d[None, :]
        value = (tok[:, None] * H + h) * DV + e[None, :]
        kd = tl.load(kd_ptr + key)
        qg = tl.load(qg_ptr + key)
        w = tl.load(w_ptr + key)
        do = tl.load(do_ptr + value)
        dv = tl.load(dv0_ptr + value)
        last = tl.load(b_ptr + ((n * C + C - 1) * H + h) * DK + d)
        ds_low = ds.to(kd.dtype)
        tl.store(ds_ptr + ((n * H + h) * DK + d[:, None]) * DV + e[None, :], ds_low)
        dvn = (dv.to(tl.float32) + tl.dot(kd, ds_low, input_precision="ieee")).to(kd.dtype)
        tl.store(dv_ptr + value, dvn)
        ds = ds * tl.exp(last)[:, None] + tl.dot(tl.trans(qg), do, input_precision="ieee")
        ds -= tl.dot(tl.trans(w), dvn, input_precision="ieee")


@triton.jit
def dwy_kernel(
    # tensors
    k_ptr, v_ptr, b_ptr, beta_ptr, t_ptr, s_ptr, vn_ptr, do_ptr, du_ptr,
    dp_ptr, da_ptr, dw_ptr, dv_ptr, dbeta_ptr,
    # dimensions
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write dP, dA, dW, dV and U's share of dβ. Grid: (chunks of all rows, H)."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    r = tl.arange(0, C)
    d = tl.arange(0, DK)
    tok = n * C + r
    square = ((n * H + h) * C + r[:, None]) * C + r[None, :]
    beta = tl.load(beta_ptr + tok * H + h)
    tt = tl.trans(tl.load(t_ptr + square))
    dp = tl.zeros([C, C], tl.float32)
    dt = tl.zeros([C, C], tl.float32)
    dw = tl.zeros([C, DK], tl.float32)
    dbeta = tl.zeros([C], tl.float32)
    for iv in tl.static_range(0, DV // BV):
        e = iv * BV + tl.arange(0, BV)
        at = (tok[:, None] * H + h) * DV + e[None, :]
        du = tl.load(du_ptr + at)
        dp += tl.dot(tl.load(do_ptr + at), tl.trans(tl.load(vn_ptr + at)), input_precision="ieee")
        s = tl.load(s_ptr + ((n * H + h) * DK + d[:, None]) * DV + e[None, :])
        dw -= tl.dot(du, tl.trans(s), input_precision="ieee")
        v = tl.load(v_ptr + at).to(tl.float32)
        vb = (v * beta[:, None]).to(du.dtype)
        dt += tl.dot(du, tl.trans(vb), input_precision="ieee")
        dvb = tl.dot(tt, du, input_precision="ieee")
        dbeta += tl.sum(v * dvb, 1)
        tl.store(dv_ptr + at, (dvb * beta[:, None]).to(du.dtype))
    dp = tl.where(r[:, None] >= r[None, :], dp, 0.0)
    tl.store(dp_ptr + square, dp.to(tt.dtype))
    at = (tok[:, None] * H + h) * DK + d[None, :]
    dw_low = dw.to(tt.dtype)
    tl.store(dw_ptr + at, dw_low)
    kb = tl.load(k_ptr + at).to(tl.float32) * beta[:, None] * tl.exp(tl.load(b_ptr + at))
    dt += tl.dot(dw_low, tl.trans(kb.to(tt.dtype)), input_precision="ieee")
    da = tl.dot(dt.to(tt.dtype), tt, input_precision="ieee")
    da = -tl.dot(tt, da.to(tt.dtype), input_precision="ieee")
    da = tl.where(r[:, None] > r[None, :], da, 0.0)
    tl.store(da_ptr + square, da.to(tt.dtype))
    tl.store(dbeta_ptr + tok * H + h, dbeta)


@triton.jit
def dqk_kernel(
    # tensors
    q_ptr, k_ptr, b_ptr, beta_ptr, t_ptr, s_ptr, vn_ptr, do_ptr, ds_ptr, dp_ptr, da_ptr, dw_ptr,
    dq_ptr, dk_ptr, db_ptr, dbeta_ptr,
    # dimensions
    tokens, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write dQ, dK, dG and dβ's share of BK channels. Grid: (chunks of all rows, H, DK / BK).

    dbeta is [DK / BK, tokens, H].
    """
    n = tl.program_id(0)
    h = tl.program_id(1)
    ik = tl.program_id(2)
    r = tl.arange(0, C)
    d = ik * BK + tl.arange(0, BK)
    tok = n * C + r
    at = (tok[:, None] * H + h) * DK + d[None, :]
    # dq and the gradients of k as a row (without β) and as a column.
    dq = tl.zeros([C, BK], tl.float32)
    column = tl.zeros([C, BK], tl.float32)
    through_state = tl.zeros([BK], tl.float32)
    for iv in tl.static_range(0, DV // BV):
        e = iv * BV + tl.arange(0, BV)
        value = (tok[:, None] * H + h) * DV + e[None, :]
        state = ((n * H + h) * DK + d[:, None]) * DV + e[None, :]
        s = tl.load(s_ptr + state)
        ds = tl.load(ds_ptr + state)
        dq += tl.dot(tl.load(do_ptr + value), tl.trans(s), input_precision="ieee")
        column += tl.dot(tl.load(vn_ptr + value), tl.trans(ds), input_precision="ieee")
        through_state += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    b = tl.load(b_ptr + at)
    last = tl.load(b_ptr + ((n * C + C - 1) * H + h) * DK + d)
    q = tl.load(q_ptr + at).to(tl.float32)
    k = tl.load(k_ptr + at).to(tl.float32)
    beta = tl.load(beta_ptr + tok * H + h)
    gamma = tl.exp(b)
    dq *= gamma
    column *= tl.exp(last[None, :] - b)
    of_last = tl.sum(column * k, 0) + tl.exp(last) * through_state
    square = ((n * H + h) * C + r[:, None]) * C + r[None, :]
    tt = tl.trans(tl.load(t_ptr + square))
    row = gamma * tl.dot(tt, tl.load(dw_ptr + at), input_precision="ieee")
    dp = tl.load(dp_ptr + square)
    da = tl.load(da_ptr + square)
    for level in range(0, LEVELS):
        decay = level_decay(b, b_ptr, n * C, r, h, d, level, H, DK)
        pairs = level_pairs(r, level)
        ke = (k * decay).to(tt.dtype)
        qe = (q * decay).to(tt.dtype)
        dp_here = tl.where(pairs, dp, 0.0).to(tt.dtype)
        da_here = tl.where(pairs, da, 0.0).to(tt.dtype)
        dab = (da_here.to(tl.float32) * beta[:, None]).to(tt.dtype)
        dq += decay * tl.dot(dp_here, ke, input_precision="ieee")
        row += decay * tl.dot(da_here, ke, input_precision="ieee")
        sums = tl.dot(tl.trans(dp_here), qe, input_precision="ieee")
        sums += tl.dot(tl.trans(dab), ke, input_precision="ieee")
        column += decay * sums
    tl.store(dbeta_ptr + ik * tokens * H + tok * H + h, tl.sum(k * row, 1))
    row *= beta[:, None]
    db = q * dq + k * (row - column)
    db += tl.where(r[:, None] == C - 1, of_last[None, :], 0.0)
    tl.store(db_ptr + at, db)
    # The diagonal of P has no decay.
    diagonal = tl.sum(tl.where(r[:, None] == r[None, :], dp.to(tl.float32), 0.0), 1)[:, None]
    tl.store(dq_ptr + at, (dq + diagonal * k).to(tt.dtype))
    tl.store(dk_ptr + at, (row + column + diagonal * q).to(tt.dtype))
