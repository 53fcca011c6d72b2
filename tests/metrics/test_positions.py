"""The grid of N and the windows that end there."""

import pytest

from quantlab.errors import UsageError
from quantlab.metrics.positions import lengths, measured_positions, window


def test_grid_doubles_and_ends_at_the_last_position():
    assert lengths(4096) == (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    assert lengths(100) == (16, 32, 64, 100)
    assert lengths(16) == (16,) and lengths(5) == (5,)
    assert lengths(131_072)[-1] == 131_072 and len(lengths(131_072)) == 14


def test_window_is_the_min_of_n_and_256_positions_that_end_at_n():
    assert list(window(3)) == [1, 2, 3]
    assert (window(256)[0], window(256)[-1], len(window(256))) == (1, 256, 256)
    assert (window(1000)[0], window(1000)[-1], len(window(1000))) == (745, 1000, 256)


@pytest.mark.parametrize("tokens", [1, 5, 16, 300, 5000, 131_072])
def test_measured_positions_are_the_union_of_windows(tokens):
    got = measured_positions(tokens)
    assert list(got) == sorted(set(got)) and got[0] >= 1 and got[-1] == tokens
    assert set(got) == {p for n in lengths(tokens) for p in window(n)}


@pytest.mark.parametrize("tokens", [0, -4])
def test_sizes_must_be_positive(tokens):
    with pytest.raises(UsageError, match="must be positive"):
        lengths(tokens)
