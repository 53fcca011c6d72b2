"""Parameter types and small conversions that several commands use."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from quantlab.errors import QuantlabError, UsageError

T = TypeVar("T")

if TYPE_CHECKING:
    _Integer = click.ParamType[int]
    _Choice = click.Choice[str]
else:  # generic at run time only in recent versions of click
    _Integer, _Choice = click.ParamType, click.Choice


class Size(_Integer):
    """A positive whole number, `K` for 1,024: 4096, 4K, 131_072."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([+-]?[\d_,]+)([kKmM]?)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a whole number (4096, 4K)", param, ctx)
        scale = {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]
        number = int(match[1].replace("_", "").replace(",", "")) * scale
        if number < 1:
            self.fail(f"must be positive (got {value})", param, ctx)
        return number


SIZE = Size()


class Choice(_Choice):
    """One of a few names; a wrong one is told the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Read it."""
        try:
            return str(super().convert(value, param, ctx))
        except click.BadParameter as error:
            near = difflib.get_close_matches(str(value).lower(), self.choices, n=1, cutoff=0.5)
            if not near:
                raise
            message = f"{error.message} Did you mean {near[0]!r}?"
            raise click.BadParameter(message, ctx=ctx, param=param) from error


def given(option: str, parse: Callable[[str], T], text: str) -> T:
    """Parse a name; what is wrong with it is said with the option it came from.

    Raises:
        UsageError: where `parse` refuses it.
    """
    try:
        return parse(text)
    except (ValueError, QuantlabError) as error:
        if isinstance(error, QuantlabError) and error.exit_code != UsageError.exit_code:
            raise
        raise UsageError(f"{option}: {error}") from error


def echo_json(value: Any) -> None:
    """Write one JSON document as one line; NaN and infinity, which JSON lacks, become null."""
    click.echo(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def columns(rows: Sequence[tuple[str, ...]], header: tuple[str, ...] | None = None) -> str:
    """Lay rows out in aligned columns, two spaces apart."""
    lines = [header, *rows] if header else rows
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    laid = (
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    return "\n".join(laid)
