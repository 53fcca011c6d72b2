"""Public reports about number formats (group A), and B05, F01, F05: input and right value.

Each test is named by the report's id. Triton's side of A02, A11 and A18 is in `tests/kernels`.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from quantlab.formats import ELEMENTS, FORMATS, decode, encode, parse_format, quantize
from quantlab.formats.codes import element_codes, pack_nibbles, value_table
from quantlab.formats.convert import import_nvfp4
from quantlab.formats.philox import philox4x32, seed_key, sr_words
from quantlab.formats.rounding import round_clamped
from tests.tolerances import SIGMAS

E4M3, E5M2, E2M1 = (ELEMENTS[n] for n in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"))
INT8 = ELEMENTS["int8"]


def words(n: int, *, seed: int = 0, flush: int = 0) -> torch.Tensor:
    """`n` words of one stream's store."""
    drawn = sr_words(
        seed=seed, layer=0, copy=0, stream=torch.tensor([0]), flush=flush, heads=1, dv=1, dk=n
    )
    return drawn.flatten()


def stochastic(x: float, element: object, drawn: torch.Tensor) -> torch.Tensor:
    """One value rounded with many words."""
    return round_clamped(torch.full(drawn.shape, x), element, drawn)  # type: ignore[arg-type]


def within(count: int, n: int, p: float) -> bool:
    """Whether a binomial count is within the allowed standard errors of its mean."""
    return abs(count / n - p) <= SIGMAS * math.sqrt(p * (1 - p) / n)


def test_A01_e4m3_overflow_is_our_own_rule() -> None:
    x = torch.tensor([[448, 464, 464.00003, 1e4, math.inf, -math.inf, math.nan, -0.0]])
    saturate = encode(x, parse_format("float8_e4m3fn@none:overflow=saturate"))
    assert saturate.codes.flatten().tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x80]
    ieee = encode(x, parse_format("float8_e4m3fn@none:overflow=ieee"))
    assert ieee.codes.flatten()[[0, 1, 7]].tolist() == [0x7E, 0x7E, 0x80]
    assert decode(ieee).flatten()[2:7].isnan().all()
    for encoded in (saturate, ieee):
        assert int(encoded.counts.nonfinite) == 3 and int(encoded.counts.clipped) == 3


@pytest.mark.parametrize("name", ["int8@block16", "nvfp4", "int8@block16-sr", "nvfp4-sr"])
def test_A02_nan_poisons_its_block(name: str) -> None:
    x = torch.randn(1, 32)
    x[0, 5] = math.nan
    encoded = encode(x, parse_format(name), words(32))
    assert int(encoded.counts.nonfinite) == 1
    out = decode(encoded)
    assert out[0, :16].isnan().all() and out[0, 16:].isfinite().all()


def test_A03_e2m1_ties_go_to_even() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.2500001, 5.0000005, -0.25])
    out = round_clamped(x.clone(), E2M1, None)
    assert out.tolist() == [0, 1, 1, 2, 2, 4, 4, 0.5, 6, 0]
    assert int(element_codes(out, E2M1)[-1]) == 0x8
    # 7 saturates at 6: amax 6 beside it fixes the MX scale at 1
    seven, counts = quantize(torch.tensor([[7.0] + [0.0] * 31]), parse_format("mxfp4"))
    assert float(seven[0, 0]) == 6 and int(counts.clipped) == 1


def test_A04_one_rounding_only() -> None:
    x = torch.tensor([1.0625, 1.0625001, 1.1875])
    assert round_clamped(x, E4M3, None).tolist() == [1.0, 1.125, 1.25]


def test_A06_a_zero_block_has_a_finite_scale() -> None:
    x = torch.zeros(1, 32)
    x[0, 16:] = torch.linspace(-1, 1, 16)
    encoded = encode(x, parse_format("nvfp4"))
    assert encoded.scales is not None
    assert not (encoded.scales & 0x7F == 0x7F).any()
    assert (decode(encoded)[0, :16] == 0).all() and int(encoded.counts.zeroed) == 0


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("fp64", "fp32")])
def test_A07_zero_tiny_and_huge_states(name: str) -> None:
    fmt = parse_format(name)
    encoded = encode(torch.zeros(2, 64), fmt)
    assert (decode(encoded) == 0).all()
    if encoded.state_scale is not None:
        assert encoded.state_scale.isfinite().all()
    if encoded.scales is not None:
        assert encoded.scales.float().isfinite().all()
    if fmt.scale is None:
        return
    for amax in (1e-37, 3e38):
        x = (torch.linspace(-1, 1, 128) * amax).view(2, 64)
        out, counts = quantize(x, fmt)
        assert out.isfinite().all()
        flushed = int(((out == 0) & (x != 0)).sum())
        assert int(counts.flushed) == flushed


