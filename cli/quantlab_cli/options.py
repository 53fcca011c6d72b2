"""Options that the commands on a model and streams have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from quantlab.study.spec import DEFAULT_PROMPT, DTYPES
from quantlab_cli.types import SIZE

F = TypeVar("F", bound=Callable[..., Any])


def study_options(tokens: int) -> tuple[Callable[[F], F], ...]:
    """Options of a model, its data and how it runs.

    Args:
        tokens: default of N, chosen so that the command's defaults take minutes on a CPU.
    """
    return (
        click.option("--model", "-M", required=True, help="Zoo name, preset, directory or hub id."),
        click.option(
            "--tokens",
            "-N",
            type=SIZE,
            default=tokens,
            show_default=True,
            help="Positions to measure to.",
        ),
        click.option(
            "--data", help="books, pg19, or a .txt, .jsonl or folder.  [default: by model]"
        ),
        click.option("--prompt", type=SIZE, default=DEFAULT_PROMPT, show_default=True),
        click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, …"),
        click.option("--dtype", type=click.Choice(DTYPES), help="Of weights and activations."),
        click.option(
            "--batch-rows", type=SIZE, help="Rows in a batch.  [default: what memory allows]"
        ),
        click.option("--segment", type=SIZE, help="Tokens of a row in one forward."),
    )


STUDY = study_options(1024)
STREAMS = (
    click.option("--streams", type=SIZE, help="Token streams.  [default: 4, or what there is]"),
)
RUN = (
    click.option("--out", "-o", type=click.Path(path_type=Path), help="Run directory."),
    click.option("--resume", is_flag=True, help="Go on with the run in the directory, if any."),
    click.option("--figures/--no-figures", default=True, help="Draw the figure at the end."),
    click.option("--json", "as_json", is_flag=True, help="One JSON document as last line."),
    click.option("--markdown", is_flag=True, help="The tables in Markdown."),
    click.option("--quiet", "-q", is_flag=True, help="No progress."),
)
DRY_RUN = (
    click.option("--dry-run", is_flag=True, help="Say what would be done, and for how long."),
)


def with_options(options: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    """Decorate a command with options, shown in their order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate
