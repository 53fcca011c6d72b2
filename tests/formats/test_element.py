"""Element tables: derived limits and every code against ml_dtypes."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from quantlab.formats import ELEMENTS
from quantlab.formats.codes import code_values, element_codes, value_table
from quantlab.formats.element import ELEMENT_ALIASES, FloatElement, IntElement
from quantlab.formats.registry import FORMATS, PRESETS
from quantlab.formats.scale import SCALE_ALIASES, SCALE_TYPES

FLOATS = [e for e in ELEMENTS.values() if isinstance(e, FloatElement)]
SMALL = [e for e in FLOATS if e.bits <= 8]


@pytest.mark.parametrize("element", FLOATS, ids=lambda e: e.name)
def test_limits_agree_with_ml_dtypes(element: FloatElement) -> None:
    info = ml_dtypes.finfo(element.name)
    assert element.bits == info.bits
    assert element.man_bits == info.nmant and element.exp_bits == info.nexp
    # Fractions of the types' own values: float64's largest number is in range too.
    assert element.max_finite == Fraction(float(info.max))
    assert element.smallest_normal == Fraction(float(info.smallest_normal))
    assert element.smallest_subnormal == Fraction(float(info.smallest_subnormal))
    assert element.emin == info.minexp


@pytest.mark.parametrize("element", SMALL, ids=lambda e: e.name)
def test_every_code_decodes_as_in_ml_dtypes_and_encodes_back(element: FloatElement) -> None:
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    theirs = codes.view(getattr(ml_dtypes, element.name)).astype(np.float32)
    ours = np.array(value_table(element.name), dtype=np.float32)
    np.testing.assert_array_equal(ours.view(np.uint32)[~np.isnan(ours)],
                                  theirs.view(np.uint32)[~np.isnan(theirs)])  # fmt: skip
    assert (np.isnan(ours) == np.isnan(theirs)).all()
    back = element_codes(torch.from_numpy(ours), element).numpy()
    assert (back[~np.isnan(ours)] == codes[~np.isnan(ours)]).all()
    if element.nan_code is not None:
        assert (back[np.isnan(ours)] == element.nan_code).all()
        assert math.isnan(element.value(element.nan_code))
    assert torch.equal(
        code_values(torch.from_numpy(codes), element).nan_to_num(9.0),
        torch.from_numpy(ours).nan_to_num(9.0),
    )


@pytest.mark.parametrize("element", SMALL, ids=lambda e: e.name)
def test_holds_exactly_the_values_of_the_type(element: FloatElement) -> None:
    finite = {Fraction(v) for v in value_table(element.name) if math.isfinite(v)}
    assert all(element.holds(v) for v in finite)
    step = element.smallest_subnormal / 2
    assert not any(element.holds(v + step) for v in finite)
    assert not element.holds(2 * element.max_finite)


def test_integers_are_symmetric() -> None:
    ints = [e for e in ELEMENTS.values() if isinstance(e, IntElement)]
    assert [(e.bits, int(e.max_finite)) for e in ints] == [(4, 7), (6, 31), (8, 127), (16, 32767)]
    assert all(e.holds(Fraction(-3)) and not e.holds(Fraction(1, 2)) for e in ints)


def test_names_are_unique() -> None:
    assert len(ELEMENT_ALIASES) == len(ELEMENTS)
    assert len(SCALE_ALIASES) == len(SCALE_TYPES)
    assert not set(PRESETS) & (set(FORMATS) | set(ELEMENTS) | set(ELEMENT_ALIASES))


def test_scale_types_agree_with_ml_dtypes() -> None:
    for kind in SCALE_TYPES.values():
        assert kind.max_finite == float(ml_dtypes.finfo(kind.name).max)
        assert kind.bits == ml_dtypes.finfo(kind.name).bits