def test_A08_scale_rounding_is_named_and_clipping_counted() -> None:
    x = torch.zeros(2, 16)
    # a state scale of exactly 1 needs amax 2688; the other block is the report's
    x[0, 0], x[1, 3] = 2688.0, 6.3744
    near, near_counts = quantize(x, parse_format("nvfp4"))
    assert float(near[1, 3]) == 6.0 and int(near_counts.clipped) == 1
    up, up_counts = quantize(x, parse_format("nvfp4:scale_round=up"))
    assert float(up[1, 3]) == 6 * 1.125 and int(up_counts.clipped) == 0
    assert "scale_round=up" in str(parse_format("nvfp4:scale_round=up"))


def test_A10_divisor_and_multiplier_give_the_same_floats() -> None:
    encoded = encode(torch.randn(2, 8, 64), parse_format("nvfp4"))
    assert encoded.scales is not None
    packed = pack_nibbles(encoded.codes)
    divisor = torch.full((2,), 3584.0)
    one = import_nvfp4(packed, encoded.scales, dk=64, encode_scale=divisor)
    two = import_nvfp4(packed, encoded.scales, dk=64, decode_scale=1 / divisor)
    assert torch.equal(decode(one), decode(two))
    assert float(decode(one).abs().max()) <= 6 * 448 / 3584


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8", "fp8-e5m2", "nvfp4", "mxfp4", "int8@row"])
def test_A11_stochastic_rounding_is_never_a_default_buffer(name: str) -> None:
    """After scaling: amplitudes where even E2M1 keeps most codes non-zero."""
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(64, 256, generator=gen)
    x += x.sign()  # |x| > 1: the smallest code of a block of E2M1 is then rare but not absent
    fmt = parse_format(name + "-sr")
    encoded = encode(x, fmt, words(x.numel()).view_as(x))
    low_bits = encoded.codes.view(torch.int8 if encoded.codes.element_size() == 1 else torch.int16)
    assert float((low_bits != 0).double().mean()) > 0.8
    # Mean error in units of its own standard error, clipped elements aside (saturation is biased).
    error = (decode(encoded) - x).double()
    keep = error.abs() < 0.5 * x.abs().max()
    z = error[keep].mean() / (error[keep].std() / math.sqrt(int(keep.sum())))
    if int(encoded.counts.clipped) == 0:
        assert abs(float(z)) < SIGMAS


def test_A12_words_depend_on_the_step_and_resume() -> None:
    steps = 4096

    def run(first: int, last: int) -> torch.Tensor:
        zero = torch.zeros(1, dtype=torch.int64)
        drawn, *_ = philox4x32((zero, torch.arange(first, last), zero, zero), seed_key(5))
        assert int(drawn[0]) == int(words(1, seed=5, flush=first))
        return stochastic(0.3, INT8, drawn)

    up = run(0, steps)
    assert within(int(up.sum()), steps, 0.3)
    z = (up - up.mean()).double()
    lag = float((z[1:] * z[:-1]).mean() / (z * z).mean())
    assert abs(lag) < SIGMAS / math.sqrt(steps)  # 0.078
    assert torch.equal(run(1000, steps), up[1000:])


@pytest.mark.parametrize(
    ("element", "x", "high", "p"),
    [
        (E4M3, 1.0625, 1.125, 0.5),
        (E4M3, 1.0125, 1.125, 0.1),
        (E4M3, 1.1125, 1.125, 0.9),
        (E5M2, 1.125 * 2**-14, 1.25 * 2**-14, 0.5),
        (E5M2, 1.025 * 2**-14, 1.25 * 2**-14, 0.1),
        (E5M2, 1.225 * 2**-14, 1.25 * 2**-14, 0.9),
    ],
)
def test_A13_up_probability(element: object, x: float, high: float, p: float) -> None:
    n = 20_000
    out = stochastic(x, element, words(n, seed=13))
    assert within(int((out == high).sum()), n, p)


