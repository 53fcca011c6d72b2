"""OpInputs refuses what does not fit, and cuts rows and steps."""

from __future__ import annotations

import pytest
import torch

from quantlab.recurrence import OpInputs
from tests.recurrence.sampling import sample_inputs


def test_properties() -> None:
    x = sample_inputs("kda", rows=3, steps=7, heads=4, key_heads=2, dv=5, dk=6)
    assert (x.n_rows, x.steps, x.heads, x.dv, x.dk) == (3, 7, 4, 5, 6)
    assert x.is_delta
    assert x.per_channel
    assert x.compute_dtype == torch.float64
    assert not sample_inputs("mamba2").is_delta


def test_slice_and_rows() -> None:
    x = sample_inputs("gdn", rows=3, steps=7)
    part = x.slice(2, 5).rows(torch.tensor([2, 0]))
    assert part.steps == 3
    assert torch.equal(part.v, x.v[[2, 0], 2:5])
    assert part.beta is not None
    assert x.beta is not None
    assert torch.equal(part.beta, x.beta[[2, 0], 2:5])


def _valid() -> dict[str, torch.Tensor]:
    return {
        "q": torch.zeros(1, 2, 2, 4),
        "k": torch.zeros(1, 2, 2, 4),
        "v": torch.zeros(1, 2, 4, 3),
        "log_decay": torch.zeros(1, 2, 4),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 2, 2, 5)}, "q and k alike"),
        ({"v": torch.zeros(1, 2, 3, 3)}, "divide"),
        ({"v": torch.zeros(2, 2, 4, 3)}, "same rows"),
        ({"log_decay": torch.zeros(1, 2, 4, 3)}, "log_decay is"),
        ({"beta": torch.zeros(1, 2, 2)}, "beta is"),
        ({"beta": torch.zeros(1, 2, 4), "dt": torch.zeros(1, 2, 4)}, "give one"),
    ],
)
def test_refuses(change: dict[str, torch.Tensor], message: str) -> None:
    OpInputs(**_valid())
    with pytest.raises(ValueError, match=message):
        OpInputs(**(_valid() | change))
