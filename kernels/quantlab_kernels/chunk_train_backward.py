"""Backward kernels of the chunked gated linear recurrence (forward: `chunk_train_forward`).

With the forward's symbols, D the gradient of what follows it, P = Q Kᵀ ⊙ Γ, K_d = diag(exp(b_C −
b)) K:

    dv_kernel        dV'₀ = Pᵀ dO                                          parallel over chunks
    dstates_kernel   dV' = dV'₀ + K_d dS_next                              sequential, in reverse
                     dS = exp(b_C) dS_next + (diag(γ) Q)ᵀ dO − Wᵀ dV'
    dqk_kernel       dQ, dK, db of everything but U and W; dW = −dV' Sᵀ    parallel
    dwy_kernel       through U = T diag(β) V, W = T diag(β γ) K with dU = dV':
                     dT = dU (βV)ᵀ + dW (βγK)ᵀ,  dA = −Tᵀ dT Tᵀ (strictly lower)

The gradient of a log-decay g is the reverse cumulative sum of db within the chunk (taken by the
launcher). db_i collects Σ_j (dX ⊙ X)_ij − Σ_j (dX ⊙ X)_ji for every tile X that carries Γ, since
∂Γ_ij/∂b_i = Γ_ij = −∂Γ_ij/∂b_j; of S it is exp(b_C)⟨dS_next, S⟩ on the last token.

Rounding points as in the forward: dot operands and stored tensors in the inputs' dtype, sums in
FP32.
"""

import triton
import triton.language as tl

from quantlab_kernels.chunk_train_forward import decay_tile


@triton.jit
def dv_kernel(
    # tensors
    q_ptr, k_ptr, b_ptr, do_ptr, dv_ptr,
    # dimensions
    H: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr,
):  # fmt: skip
    """Write Pᵀ dO of one chunk and value head. Grid: (chunks of all rows, H)."""
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
    do = tl.load(do_ptr + (tok[:, None] * H + h) * DV + dv[None, :])
    p = tl.dot(q, tl.trans(k), input_precision="ieee") * decay_tile(b, r, False)
    dvi = tl.dot(tl.trans(p.to(k.dtype)), do, input_precision="ieee")
    tl.store(dv_ptr + (tok[:, None] * H + h) * DV + dv[None, :], dvi.to(k.dtype))


