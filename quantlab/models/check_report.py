"""Verdicts of a model's self-test, as values and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from quantlab.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One check.

    Attributes:
        name: what was compared.
        value: what was measured.
        bound: what it is compared with.
        passed: the verdict.
        detail: the measure's unit, or the error that stopped the check.
    """

    name: str
    value: float
    bound: float
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """All checks of one model.

    Attributes:
        model: its name.
        rows: one per check, in the order they ran.
    """

    model: str
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(row.passed for row in self.rows)

    def table(self) -> str:
        """Lay the checks out as text, one a line."""
        width = max(len(row.name) for row in self.rows)
        return "\n".join(
            f"{'ok  ' if r.passed else 'FAIL'}  {r.name:<{width}}  {r.value:9.2g}  "
            f"(bound {r.bound:.2g})  {r.detail}".rstrip()
            for r in self.rows
        )

    def raise_if_failed(self) -> None:
        """Raise RunError with the table if a check failed."""
        if not self.passed:
            raise RunError(
                f"{self.model} fails its self-test; results would be wrong:\n{self.table()}"
            )
