"""Kernels are chosen by device or by name, and their absence is said, never worked around."""

import sys

import pytest

from quantlab import dispatch
from quantlab.errors import MissingAsset
from quantlab.replay import WindowedScan


def test_the_device_decides():
    assert dispatch.scan_class("cpu") is WindowedScan
    assert dispatch.scan_class("cuda", "torch") is WindowedScan
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        dispatch.scan_class("cpu", "cuda")


@pytest.mark.parametrize("ask", [lambda: dispatch.scan_class("cuda"), dispatch.training_kernels])
def test_without_triton_nothing_falls_back(ask, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] in ("triton", "quantlab_kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingAsset, match=r"needs Triton.*quantlab\[gpu\]"):
        ask()
