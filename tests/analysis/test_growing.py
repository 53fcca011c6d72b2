import pytest
import torch

from quantlab.analysis.growing import FIRST, Growing


def test_entries_come_back_in_order():
    growing = Growing()
    with pytest.raises(ValueError, match="nothing"):
        growing.tensor()
    entries = torch.arange(3.0 * 2 * (2 * FIRST + 5)).view(-1, 3, 2)
    for entry in entries:
        growing.append(entry)
    assert len(growing) == len(entries) and torch.equal(growing.tensor(), entries)
