"""Write an ablation's figure beside its rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantlab.report.ablation_figure import ablation_figure
from quantlab.report.page import describe, write_figures

if TYPE_CHECKING:
    from quantlab.study.ablate import Ablation

TITLES = {
    "rounding": "nearest against stochastic rounding",
    "window": "what a longer window is worth",
    "correction": "corrections folded or derived again",
}


def write_ablation(ablation: Ablation) -> list[Path]:
    """Write KIND.png and KIND.svg into the run's directory.

    Returns:
        The files; none if nothing could be compared yet.

    Raises:
        RunError: if the disk is full.
    """
    result = ablation.result
    if ablation.table.num_rows == 0:
        return []
    chart = ablation_figure(
        ablation.kind,
        ablation.table,
        title=f"{result.spec.model}: {TITLES[ablation.kind]}",
        subtitle=describe(result),
    )
    return write_figures(result.path, {ablation.kind: chart})
