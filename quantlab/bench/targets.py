"""Targets beside the committed results, and what falls short of them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quantlab.bench.result import BENCHES, Result, read_result
from quantlab.errors import RunError

_KEYS = {"bench", "row", "value", "at_least", "at_most", "issue"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound on one figure.

    Attributes:
        bench: one of `quantlab.bench.result.BENCHES`.
        row: name of the row.
        value: name of the figure in it.
        at_least: lower bound, or None.
        at_most: upper bound, or None.
        issue: where it was set.
    """

    bench: str
    row: str
    value: str
    at_least: float | None = None
    at_most: float | None = None
    issue: int = 0

    def __post_init__(self) -> None:
        if self.bench not in BENCHES:
            raise ValueError(f"bench must be one of {', '.join(BENCHES)}, got {self.bench!r}")
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"{self.row}: exactly one of at_least and at_most")

    def __str__(self) -> str:
        bound = f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"
        return f"{self.bench}: {self.row}: {self.value} {bound}"

    def met_by(self, figure: float) -> bool:
        """Whether a figure meets it; NaN never does."""
        if self.at_least is not None:
            return figure >= self.at_least
        assert self.at_most is not None
        return figure <= self.at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A target and what was found.

    Attributes:
        target: the target.
        figure: the latest committed figure, None where there is none.
        found: the file it came from, or why there is none.
    """

    target: Target
    figure: float | None
    found: str

    @property
    def met(self) -> bool:
        """Whether there is a figure and it is good enough."""
        return self.figure is not None and self.target.met_by(self.figure)


def read_targets(path: Path) -> list[Target]:
    """Read targets.toml: tables `[[target]]`, `row` a name or a list of names.

    Raises:
        RunError: it is not such a file.
    """
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)["target"]
        targets = []
        for table in tables:
            unknown = set(table) - _KEYS
            if unknown:
                raise ValueError(f"unknown key {', '.join(sorted(unknown))}")
            rows = table["row"] if isinstance(table["row"], list) else [table["row"]]
            targets += [Target(**(table | {"row": row})) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} does not hold targets: {error}") from error
    return targets


def verify(targets: Iterable[Target], folder: Path) -> list[Verdict]:
    """Compare targets with the latest measured results in a folder.

    Raises:
        RunError: a file there is not a result.
    """
    results = [(path.name, read_result(path)) for path in sorted(folder.glob("*.json"))]
    measured = [(name, r) for name, r in results if r.measurement]
    measured.sort(key=lambda pair: pair[1].time)
    return [_verdict(target, measured) for target in targets]


def _verdict(target: Target, results: list[tuple[str, Result]]) -> Verdict:
    for name, result in reversed(results):
        row = result.row(target.row) if result.bench == target.bench else None
        if row is None:
            continue
        if row.status != "ok":
            return Verdict(target=target, figure=None, found=f"{name}: {row.status}: {row.reason}")
        if target.value not in row.values:
            return Verdict(target=target, figure=None, found=f"{name}: without this figure")
        return Verdict(target=target, figure=row.values[target.value], found=name)
    return Verdict(target=target, figure=None, found="no result")
