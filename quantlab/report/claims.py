"""Claims of papers, held against ablations and watched runs.

Sources: ReplaySSM, arXiv 2610.13778 (E.4.4, E.4.5, C.6, B.4); STEPQuant, arXiv 2609.38169. Every
verdict follows from the rule beside its claim, never from a reading of the figures: "holds" and
"does not hold" where the rule can be applied, "cannot be tested" where a run is missing or short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quantlab.report.table import Table, number, short_length

Verdict = Literal["holds", "does not hold", "cannot be tested"]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was measured on one model.

    Attributes:
        model: its name.
        is_delta: whether its recurrence has a delta rule.
        rounding: rows of `ROUNDING_SCHEMA`, empty if not run.
        window: rows of `WINDOW_SCHEMA`.
        correction: rows of `CORRECTION_SCHEMA`.
        propagation: rows of `PROPAGATION_SCHEMA`.
    """

    model: str
    is_delta: bool
    rounding: Sequence[Row] = ()
    window: Sequence[Row] = ()
    correction: Sequence[Row] = ()
    propagation: Sequence[Row] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One claim on one model.

    Attributes:
        ours: the figure.
        verdict: by the claim's rule.
    """

    ours: str
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim and how to judge it.

    Attributes:
        text: what is claimed, with the paper's figures.
        source: where.
        judge: evidence → finding; None where the claim is not about such a model.
    """

    text: str
    source: str
    judge: Callable[[Evidence], Finding | None]


def claims_table(evidence: Sequence[Evidence]) -> Table:
    """Judge every claim on every model."""
    rows = []
    for claim in CLAIMS:
        for found in evidence:
            finding = claim.judge(found)
            if finding is not None:
                rows.append((claim.text, claim.source, found.model, finding.ours, finding.verdict))
    return Table(
        header=("claim", "source", "model", "ours", "verdict"),
        rows=tuple(rows),
        note="verdicts follow from rules in `quantlab.report.claims`; intervals over streams",
    )


def _untested(why: str) -> Finding:
    return Finding(ours=why, verdict="cannot be tested")


def _verdict(holds: bool) -> Verdict:
    return "holds" if holds else "does not hold"


def _short_ratio(fmt: str, most: float) -> Callable[[Evidence], Finding | None]:
    def judge(e: Evidence) -> Finding | None:
        row = _at(e.rounding, 1024, format=fmt)
        if row is None:
            return _untested("no run to N = 1K")
        text = f"{number(row['ratio'])} ({_interval(row, 'ratio')}) at 1K"
        return Finding(ours=text, verdict=_verdict(row["ratio"] <= most))

    return judge


def _crossing(e: Evidence) -> Finding | None:
    rows = [r for r in e.rounding if r["format"] == "fp8"]
    if not rows:
        return _untested("no run")
    last = rows[-1]
    crossed = [r["n"] for r in rows if r["ratio"] > 1 or r["rtn_diverged"]]
    if not crossed and last["n"] < 16_384:
        return _untested(f"ratio {number(last['ratio'])} at {short_length(last['n'])}, the last N")
    text = f"first above one at {short_length(crossed[0])}" if crossed else "never above one"
    return Finding(ours=text, verdict=_verdict(bool(crossed) and crossed[0] <= 16_384))


def _rtn_diverges(e: Evidence) -> Finding | None:
    if not e.is_delta:
        return None
    last = _last(e.rounding)
    if not last or last[0]["n"] < 131_072:
        n = short_length(last[0]["n"]) if last else "–"
        count = sum(r["rtn_diverged"] > 0 for r in last)
        return _untested(f"{count} of {len(last)} formats diverged by {n}")
    coarse = [r for r in last if r["format"] in ("fp8", "nvfp4")]
    text = ", ".join(f"{r['format']}: {r['rtn_diverged']} of {r['streams']}" for r in coarse)
    holds = all(r["rtn_diverged"] and not r["sr_diverged"] for r in coarse)
    return Finding(ours=f"streams diverged: {text}", verdict=_verdict(holds))


