"""How policies look in figures: a colour each, dashes and marks by family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantlab.replay.policy import parse_policy

# Okabe and Ito's colour-blind-safe palette without its yellow, which vanishes on white, then
# colours of Tol's "muted" scheme that differ from them. Source: Okabe & Ito 2008; Tol 2021.
PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#882255",
    "#999933",
    "#332288",
    "#AA4499",
    "#44AA99",
)
FLOOR_COLOUR = "#888888"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Look of one policy's line.

    Attributes:
        name: legend name.
        colour: hex.
        dash: on-off lengths in pixels; [1, 0] is solid.
        mark: Vega symbol.
    """

    name: str
    colour: str
    dash: list[int]
    mark: str


def named_colours(alt: Any, field: str, names: list[str], title: str) -> Any:
    """Colour by a field, in the order of its names, with a legend that shows them whole."""
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(names))]
    scale = alt.Scale(domain=names, range=colours)
    legend = alt.Legend(labelLimit=300, symbolOpacity=1)
    return alt.Color(f"{field}:N", title=title, sort=names, scale=scale, legend=legend)


def styles(policies: list[str], floor: str | None) -> dict[str, Style]:
    """Style of every policy, by its long form.

    One copy (shared) is solid with circles, two copies dashed with a mark by the recurrence's
    element, conventional dotted with diamonds; the noise floor is grey.

    Args:
        policies: long forms, in the study's order, which decides the colours.
        floor: the one that is the noise floor.
    """
    found: dict[str, Style] = {}
    for text in policies:
        policy = parse_policy(text)
        colour = FLOOR_COLOUR if text == floor else PALETTE[_coloured(found, floor) % len(PALETTE)]
        if policy.kind == "separate":
            bits = policy.recur.element.bits
            mark = "square" if bits >= 32 else "triangle-up" if bits >= 16 else "triangle-down"
            dash = [7, 3]
        elif policy.kind == "shared":
            mark, dash = "circle", [1, 0]
        else:
            mark, dash = "diamond", [2, 3]
        found[text] = Style(name=policy.short, colour=colour, dash=dash, mark=mark)
    return found


def _coloured(found: dict[str, Style], floor: str | None) -> int:
    return sum(text != floor for text in found)
