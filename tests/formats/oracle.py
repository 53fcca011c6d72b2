"""A second implementation of the casts, in numpy FP64 and exact fractions, for tests only.

It shares no code with `quantlab.formats.rounding` and `block_scale`, and decides by other means:
FP32 operations are formed in FP64 and rounded once (exact for one division or product, as 53 >=
2 * 24 + 2), grid steps come from frexp, blocks are loops over slices.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from quantlab.formats import Format
from quantlab.formats.element import Element, FloatElement

Array = np.ndarray


def step_of(y: Array, element: Element) -> Array:
    """The grid step in the binade of y (FP64)."""
    if not isinstance(element, FloatElement):
        return np.ones_like(y)
    _, exponent = np.frexp(y)
    exponent = np.maximum(exponent - 1, element.emin)
    return np.ldexp(1.0, exponent - element.man_bits)


def round_nearest(y: Array, element: Element) -> Array:
    """Nearest multiple of the step, ties to even; y within the range, FP64 in and out."""
    step = step_of(y, element)
    return np.rint(y / step) * step


def threshold(y: Fraction, step: Fraction) -> int:
    """floor(f * 2^32) of the stochastic rule, from exact fractions."""
    units = y / step
    f = units - (units.numerator // units.denominator)
    return int(f * 2**32)


def round_stochastic(y: Array, element: Element, draws: Array) -> Array:
    """Up when draw < floor(f 2^32); FP32 values y given as FP64."""
    step = step_of(y, element)
    units = y / step
    low = np.floor(units)
    f = units - low
    # 1 - tiny rounds to 1 in FP64; floor((1 - tiny) 2^32) is 2^32 - 1 for every tiny below 2^-32.
    limit = np.minimum(np.floor(f * 2.0**32), 2.0**32 - 1)
    return (low + (draws < limit)) * step


def f32(x: Array) -> Array:
    """Round FP64 to FP32, as FP64."""
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float64)


def scale_to_type(value: float, fmt: Format) -> float:
    """Round a positive FP32 quotient to the scale's type, below its largest finite value."""
    assert fmt.scale is not None
    name, up = fmt.scale.type.name, fmt.scale.round == "up"
    if name == "float32":
        return value
    man, emin = {"bfloat16": (7, -126), "float16": (10, -14), "float8_e4m3fn": (3, -6)}[name]
    step = 2.0 ** (max(np.frexp(value)[1] - 1, emin) - man)
    units = value / step
    return min(float(np.ceil(units) if up else np.rint(units)) * step, fmt.scale.type.max_finite)


def power_of_two(amax: float, fmt: Format) -> float:
    """E8M0 scale of a block, by exact arithmetic on the stated rule."""
    assert fmt.scale is not None
    qmax = fmt.scale.qmax
    top = int(np.frexp(float(qmax))[1]) - 1
    if amax == 0:
        return 2.0**-127
    if fmt.scale.mode == "rceil":
        ratio = float(f32(np.float64(amax) / float(qmax)))
        exponent = -127 if ratio == 0 else int(np.ceil(np.log2(ratio)))
    elif fmt.scale.mode == "ceil":
        exponent = int(np.ceil(np.log2(amax))) - top
    elif fmt.scale.mode == "even":
        man = fmt.element.man_bits if isinstance(fmt.element, FloatElement) else top
        power = 2.0 ** (np.frexp(amax)[1] - 1)
        rounded = np.floor(amax / power * 2**man + 0.5) / 2**man * power
        exponent = int(np.frexp(rounded)[1]) - 1 - top
    else:
        exponent = int(np.frexp(amax)[1]) - 1 - top
    return 2.0 ** min(max(exponent, -127), 127)


def quantize_state(x: Array, fmt: Format, draws: Array | None) -> Array:
    """Store and load one finite state [dv, dk] of FP32 values; FP32 result."""
    scale = fmt.scale
    assert scale is not None
    x = x.astype(np.float64)
    dv, dk = x.shape
    rows, keys = scale.tile.shape(dv, dk)
    qmax = float(scale.qmax)
    state = 1.0
    if scale.per_state:
        state = float(f32(np.abs(x).max() / (448.0 * qmax))) or 1.0
    out = np.zeros_like(x)
    for i in range(0, dv, rows):
        for j in range(0, dk, keys):
            part = (slice(i, i + rows), slice(j, j + keys))
            amax = np.abs(x[part]).max()
            if scale.mode is not None:
                used = power_of_two(float(amax), fmt)
            elif scale.per_state:
                quotient = f32(f32(amax / qmax) / state)
                used = float(f32(np.float64(scale_to_type(float(quotient), fmt)) * state))
            else:
                used = scale_to_type(float(f32(amax / qmax)), fmt)
            if used == 0:
                out[part] = np.copysign(0.0, x[part]) if fmt.element.signed_zero else 0.0
                continue
            y = np.clip(f32(x[part] / used), -qmax, qmax)
            if draws is None:
                v = round_nearest(y, fmt.element)
            else:
                v = round_stochastic(y, fmt.element, draws[part])
            v = np.copysign(v, y) if fmt.element.signed_zero else v + 0.0
            out[part] = f32(v * used)
    return out.astype(np.float32)
