"""`quantlab report`: figures and page of a run directory."""

from __future__ import annotations

from pathlib import Path

import click

from quantlab_cli.kl import show
from quantlab_cli.types import echo_json


def page_of(directory: Path, *, wanted: bool) -> list[Path]:
    """Draw a run that has just ended, if `wanted`; the files written."""
    if not wanted:
        return []
    from quantlab.report.load import load_shown
    from quantlab.report.shown import write_run_page

    return write_run_page(load_shown(directory))


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON document as last line of stdout.")
@click.option("--markdown", is_flag=True, help="The table in Markdown.")
def report(directory: Path, as_json: bool, markdown: bool) -> int:
    """Draw figures and page of a run again; of an unfinished KL study, what it has so far.

    Takes runs of kl, ablate, attribute, propagate and predict.
    """
    from quantlab.report.load import kind_of

    kind = kind_of(directory)
    if kind == "kl":
        from quantlab.study.result import load_result

        show(load_result(directory), as_json=as_json, markdown=markdown)
        return 0
    from quantlab.report.load import load_shown
    from quantlab.report.shown import write_run_page
    from quantlab.report.table import markdown as in_markdown
    from quantlab.report.table import plain

    shown = load_shown(directory)
    files = write_run_page(shown)
    click.echo("\n\n".join((in_markdown if markdown else plain)(x) for x in shown.tables))
    click.echo(f"in {directory}: {', '.join(path.name for path in files)}", err=True)
    if as_json:
        names = [str(path) for path in files]
        echo_json({"directory": str(directory), "study": kind, "files": names})
    return 0
