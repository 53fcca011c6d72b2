"""Casts and decoders on Triton against `quantlab.formats`, bit for bit: codes, scales, specials.

The reference has its own proofs (tests/formats). Nothing here has a tolerance.
"""

from __future__ import annotations

import pytest
import torch

from quantlab.formats import decode as reference_decode
from quantlab.formats import encode as reference_encode
from quantlab.formats import parse_format
from quantlab.formats.philox import sr_words
from quantlab.formats.stored import StoredStates, bytes_moved
from tests.kernels.device import DEVICE, MARKS, ON_GPU
from tests.kernels.test_stores import NAMES as STORED
from tests.kernels.test_stores import SEED, STREAMS, differing, values

import triton  # isort: skip
from quantlab_kernels.casts import TileLaunch, encode  # isort: skip
from quantlab_kernels.decoders import decode  # isort: skip

pytestmark = MARKS
NAMES = [name for name in STORED if not name.startswith("int6")]  # whose codes have no layout yet
KINDS = ["normal", "wide", "tiny", "huge", "ties", "bits", "finite bits"]
KEYS = {"seed": SEED, "layer": 3, "copy": 1, "flush": 9}


def cast(x: torch.Tensor, name: str, **launch: int) -> StoredStates:
    streams = STREAMS[: x.shape[0]].to(DEVICE)
    fmt = parse_format(name)
    return encode(x.to(DEVICE), fmt, streams=streams, launch=TileLaunch(**launch), **KEYS)


def expected(x: torch.Tensor, name: str) -> StoredStates:
    fmt = parse_format(name)
    heads, dv, dk = x.shape[1:]
    where = {"heads": heads, "dv": dv, "dk": dk}
    words = sr_words(stream=STREAMS[: x.shape[0]], **KEYS, **where) if fmt.needs_words else None
    return StoredStates.of(reference_encode(x, fmt, words))


def skip_old_interpreter(name: str, *, has_nan: bool) -> None:
    """Triton 3.6's interpreter keeps NaN in `tl.minimum`, unlike GPUs and later interpreters."""
    if has_nan and not ON_GPU and triton.__version__ < "3.7" and name[:3] in ("fp8", "nvf"):
        pytest.skip("tl.minimum of Triton 3.6's interpreter keeps NaN")


def check(got: StoredStates, want: StoredStates, where: object) -> None:
    for part in ("codes", "scales", "state_scale"):
        a, b = getattr(got, part), getattr(want, part)
        assert (a is None) == (b is None), (where, part)
        if a is None:
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, (where, part)
        a, b = a.cpu(), b.cpu()
        if a.dtype == torch.float32:
            assert differing(a, b) == 0, (where, part)
        else:
            unequal = a.view(torch.int16 if a.dtype == torch.uint16 else torch.int8) != b.view(
                torch.int16 if b.dtype == torch.uint16 else torch.int8
            )
            assert int(unequal.sum()) == 0, (where, part, unequal.nonzero()[:4].tolist())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_scales_and_values_equal_the_reference(name: str, kind: str) -> None:
    skip_old_interpreter(name, has_nan=kind == "bits")
    # widths that fill the tile, that do not, that do not divide a block, a pair or a Philox call
    for dv, dk in ((64, 128), (20, 36), (7, 33)):
        x = values(kind, (2, 2, dv, dk))
        want = expected(x, name)
        check(cast(x, name), want, (dv, dk))
        on_device = StoredStates(
            fmt=want.fmt,
            dk=dk,
            codes=want.codes.to(DEVICE),
            scales=None if want.scales is None else want.scales.to(DEVICE),
            state_scale=None if want.state_scale is None else want.state_scale.to(DEVICE),
        )
        read = decode(on_device).cpu()
        assert differing(read, reference_decode(want.encoded())) == 0, (dv, dk)


@pytest.mark.parametrize("name", NAMES)
def test_specials_and_zeros(name: str) -> None:
    skip_old_interpreter(name, has_nan=True)
    x = torch.zeros(2, 1, 20, 64)
    x[0, 0, 3, 5] = float("nan")
    x[0, 0, 9, 60] = float("-inf")
    x[0, 0, 4] = torch.linspace(-2, 2, 64)
    x[0, 0, 5, :2] = torch.tensor([-float("nan"), 1.0])
    x[1, 0, 0, :2] = torch.tensor([-0.0, 1e-45])
    want = expected(x, name)
    check(cast(x, name), want, name)


def test_blocks_whose_scale_underflows_are_zero() -> None:
    # beside 1e12 a block of fives has a scale below the least E4M3; 2**127 times five is inf
    x = torch.full((1, 1, 4, 32), 5.0)
    x[..., :16] = 1e12
    got, want = cast(x, "nvfp4"), expected(x, "nvfp4")
    check(got, want, "underflow")
    assert int(got.codes.view(torch.uint8)[..., 8:].sum()) == 0


