"""What claims are judged on, how a judgement is expressed, and small ways to look things up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quantlab.report.table import number, short_length, short_policy

Verdict = Literal["holds", "does not hold", "not measured", "cannot be tested here"]
Paper = Literal["replayssm", "delta-rule"]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was measured on one model.

    Attributes:
        model: its name.
        op: "gdn", "kda" or "mamba2".
        kl: rows of `SUMMARY_SCHEMA` with the activations' `dtype`, empty if not run.
        rounding: rows of `ROUNDING_SCHEMA`.
        window: rows of `WINDOW_SCHEMA`.
        correction: rows of `CORRECTION_SCHEMA`.
        propagation: rows of `PROPAGATION_SCHEMA`.
        copies: rows of `COPIES_SCHEMA`.
        order: policy → Spearman of its units' accumulated error between two streams, mean.
    """

    model: str
    op: str
    kl: Sequence[Row] = ()
    rounding: Sequence[Row] = ()
    window: Sequence[Row] = ()
    correction: Sequence[Row] = ()
    propagation: Sequence[Row] = ()
    copies: Sequence[Row] = ()
    order: Mapping[str, float] | None = None

    @property
    def is_delta(self) -> bool:
        """Whether its recurrence has a delta rule."""
        return self.op != "mamba2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One claim on one model.

    Attributes:
        ours: the figure.
        verdict: by the claim's rule.
    """

    ours: str
    verdict: Verdict


Judge = Callable[[Evidence], Finding | None]
"""None where the claim is not about such a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim and how to judge it.

    Attributes:
        text: what is claimed, with the paper's figures.
        source: where.
        judge: on each model; None for a claim that is not about a model's run.
        once: of a claim that is not: from the points of a folding sweep, if there is one.
    """

    text: str
    source: str
    judge: Judge | None = None
    once: Callable[[Sequence[Row]], Finding] | None = None


def unmeasured(why: str) -> Finding:
    """Report that no run, or too short a run, is at hand."""
    return Finding(ours=why, verdict="not measured")


def beyond(text: str, source: str, why: str) -> Claim:
    """List a claim that small models, or this tree, cannot test."""
    finding = Finding(ours=why, verdict="cannot be tested here")
    return Claim(text=text, source=source, once=lambda _: finding)


def verdict(holds: bool) -> Verdict:
    """Name the outcome of a rule."""
    return "holds" if holds else "does not hold"


def only(*ops: str) -> Callable[[Judge], Judge]:
    """Restrict a judge to models of these operations."""

    def restrict(judge: Judge) -> Judge:
        return lambda e: judge(e) if e.op in ops else None

    return restrict


def at(rows: Sequence[Row], n: int, **fields: Any) -> Row | None:
    """Find the row of an N."""
    for row in rows:
        if row["n"] == n and all(row[name] == value for name, value in fields.items()):
            return row
    return None


def upto(rows: Sequence[Row], n: int) -> list[Row]:
    """Rows of the largest N that is at most `n`."""
    last = max((r["n"] for r in rows if r["n"] <= n), default=0)
    return [r for r in rows if r["n"] == last]


def last(rows: Sequence[Row]) -> list[Row]:
    """Rows of the last N."""
    return upto(rows, max((r["n"] for r in rows), default=0))


def curve(rows: Sequence[Row], policy: str) -> dict[int, float]:
    """KL of a policy by N, from the first run that has it."""
    found: dict[int, float] = {}
    for row in rows:
        if short_policy(row["policy"]) == policy:
            found.setdefault(row["n"], row["kl"])
    return found


def interval(row: Row, name: str) -> str:
    """Lay out the interval of a column."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "one stream" if math.isnan(low) else f"{number(low)} … {number(high)}"


def watched(policy: str, name: str, rule: Callable[[float], bool], *, unit: str = "") -> Judge:
    """Judge by a column of a watched run's summary."""

    def judge(e: Evidence) -> Finding | None:
        row = next((r for r in e.propagation if short_policy(r["policy"]) == policy), None)
        if row is None or math.isnan(row.get(name, math.nan)):
            return unmeasured(f"no watched run of {policy}")
        return Finding(ours=f"{number(row[name])}{unit}", verdict=verdict(rule(row[name])))

    return judge


def where(n: int) -> str:
    """Say at which N."""
    return f"at {short_length(n)}"
