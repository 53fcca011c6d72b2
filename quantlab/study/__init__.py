"""A study: a spec, what it resolves to, rows as they are measured, and how to go on after a kill.

`run_kl(KlSpec(...), out)` is the whole of it; the names are imported on first use, so that specs
can be checked without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantlab.study.result import Result, load_result
    from quantlab.study.run import run_kl
    from quantlab.study.spec import KlSpec

__all__ = ["KlSpec", "Result", "load_result", "run_kl"]

_HOME = {
    "KlSpec": "spec",
    "Result": "result",
    "load_result": "result",
    "run_kl": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
