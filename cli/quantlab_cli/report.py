"""`quantlab report`: figures and page of a run directory."""

from __future__ import annotations

from pathlib import Path

import click

from quantlab_cli.kl import show


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON document as last line of stdout.")
@click.option("--markdown", is_flag=True, help="The table in Markdown.")
def report(directory: Path, as_json: bool, markdown: bool) -> int:
    """Draw the figures of a run again; of an unfinished one, what it has so far."""
    from quantlab.study.result import load_result

    show(load_result(directory), as_json=as_json, markdown=markdown)
    return 0