def _spread_only(e: Evidence) -> Finding | None:
    last = [r for r in _last(e.rounding) if r["seeds"] > 1 and math.isfinite(r["bias"])]
    if not last:
        return _untested("needs a run with two seeds")
    shares = {r["format"]: r["bias"] / r["sr"] for r in last}
    text = ", ".join(f"{f} {100 * share:.0f}%" for f, share in shares.items())
    n = short_length(last[0]["n"])
    return Finding(
        ours=f"bias share of SR's KL at {n}: {text}",
        verdict=_verdict(all(share < 0.25 for share in shares.values())),
    )


def _fall(policy: str, least: int, most: int) -> Callable[[Evidence], Finding | None]:
    def judge(e: Evidence) -> Finding | None:
        rows = [r for r in _last(e.window) if r["policy"] == policy and r["base_window"] == least]
        row = next((r for r in rows if r["window"] == most), None)
        if row is None:
            return _untested("no run")
        text = f"{number(row['fall'])}× ({_interval(row, 'fall')}) at {short_length(row['n'])}"
        return Finding(ours=text, verdict=_verdict(1 < row["fall"] < most / least))

    return judge


def _flat(e: Evidence) -> Finding | None:
    rows = [r for r in _last(e.window) if "/" in r["policy"] and r["window"] == 64]
    rows = [r for r in rows if r["base_window"] == 4]
    if not rows:
        return _untested("no run")
    moved = {r["policy"]: max(r["fall"], 1 / r["fall"]) for r in rows}
    text = ", ".join(f"{name} {number(x)}×" for name, x in moved.items())
    return Finding(ours=text, verdict=_verdict(max(moved.values()) <= 1.25))


def _propagated(
    policy: str,
    name: str,
    rule: Callable[[float], bool],
    *,
    delta: bool | None = None,
    unit: str = "",
) -> Callable[[Evidence], Finding | None]:
    def judge(e: Evidence) -> Finding | None:
        if delta is not None and e.is_delta != delta:
            return None
        row = next((r for r in e.propagation if _short(r) == policy), None)
        if row is None or math.isnan(row[name]):
            return _untested(f"no watched run of {policy}")
        return Finding(ours=f"{number(row[name])}{unit}", verdict=_verdict(rule(row[name])))

    return judge


def _growing_nll(e: Evidence) -> Finding | None:
    row = next((r for r in e.propagation if _short(r) == "conventional int6@row"), None)
    if row is None:
        return _untested("no watched run of conventional int6@row")
    first, last = row["excess_nll_first"], row["excess_nll_last"]
    return Finding(
        ours=f"{number(first)} → {number(last)} nats", verdict=_verdict(last > 2 * max(first, 0.0))
    )


def _folding(e: Evidence) -> Finding | None:
    last = [r for r in _last(e.correction) if r["policy"].startswith(("fp8 /", "nvfp4 /"))]
    if not e.is_delta:
        return None
    if not last:
        return _untested("no run")
    text = ", ".join(f"{r['policy']} {number(r['ratio'])}×" for r in last)
    return Finding(
        ours=f"folded ÷ derived again at {short_length(last[0]['n'])}: {text}",
        verdict=_verdict(all(r["ratio"] > 1.25 or r["fold_diverged"] for r in last)),
    )


def _control(e: Evidence) -> Finding | None:
    if e.is_delta:
        return None
    if not e.correction:
        return _untested("no run")
    same = all(r["identical"] for r in e.correction)
    return Finding(ours="every row identical" if same else "rows differ", verdict=_verdict(same))


