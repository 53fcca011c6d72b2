"""`quantlab propagate`: a watched run, its tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantlab_cli.options import RUN, STUDY, with_options
from quantlab_cli.progress import Reporter
from quantlab_cli.report import page_of
from quantlab_cli.types import SIZE, echo_json, given

if TYPE_CHECKING:
    from quantlab.study.propagate import Propagation


@click.command()
@with_options(STUDY)
@click.option("--streams", type=SIZE, default=2, show_default=True, help="Token streams.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="Repeatable.  [default: conventional int6@row and int8@row, shared nvfp4 and nvfp4-sr]",
)
@click.option("--window", "-L", type=SIZE, default=16, show_default=True, help="Steps per store.")
@click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), default=0, help="Of the stochastic rounding."
)
@click.option(
    "--every",
    type=SIZE,
    help="Tokens between observations, rounded up to a multiple of all windows.  "
    "[default: about 128 observations]",
)
@with_options(RUN)
def propagate(
    policies: tuple[str, ...], window: int, every: int | None, model: str, **options: Any
) -> int:
    """Follow the deviation of every stored state from an exact recurrence on the same inputs.

    \b
    quantlab propagate -M tiny-gdn
    quantlab propagate -M tiny-mamba2 --policy shared:fp8 --policy shared:fp8-sr -N 4096
    """  # noqa: D301 - click's mark for lines that stay as they are
    from quantlab.replay.policy import parse_policy
    from quantlab.study.build import build_spec
    from quantlab.study.propagate import POLICIES, default_directory, run_propagation, stride_of

    run = {
        name: options.pop(name)
        for name in ("out", "resume", "figures", "as_json", "markdown", "quiet")
    }
    chosen = [
        given("--policy", lambda text: parse_policy(text, window=window), text)
        for text in policies or POLICIES
    ]
    spec = build_spec(model, chosen, floor=False, **options)
    stride = stride_of(spec, every)
    with Reporter(quiet=run["quiet"]) as reporter:
        result = run_propagation(
            spec,
            run["out"] or default_directory(spec, stride),
            every=every,
            resume=run["resume"],
            progress=reporter,
            command=["quantlab", *click.get_current_context().find_root().obj],
        )
    files = page_of(result.path, wanted=run["figures"])
    _show(result, files, run)
    return 0


def _show(result: Propagation, files: list[Path], run: dict[str, Any]) -> None:
    from quantlab.report.propagation import propagation_tables
    from quantlab.report.table import markdown, plain

    lay_out = markdown if run["markdown"] else plain
    click.echo("\n\n".join(lay_out(table) for table in propagation_tables(result.summary)))
    if not run["quiet"]:
        names = ["rows.parquet", "heads.parquet", "propagation.csv", *(f.name for f in files)]
        click.echo(f"in {result.path}: {', '.join(names)}", err=True)
    if run["as_json"]:
        echo_json(
            {
                "directory": str(result.path),
                "every": result.every,
                "spec": result.record["spec"],
                "files": [str(path) for path in files],
                "summary": result.summary.to_pylist(),
            }
        )
