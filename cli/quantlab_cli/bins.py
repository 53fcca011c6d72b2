"""`quantlab bins`: bin finished accuracy runs again."""

from __future__ import annotations

from pathlib import Path

import click

from quantlab.errors import UsageError
from quantlab_cli.eval import document, show_tables
from quantlab_cli.types import SIZE, echo_json


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--count", type=SIZE, default=4, show_default=True, help="Bins of equal count.")
@click.option("--log", is_flag=True, help="Bins of doubling FP32 length instead.")
@click.option("--figures/--no-figures", default=False, help="Draw figures and page again.")
@click.option(
    "--cut",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="Of one unfinished RUN: write its whole questions, in the order they are asked, as a run.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document as last line of stdout.")
@click.option("--markdown", is_flag=True, help="The tables in Markdown.")
def bins(
    *,
    runs: tuple[Path, ...],
    count: int,
    log: bool,
    figures: bool,
    cut: Path | None,
    as_json: bool,
    markdown: bool,
) -> int:
    """Show finished accuracy runs by FP32 output length, in other bins than quartiles."""
    from quantlab.study.accuracy import load_eval

    if cut is not None and len(runs) > 1:
        raise UsageError(f"--cut is for one run, got {len(runs)}")
    if cut is not None:
        from quantlab.study.accuracy_cut import cut_eval

        results = [cut_eval(runs[0], cut)]
    else:
        results = [load_eval(run) for run in runs]
    for result in results:
        if len(results) > 1:
            click.echo(f"{result.path}\n")
        show_tables(result, as_json=as_json, markdown=markdown, count=count, log=log)
        if figures:
            from quantlab.report.accuracy import write_report

            for path in write_report(result):
                click.echo(str(path), err=True)
    if as_json:
        echo_json([document(result, count=count, log=log) for result in results])
    return 0
