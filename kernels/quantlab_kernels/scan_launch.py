"""Launching the windowed scan: what a policy and op inputs are to the kernel of scan.py."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.recurrence import OpInputs
from quantlab.replay.policy import Policy
from quantlab.replay.records import RecordTypes
from quantlab_kernels.coefficients import window_coefficients
from quantlab_kernels.copies import Copy, row_parts
from quantlab_kernels.held import held_as
from quantlab_kernels.scan import windowed_scan_kernel
from quantlab_kernels.stores import signed_seed, store_kind, tile_shape

MAX_WINDOW = 64
RECORD_NAMES = {None: "fp32", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Type of a record to KEY_RECORD and CORRECTION_RECORD."""
KEY_PARTS = {torch.bfloat16: 1, torch.float16: 2}
"""BF16 parts of a key or query, by type; three of FP32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanLaunch:
    """How a program is launched.

    Attributes:
        warps: of a program.
        registers: most registers of a lane; None for what the compiler takes.
        cuts: warps that share the columns of a row, see `cuts.py`: 1, or 2 where dk is 33 to 128.
    """

    warps: int
    registers: int | None = None
    cuts: int = 1


def scan_launch(block_v: int, block_k: int) -> ScanLaunch:
    """Choose a launch: a warp has 16 rows, and half of their columns where those are 64 or more.

    Registers are asked for: left alone, the compiler gives long windows half of those there are.
    """
    cuts = 2 if 64 <= block_k <= 128 else 1
    warps = min(16, max(4, block_v // 16 * cuts))
    return ScanLaunch(warps=warps, registers=min(255, 2048 // warps), cuts=cuts)


def windowed_scan(
    inputs: OpInputs,
    rows: Tensor,
    streams: Tensor,
    recur: Copy,
    read: Copy | None,
    out: Tensor,
    bad_flush: Tensor,
    policy: Policy,
    applies: Tensor | None = None,
    *,
    seed: int,
    layer: int,
    first_flush: int,
    launch: ScanLaunch | None = None,
) -> None:
    """Run some rows of a segment that starts at a window's first step.

    Args:
        inputs: T steps, unit stride along the last axes of q, k, v.
        rows: int64 [R] rows of `inputs` and of `out`.
        streams: int64 [R] global stream ids.
        recur: the recurrence or shared copy as stored.
        read: likewise the read copy; None unless the policy is separate.
        out: [rows, T, H, dv] FP32.
        bad_flush: int32 [R, H] first flush after which a copy was not finite, -1 for none.
        policy: of these rows, 2 <= L <= 64.
        applies: int8 [R, H] whether copies are stored in its formats (else in FP32); None for all.
        seed: 64-bit seed.
        layer: ordinal of the recurrent layer.
        first_flush: number of the first store.
        launch: how programs are cut; changes no bit that matters (the order of some additions).

    Mutates:
        recur, read, out, bad_flush.

    Raises:
        ValueError: a window or a format that the kernel does not have.
    """
    if not 2 <= policy.window <= MAX_WINDOW:
        raise ValueError(f"the kernel has windows of 2 to {MAX_WINDOW}, got {policy.window}")
    rest = inputs.steps % policy.window
    if 0 < rest < inputs.steps:
        # an open window leaves the state as it is, so it is a launch of its own
        cut = inputs.steps - rest
        keys = {"seed": seed, "layer": layer, "launch": launch}
        copies = (rows, streams, recur, read)
        full, last = inputs.slice(0, cut), inputs.slice(cut, inputs.steps)
        marks = (bad_flush, policy, applies)
        windowed_scan(full, *copies, out[:, :cut], *marks, first_flush=first_flush, **keys)
        after = first_flush + cut // policy.window
        windowed_scan(last, *copies, out[:, cut:], *marks, first_flush=after, **keys)
        return
    recur_kind, read_kind = store_kind(policy.recur), store_kind(policy.read)
    types = RecordTypes.of(policy.records, inputs)
    key_record = RECORD_NAMES[types.k or types.v]
    coefficients = window_coefficients(inputs, rows, window=policy.window, key_record=key_record)
    block_v, tail_v = row_parts(inputs.dv)
    _, block_k = tile_shape(inputs.dv, inputs.dk)
    launch = launch or scan_launch(block_v, block_k)
    limit = {} if launch.registers is None else {"maxnreg": launch.registers}
    dt = inputs.dt if inputs.dt is not None else inputs.log_decay
    beta = inputs.beta if inputs.beta is not None else inputs.log_decay
    second = recur if read is None else read
    partial = applies is not None
    recur_held, recur_factored = held_as(recur_kind.name, block_k, partial)
    read_held, read_factored = held_as(read_kind.name, block_k, partial)
    windowed_scan_kernel[(inputs.heads, rows.shape[0])](
        inputs.q,
        inputs.k,
        inputs.v,
        dt,
        beta,
        coefficients.from_start,
        coefficients.to_end,
        coefficients.weights,
        coefficients.own,
        coefficients.couple,
        coefficients.solve,
        recur.values,
        recur.factors,
        second.values,
        second.factors,
        out,
        bad_flush,
        rows,
        streams,
        bad_flush if applies is None else applies,
        signed_seed(seed),
        layer,
        first_flush,
        inputs.steps,
        inputs.heads,
        inputs.heads // inputs.k.shape[2],
        inputs.dv,
        inputs.dk,
        coefficients.own.shape[2],
        *inputs.q.stride()[:3],
        *inputs.k.stride()[:3],
        *inputs.v.stride()[:3],
        *dt.stride()[:3],
        *beta.stride()[:3],
        *out.stride()[:3],
        L=policy.window,
        BLOCK_L=coefficients.own.shape[3],
        BLOCK_V=block_v,
        TAIL_V=tail_v,
        BLOCK_K=block_k,
        QUADS=inputs.dk % 4 == 0,
        DELTA=inputs.is_delta,
        PER_CHANNEL=inputs.per_channel,
        HAS_DT=inputs.dt is not None,
        SEPARATE=read is not None,
        READ_FORMAT=read_kind.name,
        READ_SR=read_kind.sr,
        RECUR_FORMAT=recur_kind.name,
        RECUR_SR=recur_kind.sr,
        KEY_RECORD=key_record,
        CORRECTION_RECORD=RECORD_NAMES[types.u],
        FLUSH=policy.corrections,
        PARTIAL=partial,
        READ_HELD=read_held,
        READ_FACTORED=read_factored,
        RECUR_HELD=recur_held,
        RECUR_FACTORED=recur_factored,
        CUTS=launch.cuts,
        KEY_PARTS=max(KEY_PARTS.get(x.dtype, 3) for x in (inputs.q, inputs.k)),
        num_warps=launch.warps,
        num_stages=1,
        enable_fp_fusion=False,
        **limit,
    )
