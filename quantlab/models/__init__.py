"""Hybrid language models of transformers with their recurrence opened up.

Names are imported on first use, so that presets and the registry can be listed without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantlab.models.check import check_model, load_checked
    from quantlab.models.check_report import CheckReport, CheckRow
    from quantlab.models.dispatch import Handler, OpCall, Replacement, counted, replaced
    from quantlab.models.forward import (
        cache_keyword,
        forward_hidden,
        head,
        new_cache,
        takes_positions,
    )
    from quantlab.models.load import load_model
    from quantlab.models.loaded import LoadedModel, adapt
    from quantlab.models.presets import PRESETS
    from quantlab.models.registry import FAMILIES, Family
    from quantlab.models.source import Source, known_names, resolve

_HOME = {
    "check": ("check_model", "load_checked"),
    "check_report": ("CheckReport", "CheckRow"),
    "dispatch": ("Handler", "OpCall", "Replacement", "counted", "replaced"),
    "forward": ("cache_keyword", "forward_hidden", "head", "new_cache", "takes_positions"),
    "load": ("load_model",),
    "loaded": ("LoadedModel", "adapt"),
    "presets": ("PRESETS",),
    "registry": ("FAMILIES", "Family"),
    "source": ("Source", "known_names", "resolve"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "FAMILIES",
    "PRESETS",
    "CheckReport",
    "CheckRow",
    "Family",
    "Handler",
    "LoadedModel",
    "OpCall",
    "Replacement",
    "Source",
    "adapt",
    "cache_keyword",
    "check_model",
    "counted",
    "forward_hidden",
    "head",
    "known_names",
    "load_checked",
    "load_model",
    "new_cache",
    "replaced",
    "resolve",
    "takes_positions",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