def all_codes(name: str) -> StoredStates:
    """Every code of an element type, NaN and codes that no cast writes included."""
    fmt = parse_format(name)
    if fmt.element.bits == 16:
        codes = torch.arange(65536).to(torch.int32).to(torch.int16).view(1, 1, 64, 1024)
        return StoredStates(fmt=fmt, dk=1024, codes=codes.view(torch.uint16), scales=None,
                            state_scale=None)  # fmt: skip
    codes = torch.arange(256).to(torch.uint8).repeat(64).view(1, 1, 64, 256)
    dk = 512 if fmt.element.bits == 4 else 256
    state = None
    if name == "nvfp4":
        scales = torch.arange(64 * 32).remainder(128).to(torch.uint8).view(1, 1, 64, 32)
        state = torch.full((1, 1, 1, 1), 0.7)
    else:
        per_row = {"fp8": 2}.get(name, 1)
        scales = torch.linspace(-40, 40, 64 * per_row).exp2().view(1, 1, 64, per_row)
        scales[0, 0, 5] = float("nan")
    if name == "int8@row":
        codes = codes.view(torch.int8)
    return StoredStates(fmt=fmt, dk=dk, codes=codes, scales=scales, state_scale=state)


@pytest.mark.parametrize("name", [n for n in NAMES if not n.endswith("-sr")])
def test_every_code_decodes_as_the_reference_decodes_it(name: str) -> None:
    stored = all_codes(name)
    moved = StoredStates(
        fmt=stored.fmt,
        dk=stored.dk,
        codes=stored.codes.to(DEVICE),
        scales=None if stored.scales is None else stored.scales.to(DEVICE),
        state_scale=None if stored.state_scale is None else stored.state_scale.to(DEVICE),
    )
    assert differing(decode(moved).cpu(), reference_decode(stored.encoded())) == 0


@pytest.mark.parametrize("name", ["fp16-sr", "fp8-sr", "nvfp4-sr", "int4@row-sr"])
def test_a_launch_changes_no_bit(name: str) -> None:
    x = values("normal", (2, 3, 20, 160))
    want = cast(x, name)
    check(cast(x, name, elements=1024, warps=1, state_warps=1), want, name)
    check(cast(x, name, elements=256, warps=2), want, name)
    first = cast(x[:1], name)
    assert torch.equal(first.codes.cpu(), want.codes[:1].cpu())


@pytest.mark.parametrize("name", ["fp16", "fp8-sr", "nvfp4-sr", "int4@row"])
@pytest.mark.parametrize("shape", [(0, 2, 16, 32), (2, 0, 16, 32), (2, 2, 0, 32)])
def test_empty_tensors(name: str, shape: tuple[int, ...]) -> None:
    stored = cast(torch.zeros(shape), name)
    assert stored.codes.numel() == 0
    assert decode(stored).shape == shape


def test_what_would_be_misread_is_refused() -> None:
    x, fmt = torch.zeros(2, 2, 16, 32), parse_format("fp8")
    streams = STREAMS.to(DEVICE)
    with pytest.raises(ValueError, match="contiguous, got strides"):
        encode(x.to(DEVICE).transpose(2, 3), fmt, streams=streams, **KEYS)
    with pytest.raises(TypeError, match=r"float32, got torch\.float64"):
        encode(x.double().to(DEVICE), fmt, streams=streams, **KEYS)
    with pytest.raises(ValueError, match="one id per row"):
        encode(x.to(DEVICE), fmt, streams=streams[:1], **KEYS)
    with pytest.raises(ValueError, match="nothing to cast"):
        encode(x.to(DEVICE), parse_format("fp32"), streams=streams, **KEYS)
    with pytest.raises(ValueError, match=r"no codes of int6@row; .*int8"):
        cast(x, "int6@row")
    with pytest.raises(ValueError, match="cannot store mxfp4"):
        encode(x.to(DEVICE), parse_format("mxfp4"), streams=streams, **KEYS)
    with pytest.raises(ValueError, match="256 x 256 is too large"):
        wide = torch.zeros(1, 1, 256, 256, device=DEVICE)
        encode(wide, parse_format("nvfp4"), streams=streams[:1], **KEYS)


@pytest.mark.parametrize("name", ["fp16", "fp8", "nvfp4", "int4@row"])
def test_bytes_moved_are_the_tensors_sizes(name: str) -> None:
    x = values("normal", (2, 2, 64, 128))
    stored = cast(x, name)
    assert stored.nbytes + 4 * x.numel() == bytes_moved(stored.fmt, x.numel(), 64, 128)
