"""Philox-4x32-10, and quantlab's random words for stochastic rounding.

A counter-based generator: the word of an element depends on the seed and on where the element is
(layer, copy, stream, flush, index), never on batch, chunking, device, order or resumption.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
section 3.3 and Random123's `philox.h` (constants); the same generator as Triton's `tl.philox`.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
"""Rounds; Random123's default, and its crush-resistant minimum is 7."""

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
COPY_STRIDE = 1 << 24
"""Layers before the copy index: counter word 3 is layer + COPY_STRIDE * copy."""

_CHUNK = 1 << 16
"""Counters per pass on the CPU: a working set that stays in cache, yet two threads' worth."""


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor],
    key: tuple[int, int],
    *,
    rounds: int = ROUNDS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map 128-bit counters to four random words each.

    Args:
        counter: four int64 tensors of values in [0, 2^32), broadcastable to one shape. Axes along
            which a word is constant are best left at size 1: the first rounds then cost less.
        key: two values in [0, 2^32).
        rounds: number of rounds.

    Returns:
        Four int64 tensors of values in [0, 2^32), of the common shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    if not (0 <= k0 <= _MASK and 0 <= k1 <= _MASK):
        raise ValueError(f"key words are in [0, 2^32), got {key}")
    for _ in range(rounds):
        # 64-bit products wrap in int64, which keeps their bits; the shift drags the sign along.
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = _xor(_xor((p1 >> 32).bitwise_and_(_MASK), c1), k0)
        c2 = _xor(_xor((p0 >> 32).bitwise_and_(_MASK), c3), k1)
        c1, c3 = p1.bitwise_and_(_MASK), p0.bitwise_and_(_MASK)
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    # torch ships no types for this function
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)  # type: ignore[no-untyped-call]
    return c0, c1, c2, c3


def _xor(a: Tensor, b: Tensor | int) -> Tensor:
    """Exclusive or, in place of the fresh `a` where its shape is the result's."""
    if isinstance(b, int) or a.shape == b.shape or (b.numel() == 1 and b.ndim <= a.ndim):
        return a.bitwise_xor_(b)
    return a ^ b


def seed_key(seed: int) -> tuple[int, int]:
    """Split a 64-bit seed into key words, low first; a negative seed is its two's complement.

    Raises:
        ValueError: the seed does not fit in 64 bits.
    """
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"a seed has 64 bits, got {seed}")
    return seed & _MASK, (seed >> 32) & _MASK


def sr_words(
    *,
    seed: int,
    layer: int,
    copy: int,
    stream: Tensor,
    flush: int | Tensor,
    heads: int,
    dv: int,
    dk: int,
    device: torch.device | str | None = None,
    rounds: int = ROUNDS,
) -> Tensor:
    """Draw the random words of one store of one layer's states.

    The counter of an element is (element // 4, flush, stream, layer + 2^24 * copy) and its word is
    the one numbered element % 4; element is the row-major index in (head, dv, dk).

    Args:
        seed: 64-bit seed of the study.
        layer: ordinal of the recurrent layer.
        copy: 0 for the recurrence or shared copy, 1 for the read copy.
        stream: [rows] integers, global stream ids.
        flush: number of the store, 0 for the one after prefill; may be an integer tensor, 0-d or
            [rows] where rows are at different stores.
        heads: value heads.
        dv: value rows of a state.
        dk: key channels of a state.
        device: where to draw; the stream's device by default.
        rounds: Philox rounds.

    Returns:
        int64 [rows, heads, dv, dk], values in [0, 2^32).

    Raises:
        ValueError: a counter word would not fit.
    """
    if not 0 <= layer < COPY_STRIDE or not 0 <= copy < 256:
        raise ValueError(f"layer must be in [0, 2^24) and copy in [0, 256), got {layer}, {copy}")
    if stream.ndim != 1:
        raise ValueError(f"stream is one id per row, got shape {tuple(stream.shape)}")
    if isinstance(flush, int) and not 0 <= flush <= _MASK:
        raise ValueError(f"flush must be in [0, 2^32), got {flush}")
    where = stream.device if device is None else torch.device(device)
    count = heads * dv * dk
    quads = -(-count // 4)
    streams = stream.to(device=where, dtype=torch.int64)[:, None]
    if isinstance(flush, Tensor):
        flushes = flush.to(device=where, dtype=torch.int64).reshape(-1, 1)
    else:
        flushes = torch.full((1, 1), flush, dtype=torch.int64, device=where)
    place = torch.full((1, 1), layer + COPY_STRIDE * copy, dtype=torch.int64, device=where)
    key = seed_key(seed)
    out = torch.empty(stream.shape[0], quads, 4, dtype=torch.int64, device=where)
    chunk = quads if where.type != "cpu" else max(1, _CHUNK // max(1, stream.shape[0]))
    for start in range(0, quads, chunk):
        stop = min(start + chunk, quads)
        index = torch.arange(start, stop, dtype=torch.int64, device=where)[None, :]
        words = philox4x32((index, flushes, streams, place), key, rounds=rounds)
        torch.stack(words, dim=-1, out=out[:, start:stop])
    return out.view(stream.shape[0], quads * 4)[:, :count].view(stream.shape[0], heads, dv, dk)
