"""Packing, stored scales, stored sizes, and the two conventions of the state scale."""

import pytest
import torch

from quantlab.formats import decode, encode, parse_format
from quantlab.formats.codes import pack_nibbles, scale_codes, scale_values, unpack_nibbles
from quantlab.formats.convert import decode_scale_from, encode_scale_from, import_nvfp4
from quantlab.formats.scale import SCALE_TYPES


def test_low_nibble_first() -> None:
    codes = torch.tensor([[0x1, 0xF, 0x7]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0xF1, 0x07]]


@pytest.mark.parametrize("n", [16, 15, 1])
def test_packing_round_trips(n: int) -> None:
    codes = torch.randint(0, 16, (3, n), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), n), codes)
    signed = torch.randint(-8, 8, (3, n), dtype=torch.int8)
    assert torch.equal(unpack_nibbles(pack_nibbles(signed), n, signed=True), signed)
    with pytest.raises(ValueError, match="bytes"):
        unpack_nibbles(pack_nibbles(codes), n + 2)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4@block32", "fp8", "int8@row", "bf16"])
def test_stored_bytes_are_the_bits_per_element(name: str) -> None:
    fmt = parse_format(name)
    x = torch.randn(2, 3, 64, 128)
    encoded = encode(x, fmt)
    codes = pack_nibbles(encoded.codes) if fmt.element.bits == 4 else encoded.codes
    stored = sum(
        t.numel() * t.element_size()
        for t in (codes, encoded.scales, encoded.state_scale)
        if t is not None
    )
    assert stored * 8 == fmt.bits_per_element(64, 128) * x.numel()


@pytest.mark.parametrize("kind", SCALE_TYPES.values(), ids=lambda k: k.name)
def test_every_stored_scale_round_trips(kind: object) -> None:
    scale = SCALE_TYPES[kind.name]  # type: ignore[attr-defined]
    if scale.bits == 8:
        codes = torch.arange(0, 128 if scale.name == "float8_e4m3fn" else 256).to(torch.uint8)
        values = scale_values(codes, scale)
        assert torch.equal(scale_codes(values, scale), codes)
        assert int(values.isnan().sum()) == 1 and (values[:-1] >= 0).all()
        assert (values[1:-1] > values[:-2]).all()
    else:
        values = torch.tensor([1.0, 2.0**-14, 448.0, float("nan")])
        stored = scale_codes(values, scale)
        assert stored.element_size() * 8 == scale.bits
        assert torch.equal(scale_values(stored, scale).nan_to_num(7), values.nan_to_num(7))


def test_reciprocal_conventions_convert_both_ways() -> None:
    scale = torch.tensor([4096.0, 2.0**-10, 1e-3])
    assert torch.equal(encode_scale_from(decode_scale_from(scale[:2])), scale[:2])
    assert decode_scale_from(scale)[2] == torch.tensor(1.0) / scale[2]
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="positive and finite"):
            decode_scale_from(torch.tensor([bad]))


def test_import_needs_exactly_one_convention() -> None:
    encoded = encode(torch.randn(2, 4, 32), parse_format("nvfp4"))
    assert encoded.scales is not None and encoded.state_scale is not None
    packed, state = pack_nibbles(encoded.codes), encoded.state_scale[:, 0, 0]
    again = import_nvfp4(packed, encoded.scales, dk=32, decode_scale=state)
    assert torch.equal(decode(again), decode(encoded))
    for wrong in ({}, {"decode_scale": state, "encode_scale": state}):
        with pytest.raises(ValueError, match="exactly one"):
            import_nvfp4(packed, encoded.scales, dk=32, **wrong)