CLAIMS: tuple[Claim, ...] = (
    Claim(
        text="NVFP4: RTN gives 0.40–0.51 of SR's KL at 1K (rule: at most 0.51)",
        source="E.4.5",
        judge=_short_ratio("nvfp4", 0.6),
    ),
    Claim(
        text="FP8: RTN gives 0.59–1.05 of SR's KL at 1K (rule: at most 1.05)",
        source="E.4.5",
        judge=_short_ratio("fp8", 1.05),
    ),
    Claim(text="FP8: the ratio crosses one by 16K", source="E.4.5", judge=_crossing),
    Claim(
        text="GDN: RTN drives FP8 and NVFP4 states non-finite by 128K, SR stays finite",
        source="E.4.5",
        judge=_rtn_diverges,
    ),
    Claim(
        text="SR contributes variance only (rule: bias under a quarter of its KL)",
        source="C.6",
        judge=_spread_only,
    ),
    Claim(
        text="shared FP8: KL falls 12× from L = 1 to 64 (N = 1K), less than the 64× of stores",
        source="E.4.4",
        judge=_fall("shared fp8-sr", 1, 64),
    ),
    Claim(
        text="shared NVFP4: 23× likewise",
        source="E.4.4",
        judge=_fall("shared nvfp4-sr", 1, 64),
    ),
    Claim(
        text="shared FP8 at L = 16 sits 3.8× below L = 1 (128K)",
        source="E.4.4",
        judge=_fall("shared fp8-sr", 1, 16),
    ),
    Claim(
        text="shared NVFP4 at L = 16 sits 2.6× below L = 1 (128K)",
        source="E.4.4",
        judge=_fall("shared nvfp4-sr", 1, 16),
    ),
    Claim(
        text="two copies: KL moves 1.1–1.2× between L = 4 and 64 (rule: at most 1.25)",
        source="E.4.4",
        judge=_flat,
    ),
    Claim(
        text="Mamba-2, SR: D² is Σγ²σ² under the gates (rule: within 10 %)",
        source="C.6",
        judge=_propagated(
            "shared nvfp4-sr", "independent_ratio", lambda x: abs(x - 1) <= 0.1, delta=False
        ),
    ),
    Claim(
        text="delta rule, SR: the same is an upper bound",
        source="C.6",
        judge=_propagated("shared nvfp4-sr", "independent_ratio", lambda x: x <= 1, delta=True),
    ),
    Claim(
        text="RTN's errors keep their sign: D² exceeds what independent errors give",
        source="C.6",
        judge=_propagated("shared nvfp4", "independent_ratio", lambda x: x > 1),
    ),
    Claim(
        text="cached corrections folded are the unstable variant (rule: KL 1.25 times or more)",
        source="B.4",
        judge=_folding,
    ),
    Claim(
        text="without a delta rule folding changes nothing",
        source="B.4",
        judge=_control,
    ),
    Claim(
        text="half-life predicts accumulated INT6 error, Spearman 0.80 (rule: 0.5 or more)",
        source="STEPQuant",
        judge=_propagated("conventional int6@row", "spearman", lambda x: x >= 0.5),
    ),
    Claim(
        text="GDN: the longest-lived quarter of heads holds 52.5 % of it (rule: over a third)",
        source="STEPQuant",
        judge=_propagated(
            "conventional int6@row", "quarter_share", lambda x: x > 1 / 3, delta=True
        ),
    ),
    Claim(
        text="without delta feedback one injection's output error is 26.8× (INT6; rule: over 2)",
        source="STEPQuant",
        judge=_propagated(
            "conventional int6@row", "oracle_ratio", lambda x: x > 2, delta=True, unit="×"
        ),
    ),
    Claim(
        text="the same, 18.7× (INT8)",
        source="STEPQuant",
        judge=_propagated(
            "conventional int8@row", "oracle_ratio", lambda x: x > 2, delta=True, unit="×"
        ),
    ),
    Claim(
        text="INT6: excess NLL grows from the first to the last 256 (0.102 → 2.102 over 6,144)",
        source="STEPQuant",
        judge=_growing_nll,
    ),
    Claim(
        text="GDN: key rows reach 10.3× their median RMS (rule: over 3)",
        source="STEPQuant",
        judge=_propagated(
            "conventional int8@row", "key_ratio", lambda x: x > 3, delta=True, unit="×"
        ),
    ),
    Claim(
        text="GDN: value columns reach 19.4× (rule: over 3)",
        source="STEPQuant",
        judge=_propagated(
            "conventional int8@row", "value_ratio", lambda x: x > 3, delta=True, unit="×"
        ),
    ),
)


def _at(rows: Sequence[Row], n: int, **fields: Any) -> Mapping[str, Any] | None:
    for row in rows:
        if row["n"] == n and all(row[name] == value for name, value in fields.items()):
            return row
    return None


def _last(rows: Sequence[Row]) -> list[Row]:
    last = max((r["n"] for r in rows), default=0)
    return [r for r in rows if r["n"] == last]


def _short(row: Row) -> str:
    from quantlab.report.table import short_policy

    return short_policy(row["policy"])


def _interval(row: Mapping[str, Any], name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "one stream" if math.isnan(low) else f"{number(low)} … {number(high)}"
