"""Nearest rounding, bit for bit, against ml_dtypes, torch, numpy and exact midpoints."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch

from quantlab.formats import ELEMENTS
from quantlab.formats.codes import element_codes
from quantlab.formats.element import FloatElement, IntElement
from quantlab.formats.rounding import round_clamped, round_unscaled, round_up
from tests.formats import oracle

FLOATS = [
    e
    for e in ELEMENTS.values()
    if isinstance(e, FloatElement) and e.name not in ("float64", "float32")
]
INTS = [e for e in ELEMENTS.values() if isinstance(e, IntElement)]


def sixteen_bit_inputs() -> torch.Tensor:
    """All values of bfloat16 and of float16, as FP32."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return torch.cat([patterns.view(t).float() for t in (torch.bfloat16, torch.float16)])


def grid(element: FloatElement) -> np.ndarray:
    """All finite non-negative values of the type, in order."""
    if element.bits <= 8:
        values = [element.value(code) for code in range(1 << (element.bits - 1))]
        return np.array([v for v in values if np.isfinite(v)])
    codes = np.arange(1 << (element.bits - 1), dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        values = codes.view(getattr(ml_dtypes, element.name, np.float16)).astype(np.float64)
    return values[np.isfinite(values)]


@pytest.mark.parametrize("element", FLOATS, ids=lambda e: e.name)
def test_all_sixteen_bit_inputs_against_ml_dtypes(element: FloatElement) -> None:
    """Over every input where the type does not saturate: ml_dtypes has no other overflow rule."""
    x = sixteen_bit_inputs()
    dtype = getattr(ml_dtypes, element.name, np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = x.numpy().astype(dtype)
    if element.has_nan:
        ours = round_unscaled(x, element, None, "ieee")
        keep = torch.ones_like(x, dtype=torch.bool)
    else:
        keep = x.abs() <= float(element.max_finite)
        ours = round_clamped(x.clamp(-6, 6), element, None)
    nan = np.isnan(theirs.astype(np.float32))
    assert (ours.isnan().numpy() == nan)[keep.numpy()].all()
    codes = element_codes(ours, element).numpy()
    same = codes == theirs.view(codes.dtype)
    assert (same | nan)[keep.numpy()].all()
    assert int(keep.sum()) > 60_000


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_all_sixteen_bit_inputs_against_torch(name: str) -> None:
    """Within range only: torch changed its overflow rule between versions (case A01)."""
    element = ELEMENTS[name]
    assert isinstance(element, FloatElement)
    x = sixteen_bit_inputs()
    x = x[x.abs() <= float(element.overflow_threshold) * (1 - 2**-12)]
    theirs = x.to(getattr(torch, name)).float()
    ours = round_unscaled(x, element, None, "saturate")
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    assert x.numel() > 60_000


@pytest.mark.parametrize("element", FLOATS, ids=lambda e: e.name)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_midpoints_and_their_neighbours(element: FloatElement, sign: float) -> None:
    """Every midpoint goes to the even code, one FP32 ulp either side to the nearer value."""
    values = grid(element)
    low, high = values[:-1], values[1:]
    middle = ((low + high) / 2).astype(np.float32)
    assert (middle.astype(np.float64) * 2 == low + high).all()
    even = np.where(np.arange(len(low)) % 2 == 0, low, high)
    for points, want in [
        (middle, even),
        (np.nextafter(middle, np.float32(np.inf)), high),
        (np.nextafter(middle, np.float32(0)), low),
        (low.astype(np.float32), low),
    ]:
        got = round_clamped(torch.from_numpy(sign * points), element, None).numpy()
        want32 = np.copysign(want, sign).astype(np.float32)
        if not element.signed_zero:
            want32 = want32 + np.float32(0)
        assert (got.view(np.uint32) == want32.view(np.uint32)).all()


@pytest.mark.parametrize("element", INTS, ids=lambda e: e.name)
def test_integers_against_numpy(element: IntElement) -> None:
    """numpy's rint and clip; every half-integer, one ulp either side, and random values."""
    limit = int(element.max_finite)
    halves = np.arange(-limit - 1, limit + 1) + 0.5
    middle = halves.astype(np.float32)
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            middle,
            np.nextafter(middle, np.float32(np.inf)),
            np.nextafter(middle, np.float32(-np.inf)),
            rng.uniform(-limit, limit, 100_000).astype(np.float32),
            np.float32([0.0, -0.0, -0.3, 1e-45]),
        ]
    )
    want = np.clip(np.rint(x), -limit, limit)
    got = round_clamped(torch.from_numpy(x.clip(-limit, limit)), element, None)
    codes = element_codes(got, element)
    assert (codes.numpy() == want.astype(np.int64)).all()
    assert not np.signbit(got.numpy()[got.numpy() == 0]).any()


@pytest.mark.parametrize("element", FLOATS, ids=lambda e: e.name)
def test_overflow_rules(element: FloatElement) -> None:
    largest = float(element.max_finite)
    tie = np.float32(float(element.overflow_threshold))
    inside = np.nextafter(tie, np.float32(0))
    beyond = np.nextafter(tie, np.float32(np.inf))
    x = torch.tensor([inside, tie, beyond, float("inf"), float("nan")])
    x = torch.cat([x, -x])
    saturated = round_unscaled(x, element, None, "saturate")
    assert saturated[4].isnan() and saturated[9].isnan()
    assert saturated[[0, 1, 2, 3]].tolist() == [largest] * 4
    assert saturated[[5, 6, 7, 8]].tolist() == [-largest] * 4
    over = float("inf") if element.has_inf else float("nan")
    at_tie = over if element.overflows_at_tie else largest
    if element.name == "float4_e2m1fn":
        return
    ieee = round_unscaled(x, element, None, "ieee").tolist()
    want = [largest, at_tie, over, over, float("nan")]
    np.testing.assert_array_equal(ieee, want + [-v for v in want])


@pytest.mark.parametrize("element", FLOATS, ids=lambda e: e.name)
def test_round_up_is_the_next_value(element: FloatElement) -> None:
    values = grid(element)
    rng = np.random.default_rng(1)
    picks = rng.integers(0, len(values) - 1, 20_000)
    low, high = values[picks], values[picks + 1]
    inside = (low + rng.uniform(0.01, 0.99, len(picks)) * (high - low)).astype(np.float32)
    x = torch.from_numpy(np.concatenate([inside, low.astype(np.float32)]))
    want = np.concatenate([high, low]).astype(np.float32)
    assert (round_up(x, element).numpy() == want).all()


@pytest.mark.parametrize("element", [*FLOATS, *INTS], ids=lambda e: e.name)
def test_oracle_agrees_over_all_binades(element: FloatElement | IntElement) -> None:
    """Random significands in every FP32 binade the type reaches, down to FP32's subnormals."""
    rng = np.random.default_rng(2)
    top = int(np.log2(float(element.max_finite)))
    exponents = rng.integers(-149, top + 1, 200_000)
    y = np.ldexp(rng.uniform(1, 2, 200_000), exponents) * rng.choice([-1.0, 1.0], 200_000)
    y = y.astype(np.float32).clip(-float(element.max_finite), float(element.max_finite))
    want = oracle.round_nearest(y.astype(np.float64), element).astype(np.float32)
    got = round_clamped(torch.from_numpy(y.copy()), element, None).numpy()
    assert (got == want).all()


def test_grids_are_increasing() -> None:
    assert all(a < b for e in FLOATS for a, b in pairwise(grid(e)))
