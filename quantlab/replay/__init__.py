"""When a state is stored, in which formats, and which copy a step reads.

Policies and their names import no torch; the scan and its oracle import it on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quantlab.replay.policy import SUITES, Policy, PolicyError, parse_policy, suite

if TYPE_CHECKING:
    from quantlab.replay.carried import ScanState
    from quantlab.replay.scan import WindowedScan
    from quantlab.replay.stepwise import StepwiseCache

__all__ = [
    "SUITES",
    "Policy",
    "PolicyError",
    "ScanState",
    "StepwiseCache",
    "WindowedScan",
    "parse_policy",
    "suite",
]

_NEED_TORCH = {
    "ScanState": "quantlab.replay.carried",
    "StepwiseCache": "quantlab.replay.stepwise",
    "WindowedScan": "quantlab.replay.scan",
}


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
