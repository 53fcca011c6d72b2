"""How a format's range is used: what a store clipped, flushed or kept as a subnormal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantlab.formats import Format, encode
from quantlab.formats.codes import code_values
from quantlab.formats.element import FloatElement
from quantlab.replay import Policy
from quantlab.replay.draws import READ, RECUR, Draws

RANGE_COUNTS = {
    "clipped": "elements beyond what the block scale reaches, stored as ± the largest",
    "flushed": "non-zero elements stored as zero",
    "subnormal": "elements stored as a subnormal of the element type",
    "zeroed": "blocks whose scale underflowed",
}


def range_counts(
    states: Tensor,
    policies: Sequence[Policy],
    streams: Tensor,
    *,
    seed: int,
    layer: int,
    position: int,
) -> dict[str, Tensor]:
    """Count what storing states does.

    Args:
        states: [rows, H, dv, dk] FP32, as they are before the store.
        policies: rows = policies × streams.
        streams: [n] global stream ids.
        seed: of the draws, for policies without their own.
        layer: ordinal.
        position: tokens since the prompt; a multiple of every window.

    Returns:
        By name, int64 [rows, 2]: of the recurrence or only copy, and of the read copy, 0 where
        there is none.
    """
    n = streams.numel()
    heads, dv, dk = states.shape[1:]
    zeros = torch.zeros((states.shape[0], 2), dtype=torch.int64, device=states.device)
    out = {name: zeros.clone() for name in RANGE_COUNTS}
    for p, policy in enumerate(policies):
        draws = Draws(
            seed=seed if policy.seed is None else policy.seed,
            layer=layer,
            streams=streams,
            flush=position // policy.window,
            state_shape=(heads, dv, dk),
            device=states.device,
        )
        copies = {RECUR: policy.recur}
        if policy.kind == "separate":
            copies[READ] = policy.read
        for copy, fmt in copies.items():
            if fmt.is_exact:
                continue
            words = draws.words(copy) if fmt.needs_words else None
            for s in range(n):
                row = p * n + s
                counts = _count(states[row], fmt, None if words is None else words[s])
                for name, value in counts.items():
                    out[name][row, copy] = value
    return out


def _count(state: Tensor, fmt: Format, words: Tensor | None) -> dict[str, Tensor]:
    stored = encode(state, fmt, words)
    subnormal = torch.zeros((), dtype=torch.int64, device=state.device)
    if isinstance(fmt.element, FloatElement):
        size = code_values(stored.codes, fmt.element).abs()
        subnormal = ((size > 0) & (size < float(fmt.element.smallest_normal))).count_nonzero()
    return {
        "clipped": stored.counts.clipped,
        "flushed": stored.counts.flushed,
        "subnormal": subnormal,
        "zeroed": stored.counts.zeroed,
    }
