"""State shapes from a config alone, against those of the loaded model."""

import pytest

from quantlab.errors import UsageError
from quantlab.models.loaded import adapt
from quantlab.models.registry import FAMILIES
from quantlab.models.shapes import recurrent_shapes
from tests.models.tiny import tiny_hf


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_need_no_weights(family, tmp_path):
    model = tiny_hf(family)
    model.save_pretrained(tmp_path)
    expected = adapt(model).recurrent_shapes
    found = recurrent_shapes(str(tmp_path))
    assert found == expected and len(found) > 0


def test_a_name_that_is_none():
    with pytest.raises(UsageError, match="did you mean tiny-gdn"):
        recurrent_shapes("tiny-gdm")