@triton.jit
def dstates_kernel(
    # tensors
    q_ptr, k_ptr, w_ptr, b_ptr, do_ptr, dv0_ptr, ds_ptr, dv_ptr,
    # dimensions
    chunks, H: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr, BV: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    """Write dS after every chunk and dV'. Grid: (DV / BV, rows · H)."""
    iv = tl.program_id(0)
    row = tl.program_id(1) // H
    h = tl.program_id(1) % H
    hk = h // (H // HK)
    r = tl.arange(0, C)
    dk = tl.arange(0, DK)
    dv = iv * BV + tl.arange(0, BV)
    ds = tl.zeros([DK, BV], tl.float32)
    for i in range(0, chunks):
        n = row * chunks + chunks - 1 - i
        tok = n * C + r
        k = tl.load(k_ptr + (tok[:, None] * HK + hk) * DK + dk[None, :])
        q = tl.load(q_ptr + (tok[:, None] * HK + hk) * DK + dk[None, :])
        do = tl.load(do_ptr + (tok[:, None] * H + h) * DV + dv[None, :])
        dvi = tl.load(dv0_ptr + (tok[:, None] * H + h) * DV + dv[None, :])
        b = tl.load(b_ptr + tok * H + h)
        last = tl.load(b_ptr + (n * C + C - 1) * H + h)
        ds_low = ds.to(k.dtype)
        tl.store(ds_ptr + ((n * H + h) * DK + dk[:, None]) * DV + dv[None, :], ds_low)
        kd = (k.to(tl.float32) * tl.exp(last - b)[:, None]).to(k.dtype)
        dvn = (dvi.to(tl.float32) + tl.dot(kd, ds_low, input_precision="ieee")).to(k.dtype)
        tl.store(dv_ptr + (tok[:, None] * H + h) * DV + dv[None, :], dvn)
        qg = (q.to(tl.float32) * tl.exp(b)[:, None]).to(k.dtype)
        ds = ds * tl.exp(last) + tl.dot(tl.trans(qg), do, input_precision="ieee")
        if IS_DELTA:
            w = tl.load(w_ptr + (tok[:, None] * H + h) * DK + dk[None, :])
            ds -= tl.dot(tl.trans(w), dvn, input_precision="ieee")


@triton.jit
def dqk_kernel(
    # tensors
    q_ptr, k_ptr, vn_ptr, b_ptr, s_ptr, do_ptr, ds_ptr, dv_ptr, dq_ptr, dk_ptr, dw_ptr, db_ptr,
    # dimensions
    H: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr, BV: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    """Write dQ, dK (per value head), dW and db of one chunk. Grid: (chunks of all rows, H)."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    hk = h // (H // HK)
    r = tl.arange(0, C)
    d = tl.arange(0, DK)
    tok = n * C + r
    b = tl.load(b_ptr + tok * H + h)
    last = tl.load(b_ptr + (n * C + C - 1) * H + h)
    dq = tl.zeros([C, DK], tl.float32)
    dk = tl.zeros([C, DK], tl.float32)
    dw = tl.zeros([C, DK], tl.float32)
    dp = tl.zeros([C, C], tl.float32)
    through_state = 0.0
    for iv in tl.static_range(0, DV // BV):
        e = iv * BV + tl.arange(0, BV)
        s = tl.load(s_ptr + ((n * H + h) * DK + d[:, None]) * DV + e[None, :])
        ds = tl.load(ds_ptr + ((n * H + h) * DK + d[:, None]) * DV + e[None, :])
        do = tl.load(do_ptr + (tok[:, None] * H + h) * DV + e[None, :])
        vn = tl.load(vn_ptr + (tok[:, None] * H + h) * DV + e[None, :])
        dp += tl.dot(do, tl.trans(vn), input_precision="ieee")
        dq += tl.dot(do, tl.trans(s), input_precision="ieee")
        dk += tl.dot(vn, tl.trans(ds), input_precision="ieee")
        through_state += tl.sum(tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1), 0)
        if IS_DELTA:
            dvn = tl.load(dv_ptr + (tok[:, None] * H + h) * DV + e[None, :])
            dw -= tl.dot(dvn, tl.trans(s), input_precision="ieee")
    if IS_DELTA:
        tl.store(dw_ptr + (tok[:, None] * H + h) * DK + d[None, :], dw.to(dw_ptr.dtype.element_ty))
    q = tl.load(q_ptr + (tok[:, None] * HK + hk) * DK + d[None, :])
    k = tl.load(k_ptr + (tok[:, None] * HK + hk) * DK + d[None, :])
    dq *= tl.exp(b)[:, None]
    dk *= tl.exp(last - b)[:, None]
    of_k = tl.sum(dk * k.to(tl.float32), 1)
    db = tl.sum(dq * q.to(tl.float32), 1) - of_k
    db += tl.where(r == C - 1, tl.sum(of_k, 0) + tl.exp(last) * through_state, 0.0)
    dp *= decay_tile(b, r, False)
    m = dp * tl.dot(q, tl.trans(k), input_precision="ieee")
    db += tl.sum(m, 1) - tl.sum(m, 0)
    dp_low = dp.to(k.dtype)
    dq += tl.dot(dp_low, k, input_precision="ieee")
    dk += tl.dot(tl.trans(dp_low), q, input_precision="ieee")
    tl.store(dq_ptr + (tok[:, None] * H + h) * DK + d[None, :], dq.to(dq_ptr.dtype.element_ty))
    tl.store(dk_ptr + (tok[:, None] * H + h) * DK + d[None, :], dk.to(dk_ptr.dtype.element_ty))
    tl.store(db_ptr + tok * H + h, db)


@triton.jit
def dwy_kernel(
    # tensors
    k_ptr, v_ptr, b_ptr, beta_ptr, t_ptr, du_ptr, dw_ptr, dk_ptr, dv_ptr, dbeta_ptr, db_ptr,
    # dimensions
    H: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    # meta
    C: tl.constexpr,
):  # fmt: skip
    """Add to dK and db, write dV and dβ, of one chunk. Grid: (chunks of all rows, H)."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    hk = h // (H // HK)
    r = tl.arange(0, C)
    d = tl.arange(0, DK)
    e = tl.arange(0, DV)
    tok = n * C + r
    b = tl.load(b_ptr + tok * H + h)
    beta = tl.load(beta_ptr + tok * H + h)
    gamma = tl.exp(b)
    t = tl.load(t_ptr + ((n * H + h) * C + r[:, None]) * C + r[None, :])
    tt = tl.trans(t)
    # U's side.
    v = tl.load(v_ptr + (tok[:, None] * H + h) * DV + e[None, :])
    du = tl.load(du_ptr + (tok[:, None] * H + h) * DV + e[None, :])
    vb = (v.to(tl.float32) * beta[:, None]).to(t.dtype)
    dt = tl.dot(du, tl.trans(vb), input_precision="ieee")
    dvb = tl.dot(tt, du, input_precision="ieee")
    dbeta = tl.sum(v.to(tl.float32) * dvb, 1)
    tl.store(
        dv_ptr + (tok[:, None] * H + h) * DV + e[None, :],
        (dvb * beta[:, None]).to(dv_ptr.dtype.element_ty),
    )
    # W's side.
    k = tl.load(k_ptr + (tok[:, None] * HK + hk) * DK + d[None, :])
    dw = tl.load(dw_ptr + (tok[:, None] * H + h) * DK + d[None, :])
    kb = (k.to(tl.float32) * (beta * gamma)[:, None]).to(t.dtype)
    dt += tl.dot(dw, tl.trans(kb), input_precision="ieee")
    dkb = tl.dot(tt, dw, input_precision="ieee")
    of_k = tl.sum(k.to(tl.float32) * dkb, 1) * gamma
    dbeta += of_k
    db = beta * of_k
    # The inverse.
    da = tl.dot(dt.to(t.dtype), tt, input_precision="ieee")
    da = -tl.dot(tt, da.to(t.dtype), input_precision="ieee")
    da *= decay_tile(b, r, True)
    m = da * tl.dot(k, tl.trans(k), input_precision="ieee")
    dbeta += tl.sum(m, 1)
    m *= beta[:, None]
    db += tl.sum(m, 1) - tl.sum(m, 0)
    da_low = (da * beta[:, None]).to(t.dtype)
    dk = dkb * (beta * gamma)[:, None]
    dk += tl.dot(da_low, k, input_precision="ieee")
    dk += tl.dot(tl.trans(da_low), k, input_precision="ieee")
    at = dk_ptr + (tok[:, None] * H + h) * DK + d[None, :]
    dk += tl.load(at).to(tl.float32)
    tl.store(at, dk.to(dk_ptr.dtype.element_ty))
    tl.store(dbeta_ptr + tok * H + h, dbeta)
    tl.store(db_ptr + tok * H + h, db + tl.load(db_ptr + tok * H + h))
