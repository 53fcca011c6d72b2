"""The noise kernel draws what the plain version draws."""

import pytest
import torch

from quantlab.engine import sampling
from tests.kernels.device import DEVICE, MARKS

from quantlab_kernels import gumbel  # isort: skip

pytestmark = MARKS


@pytest.mark.parametrize("vocabulary", [384, 37, 1030])
def test_noise_is_the_plain_versions(vocabulary):
    seeds = torch.tensor([0, 5, (1 << 63) - 1, -3, 5])  # the fourth has its highest bits set
    keys = {
        "question": torch.tensor([0, 7, sampling.QUESTIONS - 1, 3, 7]),
        "repetition": torch.tensor([0, 1, sampling.REPETITIONS - 1, 2, 1]),
        "step": torch.tensor([0, 9, 131_071, 1, 10]),
    }
    want = sampling.gumbel_rows(seed=seeds, vocabulary=vocabulary, **keys)
    moved = {name: x.to(DEVICE) for name, x in keys.items()}
    got = gumbel.gumbel_rows(seed=seeds.to(DEVICE), vocabulary=vocabulary, **moved).cpu()
    # FP64 logarithms of two libraries: an ulp of the inner, over u ≤ 1 − 2^-33, grows to 2^-20
    # of its value at worst; words that differ in a bit move a value by 1e-9 and more
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(got[1], got[4])
    for row, seed in enumerate(seeds.tolist()):
        one = {name: x[row : row + 1] for name, x in keys.items()}
        alone = sampling.gumbel(seed=seed % (1 << 64), vocabulary=vocabulary, **one)
        assert torch.equal(want[row], alone[0])


def test_copy_index():
    assert gumbel.SAMPLING.value == sampling.SAMPLING
