"""Drive a model over token streams under many state policies at once.

Plans and the engines' names import no torch; driving a model imports it on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quantlab.engine.planner import ENGINES, Engine, Plan, plan

if TYPE_CHECKING:
    from quantlab.engine.decoded_forcing import DecodedForcing
    from quantlab.engine.decoder import Decoder, Prompt, prefill
    from quantlab.engine.teacher_forcing import REFERENCE, Measurement, TeacherForcing

__all__ = [
    "ENGINES",
    "REFERENCE",
    "DecodedForcing",
    "Decoder",
    "Engine",
    "Measurement",
    "Plan",
    "Prompt",
    "TeacherForcing",
    "plan",
    "prefill",
]

_HOME = {
    "teacher_forcing": ("Measurement", "REFERENCE", "TeacherForcing"),
    "decoder": ("Decoder", "Prompt", "prefill"),
    "decoded_forcing": ("DecodedForcing",),
}
_NEED_TORCH = {name: home for home, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:
        return getattr(import_module(f"quantlab.engine.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