def test_A15_stochastic_rounding_saturates() -> None:
    ends = torch.tensor([0, 1 << 31, (1 << 32) - 1])
    x = torch.full((3, 128), 1e-3)
    x[:, 0] = 449.0
    # bf16 scales round: amax / scale exceeds qmax for many maxima
    for amax in torch.linspace(400, 500, 251):
        x[:, 0] = amax
        for name in ("fp8@row:scale=bf16-sr", "fp8@row-sr"):
            codes = encode(x, parse_format(name), ends[:, None]).codes
            assert not ((codes & 0x7F) == 0x7F).any()
    none = parse_format("float8_e4m3fn@none-sr")
    assert decode(encode(torch.full((3, 1), 449.0), none, ends[:, None])).tolist() == [[448.0]] * 3
    quarter = torch.arange(1 << 10, dtype=torch.int64) << 22
    assert int((stochastic(440.0, E4M3, quarter) == 448).sum()) == 768
    assert int((stochastic(5.5, E2M1, quarter) == 6).sum()) == 768
    six, _ = quantize(
        torch.tensor([[6.4] + [0.0] * 31] * 3), parse_format("mxfp4-sr"), ends[:, None]
    )
    assert six[:, 0].tolist() == [6.0] * 3


def test_A17_our_own_mean_test_over_300_seeds() -> None:
    """The tolerance is derived from the variance, so that no seed fails."""
    n = 4096
    for f in (0.03, 0.5, 0.7):
        counts = [
            int(stochastic(f, INT8, words(n, seed=seed, flush=int(100 * f))).sum())
            for seed in range(300)
        ]
        failures = [c for c in counts if not within(c, n, f)]
        assert not failures
        # and the spread over seeds is the binomial one: the test could fail
        spread = np.var(counts) / (n * f * (1 - f))
        low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], 299) / 299
        assert low < spread < high


def test_A18_words_do_not_depend_on_shape_or_batch() -> None:
    whole = words(40_961, seed=8)
    assert torch.equal(words(40_960, seed=8), whole[:40_960])
    assert torch.equal(words(50_000, seed=8)[:40_961], whole)
    common = {"seed": 8, "layer": 2, "copy": 0, "flush": 4, "heads": 2, "dv": 16, "dk": 32}
    batch = sr_words(stream=torch.tensor([5, 1, 7]), **common)
    for row, stream in enumerate((5, 1, 7)):
        assert torch.equal(sr_words(stream=torch.tensor([stream]), **common)[0], batch[row])
    x = torch.randn(3, 2, 16, 32)
    fmt = parse_format("fp8-sr")
    together = encode(x, fmt, batch).codes
    assert all(torch.equal(encode(x[i], fmt, batch[i]).codes, together[i]) for i in range(3))


def test_A19_integers_and_stored_scales() -> None:
    n = 1 << 12
    drawn = torch.arange(n, dtype=torch.int64) << 20
    out = stochastic(-0.3, INT8, drawn)
    down = int((out == -1).sum())
    assert down + int((out == 0).sum()) == n
    assert abs(down - 0.3 * n) <= 1  # counted, not sampled
    fmt = parse_format("int8@key:scale=bf16-sr")
    gen = torch.Generator().manual_seed(1)
    for _ in range(20):
        x = torch.randn(128, 64, generator=gen)
        for draw in (0, (1 << 32) - 1):
            encoded = encode(x, fmt, torch.tensor([draw]))
            assert int(encoded.codes.min()) >= -127
            assert encoded.scales is not None and encoded.scales.dtype == torch.bfloat16
            # the stored scale in both directions: its own rounding adds no error
            scale = encoded.scales.float()
            y = (x / scale).clamp(-127, 127)
            assert bool(((encoded.codes - y).abs() < 1).all())
            assert torch.equal(decode(encoded), encoded.codes.float() * scale)
    zero = encode(torch.zeros(128, 64), parse_format("int8@key:scale=fp16"))
    assert zero.scales is not None and zero.scales.float().isfinite().all()
    assert (decode(zero) == 0).all()
    tiny, counts = quantize(torch.full((128, 64), 1e-8), parse_format("int8@key:scale=fp16"))
    assert (tiny == 0).all() and int(counts.zeroed) == 64


