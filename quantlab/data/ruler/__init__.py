"""RULER's thirteen tasks at any context length.

Eleven are made offline (`data_manifests/ruler.toml`), two put questions of public data sets among
their documents (`data_manifests/ruler-squad.toml`, `ruler-hotpotqa.toml`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Any

from quantlab.data.manifest import manifest_path
from quantlab.data.ruler.answering import answering_items
from quantlab.data.ruler.generators import KINDS
from quantlab.data.ruler.item import RulerItem
from quantlab.errors import RunError

__all__ = ["ANSWERING", "RULER", "SYNTHETIC", "RulerItem", "ruler_items", "ruler_tasks"]

SYNTHETIC = (
    "ruler-single-1", "ruler-single-2", "ruler-single-3", "ruler-multikey-1", "ruler-multikey-2",
    "ruler-multikey-3", "ruler-multivalue", "ruler-multiquery", "ruler-variables",
    "ruler-common-words", "ruler-frequent-words",
)  # fmt: skip
ANSWERING = ("ruler-squad", "ruler-hotpotqa")
RULER = (*SYNTHETIC, *ANSWERING)
"""Tasks, in an order that does not change: it keys draws."""


@cache
def _manifest(name: str) -> Mapping[str, Any]:
    path = manifest_path(name)
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{path} is damaged: {error}") from error


def ruler_tasks() -> Mapping[str, Mapping[str, Any]]:
    """Read the settings of every task by name, those of its whole manifest included."""
    whole = _manifest("ruler")
    shared = {key: whole[key] for key in ("questions", "repetitions", "licence", "source")}
    made = {name: {**shared, **whole["tasks"][name]} for name in SYNTHETIC}
    public = {name: _manifest(name) for name in ANSWERING}
    source = {name: f"{own['repository']}@{own['revision']}" for name, own in public.items()}
    return made | {name: {**own, "source": source[name]} for name, own in public.items()}


def ruler_items(task: str, count: int) -> list[RulerItem]:
    """Make the first questions of a task, not yet of any length.

    Raises:
        MissingAsset, RunError, UsageError: of a task on public data (`answering_items`).
    """
    settings = ruler_tasks()[task]
    if task in ANSWERING:
        return answering_items(task, count, settings)
    make = KINDS[settings["kind"]]
    return [RulerItem(id=index, build=make(task, index, settings)) for index in range(count)]
