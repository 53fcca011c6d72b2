"""`quantlab ablate copies`: the read format changed alone, recurrence copies compared."""

from __future__ import annotations

from typing import Any

import click

from quantlab.study.spec import DEFAULT_PROMPT, DTYPES
from quantlab_cli.options import RUN, with_options
from quantlab_cli.progress import Reporter
from quantlab_cli.report import page_of
from quantlab_cli.types import SIZE, echo_json, given


@click.command()
@click.option("--model", "-M", required=True, help="Zoo name, preset, directory or hub id.")
@click.option(
    "--tokens",
    "-N",
    type=SIZE,
    default=131_072,
    show_default=True,
    help="Of recorded op inputs, the same for all policies.",
)
@click.option(
    "--layer", type=click.IntRange(0), default=0, show_default=True, help="Recurrent layer of them."
)
@click.option(
    "--in-model",
    type=click.IntRange(0),
    default=1024,
    show_default=True,
    help="Tokens decoded in the model, where inputs differ too; 0 for none.",
)
@click.option(
    "--read",
    "reads",
    multiple=True,
    metavar="FORMAT",
    help="Of the read copy; repeatable, compared with the first.  "
    "[default: nvfp4, fp8, fp16, int8@row]",
)
@click.option(
    "--recur", default="fp16-sr", show_default=True, help="Format of the recurrence copy."
)
@click.option("--window", "-L", type=SIZE, default=16, show_default=True, help="Steps per store.")
@click.option("--data", help="books, pg19, or a .txt, .jsonl or folder.  [default: by model]")
@click.option("--prompt", type=SIZE, default=DEFAULT_PROMPT, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, help="Of the rounding.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, …")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of weights and activations.")
@click.option("--segment", type=SIZE, help="Tokens of a row in one forward.")
@with_options(RUN)
def copies(
    model: str,
    reads: tuple[str, ...],
    recur: str,
    window: int,
    layer: int,
    in_model: int,
    **options: Any,
) -> int:
    """Change the read format alone, and compare recurrence copies bit for bit.

    With corrections derived again they must be identical on the same inputs, and in the first
    recurrent layer of a model; folded, the first window where they differ is told.

    \b
    quantlab ablate copies -M tiny-gdn
    """  # noqa: D301 - click's mark for lines that stay as they are
    from quantlab.formats import parse_format
    from quantlab.report.copies import copies_table
    from quantlab.report.table import markdown, plain
    from quantlab.study.copies import (
        READS,
        CopiesStudy,
        copies_spec,
        default_directory,
        run_copies,
    )

    run = {
        name: options.pop(name)
        for name in ("out", "resume", "figures", "as_json", "markdown", "quiet")
    }
    reads = reads or READS
    for text in reads:
        given("--read", parse_format, text)
    given("--recur", parse_format, recur)
    spec = copies_spec(model, reads=reads, recur=recur, window=window, **options)
    study = CopiesStudy(spec=spec, reads=reads, recur=recur, layer=layer, in_model=in_model)
    directory = run["out"] or default_directory(study)
    with Reporter(quiet=run["quiet"]) as reporter:
        rows = run_copies(
            study,
            directory,
            resume=run["resume"],
            progress=reporter,
            command=["quantlab", *click.get_current_context().find_root().obj],
        )
    files = page_of(directory, wanted=run["figures"])
    table = copies_table(rows)
    click.echo(markdown(table) if run["markdown"] else plain(table))
    if not run["quiet"]:
        names = ["rows.parquet", "copies.csv", *(path.name for path in files)]
        click.echo(f"in {directory}: {', '.join(names)}", err=True)
    if run["as_json"]:
        echo_json(
            {
                "directory": str(directory),
                **study.to_json(),
                "files": [str(path) for path in files],
                "rows": rows.to_pylist(),
            }
        )
    return 0
