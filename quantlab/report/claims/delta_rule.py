"""Claims of STEPQuant (arXiv 2609.38169) and DAMP on delta-rule states rounded at every step."""

from __future__ import annotations

import math

from quantlab.report.claims.evidence import (
    Claim,
    Evidence,
    Finding,
    Judge,
    beyond,
    curve,
    only,
    unmeasured,
    verdict,
    watched,
    where,
)
from quantlab.report.table import number, short_policy

DELTA = ("gdn", "kda")
INT6, INT8 = "conventional int6@row", "conventional int8@row"
# From least to most harmful in DAMP's table (accuracy on AIME: 97.3, 89.2, 59.8, 4.4).
UNIFORM = ("bf16", "int8@row", "fp8", "int4@row")


def _growing_nll(e: Evidence) -> Finding | None:
    row = next((r for r in e.propagation if short_policy(r["policy"]) == INT6), None)
    if row is None:
        return unmeasured(f"no watched run of {INT6}")
    first, final = row["excess_nll_first"], row["excess_nll_last"]
    return Finding(
        ours=f"{number(first)} → {number(final)} nats",
        verdict=verdict(final > 2 * max(first, 0.0)),
    )


def _contracts(e: Evidence) -> Finding | None:
    row = next((r for r in e.propagation if short_policy(r["policy"]) == INT6), None)
    if row is None or "probe_left" not in row:
        return unmeasured(f"no watched run of {INT6}")
    left, gates = row["probe_left"], row["oracle_left"]
    text = f"share of one injection left: {number(left)}, by the gates alone {number(gates)}"
    return Finding(ours=text, verdict=verdict(left <= gates <= 1))


def _same_order(policy: str) -> Judge:
    def judge(e: Evidence) -> Finding | None:
        found = (e.order or {}).get(policy)
        if found is None or found != found:
            return unmeasured(f"no watched run of {policy} with two streams")
        text = f"{number(found)} between two books"
        return Finding(ours=text, verdict=verdict(found >= 0.9))

    return judge


def _uniform(e: Evidence) -> Finding | None:
    curves = {name: curve(e.kl, f"conventional {name}") for name in UNIFORM}
    common = set.intersection(*(set(c) for c in curves.values()))
    if not common:
        return unmeasured("no run of all four at L = 1")
    n = max(common)
    kl = [math.inf if math.isnan(curves[name][n]) else curves[name][n] for name in UNIFORM]
    text = ", ".join(
        f"{name} {'div.' if math.isinf(x) else number(x)}"
        for name, x in zip(UNIFORM, kl, strict=True)
    )
    return Finding(ours=f"KL {where(n)}: {text}", verdict=verdict(kl == sorted(kl)))


CLAIMS: tuple[Claim, ...] = (
    Claim(
        text="the transition has norm at most 1: old errors only shrink, the rule shrinks them "
        "further",
        source="STEPQuant",
        judge=only(*DELTA)(_contracts),
    ),
    Claim(
        text="half-life predicts accumulated INT6 error, Spearman 0.80 (rule: 0.5 or more)",
        source="STEPQuant",
        judge=watched(INT6, "spearman", lambda x: x >= 0.5),
    ),
    Claim(
        text="the same, INT8",
        source="STEPQuant",
        judge=watched(INT8, "spearman", lambda x: x >= 0.5),
    ),
    Claim(
        text="GDN: the longest-lived quarter of heads holds 52.5 % of it (rule: over a third)",
        source="STEPQuant",
        judge=only("gdn")(watched(INT6, "quarter_share", lambda x: x > 1 / 3)),
    ),
    Claim(
        text="KDA: the longest-lived quarter of channels holds 78.8 % (rule: over a half)",
        source="STEPQuant",
        judge=only("kda")(watched(INT6, "quarter_share", lambda x: x > 1 / 2)),
    ),
    Claim(
        text="units rank alike on other text, Spearman 0.98–0.99 (rule: 0.9 or more)",
        source="STEPQuant",
        judge=_same_order(INT6),
    ),
    Claim(
        text="without delta feedback one injection's output error is 26.8× (INT6; rule: over 2)",
        source="STEPQuant",
        judge=only(*DELTA)(watched(INT6, "oracle_ratio", lambda x: x > 2, unit="×")),
    ),
    Claim(
        text="the same, 18.7× (INT8)",
        source="STEPQuant",
        judge=only(*DELTA)(watched(INT8, "oracle_ratio", lambda x: x > 2, unit="×")),
    ),
    Claim(
        text="INT6: excess NLL grows from the first to the last 256, 0.102 → 2.102 (GDN), 0.023 → "
        "0.142 (KDA) over 6,144 (rule: more than doubles)",
        source="STEPQuant",
        judge=_growing_nll,
    ),
    *(
        Claim(
            text=f"{name}: {axis} reach {times}× their median RMS (rule: over 3)",
            source="STEPQuant",
            judge=only(op)(watched(INT8, column, lambda x: x > 3, unit="×")),
        )
        for name, op, axis, column, times in (
            ("GDN", "gdn", "key rows", "key_ratio", "10.3"),
            ("GDN", "gdn", "value columns", "value_ratio", "19.4"),
            ("KDA", "kda", "key rows", "key_ratio", "12.7"),
            ("KDA", "kda", "value columns", "value_ratio", "5.4"),
        )
    ),
    Claim(
        text="uniform formats at L = 1 harm in the order BF16, INT8, FP8, INT4",
        source="DAMP",
        judge=only(*DELTA)(_uniform),
    ),
    beyond(
        "6 bits allocated by lifetime and fitted by key row lose nothing (excess NLL 0.0011)",
        "STEPQuant",
        "calibrated formats are not in this tree",
    ),
    beyond(
        "16 of 128 channels in FP16, the rest in INT8: −69.1 % storage at FP32's accuracy",
        "DAMP",
        "calibrated formats are not in this tree",
    ),
    beyond(
        "AIME and LCB accuracy under uniform formats",
        "DAMP",
        "small models cannot do these tasks",
    ),
)
