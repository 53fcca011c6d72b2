"""Whole casts against the FP64 oracle of the rule, bit for bit; the rules for special values."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from quantlab.formats import decode, encode, parse_format, quantize
from quantlab.formats.block_scale import block_scales, scale_cap
from quantlab.formats.scale import SCALE_TYPES
from tests.formats import oracle

SCALED = [
    "fp8", "fp8@row", "fp8-e5m2", "fp8-fnuz@row", "fp8@tile32x128:qmax=240",
    "fp8@tile32x128:qmax=240,scale=bf16,scale_round=up", "fp8@state", "nvfp4",
    "nvfp4:scale_round=up", "mxfp4", "mxfp4:mode=ceil", "mxfp4:mode=rceil", "mxfp4:mode=even",
    "mxfp8", "int4@block32", "int6@row", "int8@row", "int8@key", "int8@key:scale=bf16",
    "int8@row:scale=fp16", "int8@row:scale=e4m3", "int8@row:scale=fp16,scale_round=up",
    "int8@state", "int16@row", "int8@row:scale=e8m0", "int8@tile5x7:qmax=100",
]  # fmt: skip


def state(dv: int, dk: int, spread: int, seed: int) -> np.ndarray:
    """Random FP32, rows and channels over +-spread binades, with zero rows and a zero channel."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((dv, dk))
    x *= np.exp2(rng.integers(-spread, spread + 1, (dv, 1)))
    x *= np.exp2(rng.integers(-spread // 4, spread // 4 + 1, (1, dk)))
    x[1] = 0.0
    x[dv // 8 + 2] = -0.0
    x[:, 2] = 0.0
    return x.astype(np.float32)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(
    ("dv", "dk", "spread"), [(16, 128, 0), (16, 128, 20), (33, 80, 4), (4, 5, 60)], ids=str
)
def test_casts_equal_the_oracle(name: str, dv: int, dk: int, spread: int) -> None:
    x = state(dv, dk, spread, seed=dv + spread)
    if spread == 0:
        x = torch.from_numpy(x).bfloat16().float().numpy()  # many exact ties
    draws = np.random.default_rng(9).integers(0, 1 << 32, x.shape)
    for suffix in ("", "-sr"):
        fmt = parse_format(name + suffix)
        want = oracle.quantize_state(x, fmt, draws if suffix else None)
        got, counts = quantize(torch.from_numpy(x), fmt, torch.from_numpy(draws))
        assert (got.numpy().view(np.uint32) == want.view(np.uint32)).all()
        assert int(counts.flushed) == int(((want == 0) & (x != 0)).sum())
        assert int(counts.nonfinite) == 0


@pytest.mark.parametrize("name", [n for n in SCALED if "e4m3" not in n and "fp16" not in n])
@pytest.mark.parametrize("size", [3.4028234663852886e38, 3e38, 1e38, 1e-37, 1e-40, 1.4e-45, 0.0])
def test_huge_and_tiny_states_stay_finite(name: str, size: float) -> None:
    x = torch.full((16, 128), size)
    x[::2] = -size
    for suffix in ("", "-sr"):
        fmt = parse_format(name + suffix)
        encoded = encode(x, fmt, torch.tensor([2**32 - 1]))
        out = decode(encoded)
        assert out.isfinite().all()
        assert encoded.scales is not None
        if encoded.scales.is_floating_point():
            assert encoded.scales.isfinite().all()
        if size == 0:
            assert (out == 0).all() and int(encoded.counts.zeroed) == 0
        elif size >= 1e-37 and not suffix:
            # the coarsest is E8M0 by `floor`, which clips a maximum of 8 (1 - ulp) units at 6
            assert ((out / x) > 0.74).all() and ((out / x) < 1.34).all()


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("suffix", ["", "-sr"])
def test_a_bad_value_poisons_its_block_only(name: str, bad: float, suffix: str) -> None:
    fmt = parse_format(name + suffix)
    assert fmt.scale is not None
    x = torch.from_numpy(state(33, 80, 1, seed=1))
    words = torch.randint(0, 1 << 32, x.shape)
    clean, _ = quantize(x, fmt, words)
    rows, keys = fmt.scale.tile.shape(33, 80)
    x[32, 79] = bad
    top, left = 32 // rows * rows, 79 // keys * keys
    inside = torch.zeros(33, 80, dtype=torch.bool)
    inside[top : top + rows, left : left + keys] = True
    for out, counts in [
        quantize(x, fmt, words),
        (decode(e := encode(x, fmt, words)), e.counts),
    ]:
        assert out[inside].isnan().all() and out[~inside].isfinite().all()
        assert int(counts.nonfinite) == 1
        if not fmt.scale.per_state:
            assert torch.equal(out[~inside], clean[~inside])


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("pattern", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7F800000])
def test_a_bad_maximum_gives_nan_scales_whatever_its_bits(name: str, pattern: int) -> None:
    """A GPU's NaN is 0x7FFFFFFF: bit tricks on it carry into the sign."""
    amax = torch.tensor([[1.0, 0.0]])
    amax.view(torch.int32)[0, 1] = pattern
    scales = block_scales(amax, parse_format(name))
    for part in (scales.stored, scales.divisor, scales.multiplier):
        assert part[0, 1].isnan() and part[0, 0].isfinite()
    assert not scales.zeroed.any()


def test_scale_caps_keep_products_finite() -> None:
    biggest = float(np.finfo(np.float32).max)
    for factor in (6, 7, 31, 127, 240, 448, 32767, 57344):
        for name in ("float32", "bfloat16"):
            cap = scale_cap(SCALE_TYPES[name], Fraction(factor))
            assert np.float64(cap) * factor <= biggest
            above = np.float64(cap) * (1 + 2.0 ** -(23 if name == "float32" else 7))
            assert above * factor > biggest


def test_rejects_what_is_no_state() -> None:
    fmt = parse_format("fp8-sr")
    with pytest.raises(ValueError, match="axes"):
        quantize(torch.zeros(128), fmt)
    with pytest.raises(ValueError, match="random words"):
        quantize(torch.zeros(4, 128), fmt)
    for shape in [(2, 4, 128), (3, 128), (4, 64)]:
        with pytest.raises(ValueError, match="do not broadcast"):
            quantize(torch.zeros(4, 128), fmt, torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(TypeError, match="floating-point"):
        encode(torch.zeros(4, 128, dtype=torch.int32), parse_format("fp8"))


@pytest.mark.parametrize("name", ["fp8-sr", "nvfp4-sr", "fp16-sr", "int8@key-sr"])
def test_words_broadcast_over_leading_axes_and_layout_does_not_matter(name: str) -> None:
    fmt = parse_format(name)
    x = torch.randn(7, 4, 2, 16, 32)
    words = torch.randint(0, 1 << 32, (4, 2, 16, 32))
    out, _ = quantize(x, fmt, words)
    for i in range(7):
        assert torch.equal(out[i], quantize(x[i], fmt, words)[0])
    strided = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(quantize(strided, fmt, words)[0], out)


def test_nvfp4_block_scale_divides_by_six_first() -> None:
    """(amax / 6) / s in this order: amax / (6 s) and (amax / s) / 6 give 1.75 here."""
    x = torch.zeros(2, 16)
    x[0, 0] = 3000.0
    x[1, 0] = float.fromhex("0x1.699b6ep+3")
    encoded = encode(x, parse_format("nvfp4"))
    assert encoded.scales is not None
    assert encoded.scales.view(torch.float8_e4m3fn).float().tolist() == [[448.0], [1.625]]


@pytest.mark.parametrize("draw", [0, 1, 2**32 - 1])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("fp8-sr", 1e-43),
        ("int8@row-sr", 1.4e-45),
        ("int8@row:scale=fp16-sr", 1e-7),
        ("nvfp4-sr", 0),
    ],
)
def test_an_underflowing_scale_makes_exact_zeros(name: str, size: float, draw: int) -> None:
    """Also for negative elements, where the rule alone would step down once in 2^32 draws."""
    x = torch.full((2, 128), -size) if size else torch.full((2, 128), -1e-9)
    if not size:
        x[1] = 1.0  # a block scale is relative to the state's
    encoded = encode(x, parse_format(name), torch.tensor([draw]))
    assert (decode(encoded)[0] == 0).all()
    blocks = encoded.scales.shape[-1] if encoded.scales is not None else 0
    assert int(encoded.counts.zeroed) == blocks * (2 if size else 1)
    assert int(encoded.counts.flushed) == 128 * (2 if size else 1)
