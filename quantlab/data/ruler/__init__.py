"""RULER's synthetic tasks, made offline at any context length (`data_manifests/ruler.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Any

from quantlab.data.manifest import manifest_path
from quantlab.data.ruler.generators import KINDS
from quantlab.data.ruler.item import RulerItem
from quantlab.errors import RunError

__all__ = ["RULER", "RulerItem", "ruler_items", "ruler_tasks"]

RULER = (
    "ruler-single-1", "ruler-single-2", "ruler-single-3", "ruler-multikey-1", "ruler-multikey-2",
    "ruler-multikey-3", "ruler-multivalue", "ruler-multiquery", "ruler-variables",
    "ruler-common-words", "ruler-frequent-words",
)  # fmt: skip
"""Tasks of the manifest, in an order that does not change: it keys draws."""


@cache
def _manifest() -> Mapping[str, Any]:
    path = manifest_path("ruler")
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{path} is damaged: {error}") from error


def ruler_tasks() -> Mapping[str, Mapping[str, Any]]:
    """Read the settings of every task by name, those of the whole manifest included."""
    whole = _manifest()
    shared = {key: whole[key] for key in ("questions", "repetitions", "licence", "source")}
    return {name: {**shared, **own} for name, own in whole["tasks"].items()}


def ruler_items(task: str, count: int) -> list[RulerItem]:
    """Make the first questions of a task, not yet of any length."""
    settings = ruler_tasks()[task]
    make = KINDS[settings["kind"]]
    return [RulerItem(id=index, build=make(task, index, settings)) for index in range(count)]
