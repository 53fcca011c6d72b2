"""`quantlab attribute`: which layers or heads a policy's KL comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantlab_cli.ablate import FAILED_CELLS, Numbers
from quantlab_cli.options import DRY_RUN, RUN, study_options, with_options
from quantlab_cli.progress import Reporter
from quantlab_cli.report import page_of
from quantlab_cli.types import SIZE, Choice, echo_json

if TYPE_CHECKING:
    from quantlab.study.attribute import Attribution


@click.command()
@with_options(study_options(512))
@click.option("--streams", type=SIZE, default=2, show_default=True, help="Token streams.")
@click.option(
    "--policy",
    default="shared:nvfp4-sr",
    show_default=True,
    metavar="POLICY",
    help="What is attributed.",
)
@click.option(
    "--by",
    type=Choice(["head", "layer"]),
    default="head",
    show_default=True,
    help="Unit that is quantized alone, then left out.",
)
@click.option(
    "--layers",
    type=Numbers(),
    help="Recurrent layers whose units are taken, from 0: 0,1,2.  [default: all]",
)
@click.option("--window", "-L", type=SIZE, default=16, show_default=True, help="Steps per store.")
@click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), default=0, help="Of the stochastic rounding."
)
@with_options(DRY_RUN)
@with_options(RUN)
def attribute(model: str, **options: Any) -> int:
    """Quantize one head (or layer) at a time and all but one: which of them matter.

    Says how far the parts add up to the whole, and how stable their order is over streams.

    \b
    quantlab attribute -M tiny-gdn
    quantlab attribute -M tiny-mamba2 --by layer --policy conventional:int8@row
    """  # noqa: D301 - click's mark for lines that stay as they are
    from quantlab.study.attribute import attribution_spec, default_directory, run_attribution

    run = {
        name: options.pop(name)
        for name in ("out", "resume", "figures", "dry_run", "as_json", "markdown", "quiet")
    }
    spec = attribution_spec(model, **options)
    if run["dry_run"]:
        from quantlab_cli.kl import show_plan

        return show_plan(spec, as_json=run["as_json"])
    with Reporter(quiet=run["quiet"]) as reporter:
        attribution = run_attribution(
            spec,
            run["out"] or default_directory(spec),
            resume=run["resume"],
            progress=reporter,
            command=["quantlab", *click.get_current_context().find_root().obj],
        )
    files = page_of(attribution.result.path, wanted=run["figures"])
    _show(attribution, files, run)
    for cell in attribution.result.failed:
        click.echo(f"failed: streams {cell['streams']}: {cell['error']}", err=True)
    return FAILED_CELLS if attribution.result.failed else 0


def _show(attribution: Attribution, files: list[Path], run: dict[str, Any]) -> None:
    from quantlab.report.attribution import attribution_report
    from quantlab.report.table import markdown, plain

    lay_out = markdown if run["markdown"] else plain
    tables = attribution_report(attribution.units, attribution.sums)
    click.echo("\n\n".join(lay_out(table) for table in tables))
    result = attribution.result
    if not run["quiet"]:
        names = ["rows.parquet", "attribution.csv", "additivity.csv", *(f.name for f in files)]
        click.echo(f"in {result.path}: {', '.join(names)}", err=True)
    if run["as_json"]:
        echo_json(
            {
                "directory": str(result.path),
                "state": result.run.get("state"),
                "failed": result.failed,
                "spec": result.record["spec"],
                "files": [str(path) for path in files],
                "units": attribution.units.to_pylist(),
                "additivity": attribution.sums.to_pylist(),
            }
        )