def test_A21_code_tables_are_explicit() -> None:
    fn, fnuz = value_table("float8_e4m3fn"), value_table("float8_e4m3fnuz")
    assert [i for i, v in enumerate(fn) if math.isnan(v)] == [0x7F, 0xFF]
    assert [i for i, v in enumerate(fnuz) if math.isnan(v)] == [0x80]
    assert max(v for v in fn if not math.isnan(v)) == 448
    assert max(v for v in fnuz if not math.isnan(v)) == 240
    # qmax 240 with FN codes is another thing than FNUZ
    tile = parse_format("fp8@tile32x128:qmax=240")
    assert tile.element.name == "float8_e4m3fn" and tile.element.max_finite == 448


def test_A23_ragged_blocks() -> None:
    fmt = parse_format("int8@block32")
    x = torch.ones(2, 80)
    x[:, 64:] = 1e-3  # the last block's own maximum
    encoded = encode(x, fmt)
    assert encoded.scales is not None and encoded.scales.shape == (2, 3)
    assert (encoded.codes == 127).all()
    assert fmt.bits_per_element(2, 80) == 8 + Fraction(3 * 32, 80)
    y = torch.randn(33, 16)
    for name in ("nvfp4", "nvfp4-sr", "fp8@tile32x128", "int8@key"):
        out, _ = quantize(y, parse_format(name), words(33 * 16).view(33, 16))
        assert out.shape == y.shape and out.isfinite().all()


def test_B05_persistent_state_in_sixteen_bits() -> None:
    def add_halves(start: float, name: str, rows: int = 1) -> torch.Tensor:
        fmt = parse_format(name)
        state = torch.full((rows, 1), start)
        for step in range(1000):
            drawn = words(rows, seed=21, flush=step).view(rows, 1) if fmt.needs_words else None
            state, _ = quantize(state + 0.5, fmt, drawn, counts=False)
        return state

    assert float(add_halves(256, "fp32")) == 756
    assert float(add_halves(256, "bf16")) == 256
    assert float(add_halves(2048, "fp16")) == 2048
    rows = 256
    out = add_halves(256, "bf16-sr", rows).double()
    # steps of 2 below 512 and 4 above: variance at most 1000 * f (1 - f) * 16 with f = 1/8
    deviation = math.sqrt(1000 * (1 / 8) * (7 / 8) * 16 / rows)
    assert abs(float(out.mean()) - 756) < SIGMAS * deviation
    assert float(out.std()) > 1


def test_F01_fp8_tiles() -> None:
    fmt = parse_format("sglang-fp8-tile")
    x = torch.rand(128, 128) * 0.9
    x[::32, 7] = 1.0
    encoded = encode(x, fmt)
    assert encoded.scales is not None and encoded.scales.shape == (4, 1)
    assert (encoded.scales == torch.tensor(1.0) / torch.tensor(240.0)).all()
    assert (decode(encoded)[::32, 7] == 1).all()
    assert float(fmt.bits_per_element(128, 128)) == 8.0078125
    # tiles follow the V axis: a state kept as [dk, dv] is the same after a transpose
    kept = x.T.contiguous()
    assert torch.equal(decode(encode(kept.T, fmt)), decode(encoded))


def test_F05_per_row_scales() -> None:
    x = torch.randn(4, 64, 128)
    x[1, 5] = 0.0
    for name, bits in [("vllm-int8-row", 8.25), ("vllm-int16-row", 16.25), ("vllm-fp8-row", 8.25)]:
        fmt = parse_format(name)
        encoded = encode(x, fmt)
        assert encoded.scales is not None and encoded.scales.shape == (4, 64, 1)
        assert float(fmt.bits_per_element(64, 128)) == bits
        assert (decode(encoded)[1, 5] == 0).all() and float(encoded.scales[1, 5, 0]) == 1
