"""Drive a model over token streams under many state policies at once.

Plans and the engines' names import no torch; driving a model imports it on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quantlab.engine.planner import ENGINES, Engine, Plan, plan

if TYPE_CHECKING:
    from quantlab.engine.teacher_forcing import REFERENCE, Measurement, TeacherForcing

__all__ = ["ENGINES", "REFERENCE", "Engine", "Measurement", "Plan", "TeacherForcing", "plan"]

_NEED_TORCH = ("Measurement", "REFERENCE", "TeacherForcing")


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:
        return getattr(import_module("quantlab.engine.teacher_forcing"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
