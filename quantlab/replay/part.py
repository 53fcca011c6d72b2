"""Part of a model: recurrent layers and heads that a policy's formats apply to.

Text form, as an option of a policy: `only=2.3,5` is head 3 of layer 2 and all heads of layer 5,
`except=2.3` is everything else than head 3 of layer 2. Layers count recurrent ones from 0, as
everywhere. What lies outside is stored as the reference stores it: in FP32, at the same steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quantlab.errors import UsageError

Unit = tuple[int, int | None]
"""(layer, head), or (layer, None) for a whole layer."""

_UNIT = re.compile(r"(\d+)(?:\.(\d+))?")


class PartError(UsageError, ValueError):
    """A part that cannot be, or that a model does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some heads of a model, or all others.

    Attributes:
        units: sorted; the heads of a layer are not listed beside the whole layer.
        excluded: whether the part is everything but the units.

    Raises:
        PartError: no unit, or one that is listed twice.
    """

    units: tuple[Unit, ...]
    excluded: bool = False

    def __post_init__(self) -> None:
        ordered = sorted(set(self.units), key=_order)
        if not ordered or len(ordered) != len(self.units):
            raise PartError(f"{self}: a part lists one or more layers or heads, each once")
        whole = {layer for layer, head in ordered if head is None}
        if any(layer in whole for layer, head in ordered if head is not None):
            raise PartError(f"{self}: a layer is listed whole and by head")
        object.__setattr__(self, "units", tuple(ordered))

    def heads(self, layer: int, count: int) -> tuple[bool, ...]:
        """Say which of a layer's `count` heads belong to the part."""
        listed = {head for at, head in self.units if at == layer}
        return tuple((None in listed or head in listed) != self.excluded for head in range(count))

    def require(self, heads: Sequence[int]) -> None:
        """Check that a model has the units.

        Args:
            heads: heads of every recurrent layer.

        Raises:
            PartError: it does not.
        """
        for layer, head in self.units:
            if layer >= len(heads):
                raise PartError(
                    f"{self}: the model has recurrent layers 0 … {len(heads) - 1}, not {layer}"
                )
            if head is not None and head >= heads[layer]:
                raise PartError(
                    f"{self}: layer {layer} has heads 0 … {heads[layer] - 1}, not {head}"
                )

    def __str__(self) -> str:
        named = (str(at) if head is None else f"{at}.{head}" for at, head in self.units)
        return f"{'except' if self.excluded else 'only'}={','.join(named)}"


def parse_part(option: str, text: str) -> Part:
    """Read a part; `parse_part(*str(part).split("="))` is the part again.

    Args:
        option: "only" or "except".
        text: units separated by commas.

    Raises:
        PartError: it does not name units.
    """
    units: list[Unit] = []
    for word in text.split(","):
        match = _UNIT.fullmatch(word)
        if match is None:
            raise PartError(
                f"{option}={text}: {word!r} is neither a layer such as 2 nor a head such as 2.3"
            )
        units.append((int(match[1]), None if match[2] is None else int(match[2])))
    return Part(units=tuple(units), excluded=option == "except")


def _order(unit: Unit) -> tuple[int, int]:
    layer, head = unit
    return layer, -1 if head is None else head
