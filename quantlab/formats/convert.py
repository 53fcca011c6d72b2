"""Reading NVFP4 data written under either convention of its state (global) scale.

quantlab's scales are decode scales: value = code * block scale * state scale. Some writers store
the reciprocal, an encode scale (compressed-tensors' divisor, such as 3584), others the decode scale
itself (ModelOpt's multiplier, 1/3584). Mixing the two gives wrong magnitudes without an error, so
the argument names here say which one is meant, and exactly one must be given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantlab.formats.cast import CastCounts, Encoded
from quantlab.formats.codes import unpack_nibbles
from quantlab.formats.grammar import parse_format


def decode_scale_from(encode_scale: Tensor) -> Tensor:
    """Turn divisors (encode scales) into decode scales: 1 / encode_scale, correctly rounded FP32.

    Raises:
        ValueError: a scale is not positive and finite.
    """
    _check(encode_scale, "encode_scale")
    return 1.0 / encode_scale.to(torch.float32)


def encode_scale_from(decode_scale: Tensor) -> Tensor:
    """Turn multipliers (decode scales) into divisors: 1 / decode_scale, correctly rounded FP32.

    Raises:
        ValueError: a scale is not positive and finite.
    """
    _check(decode_scale, "decode_scale")
    return 1.0 / decode_scale.to(torch.float32)


def import_nvfp4(
    packed: Tensor,
    block_scales: Tensor,
    *,
    dk: int,
    decode_scale: Tensor | None = None,
    encode_scale: Tensor | None = None,
) -> Encoded:
    """Wrap packed NVFP4 data of another program.

    Args:
        packed: uint8 [..., dv, ceil(dk / 2)], first code in the low nibble.
        block_scales: E4M3 codes, uint8 or float8_e4m3fn [..., dv, ceil(dk / 16)].
        dk: key channels.
        decode_scale: FP32 [...], multiplier convention.
        encode_scale: FP32 [...], divisor convention.

    Returns:
        What `decode` takes.

    Raises:
        ValueError: not exactly one scale is given, or it is not positive and finite.
    """
    if (decode_scale is None) == (encode_scale is None):
        raise ValueError("give exactly one of decode_scale (multiplier) and encode_scale (divisor)")
    if encode_scale is not None:
        decode_scale = decode_scale_from(encode_scale)
    assert decode_scale is not None
    _check(decode_scale, "decode_scale")
    zero = torch.zeros((), dtype=torch.int64, device=packed.device)
    return Encoded(
        fmt=parse_format("nvfp4"),
        codes=unpack_nibbles(packed, dk),
        scales=block_scales.view(torch.uint8),
        state_scale=decode_scale.to(torch.float32)[..., None, None],
        counts=CastCounts(nonfinite=zero, clipped=zero, zeroed=zero, flushed=zero),
    )


def _check(scale: Tensor, name: str) -> None:
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError(f"{name} must be positive and finite")
