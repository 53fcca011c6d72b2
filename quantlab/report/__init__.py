"""Figures, tables and the HTML page of a run, from its rows and records alone."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantlab.report.page import write_report
    from quantlab.report.table import plain_table

__all__ = ["plain_table", "write_report"]

_HOME = {"write_report": "page", "plain_table": "table"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
