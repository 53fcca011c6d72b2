"""Claims of papers, held against KL studies, ablations and watched runs.

Every verdict follows from the rule beside its claim, never from a reading of the figures: "holds"
and "does not hold" where the rule can be applied, "not measured" where a run is missing or short,
"cannot be tested here" where no run of small models could.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantlab.report.claims import delta_rule, replayssm
from quantlab.report.claims.evidence import Claim, Evidence, Finding, Paper, Row
from quantlab.report.table import Table

__all__ = ["CLAIMS", "TITLES", "Claim", "Evidence", "Finding", "claims_table"]

CLAIMS: dict[Paper, tuple[Claim, ...]] = {
    "replayssm": replayssm.CLAIMS,
    "delta-rule": delta_rule.CLAIMS,
}
TITLES: dict[Paper, str] = {
    "replayssm": "Claims of ReplaySSM (arXiv 2610.13778)",
    "delta-rule": "Claims on delta-rule states (STEPQuant, arXiv 2609.38169; DAMP)",
}


def claims_table(paper: Paper, evidence: Sequence[Evidence], folding: Sequence[Row] = ()) -> Table:
    """Judge every claim of a paper on every model.

    Args:
        paper: whose claims.
        evidence: one a model.
        folding: points of `quantlab ablate folding`.
    """
    rows = []
    for claim in CLAIMS[paper]:
        found: list[tuple[str, Finding | None]] = []
        if claim.judge is not None:
            found += [(e.model, claim.judge(e)) for e in evidence]
        if claim.once is not None:
            found.append(("–", claim.once(folding)))
        rows += [
            (claim.text, claim.source, model, finding.ours, finding.verdict)
            for model, finding in found
            if finding is not None
        ]
    return Table(
        header=("claim", "source", "model", "ours", "verdict"),
        rows=tuple(rows),
        note="verdicts follow from rules in `quantlab.report.claims`; intervals over streams",
    )
