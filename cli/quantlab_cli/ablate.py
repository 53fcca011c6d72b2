"""`quantlab ablate`: studies that change one thing, their comparison and its figure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantlab_cli.copies import copies
from quantlab_cli.options import DRY_RUN, RUN, STREAMS, STUDY, with_options
from quantlab_cli.progress import Reporter
from quantlab_cli.report import page_of
from quantlab_cli.types import SIZE, echo_json

if TYPE_CHECKING:
    from quantlab.study import KlSpec
    from quantlab.study.ablate import Ablation, Kind

FAILED_CELLS = 3


class Numbers(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Whole numbers from 0, separated by commas."""

    name = "N,N,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Read them."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() for part in parts):
            self.fail(f"{value!r} is not a list such as 0,1,2", param, ctx)
        return tuple(int(part) for part in parts)


@click.group()
def ablate() -> None:
    """Change one thing and measure what it does to KL: rounding, window or corrections.

    An ablation is a KL study like any other: it can be resumed, and `quantlab report` draws its
    figures and page again.
    """


@ablate.command()
@with_options(STUDY)
@with_options(STREAMS)
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="FORMAT",
    help="Of the shared copy, without a rounding; repeatable.  [default: fp16, fp8, nvfp4]",
)
@click.option(
    "--seeds",
    type=Numbers(),
    default="0,1,2",
    show_default=True,
    help="Of the stochastic rounding; two or more split its KL into bias and spread.",
)
@click.option("--window", "-L", type=SIZE, default=16, show_default=True, help="Steps per store.")
@with_options(DRY_RUN)
@with_options(RUN)
def rounding(formats: tuple[str, ...], **options: Any) -> int:
    """Round a shared copy to nearest or stochastically, under several seeds.

    \b
    quantlab ablate rounding -M tiny-gdn -N 4096
    """  # noqa: D301 - click's mark for lines that stay as they are
    from quantlab.study.ablate import FORMATS, rounding_spec

    return _run("rounding", rounding_spec, options, formats=formats or FORMATS)


@ablate.command()
@with_options(STUDY)
@with_options(STREAMS)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="Without L; repeatable.  [default: shared fp8-sr and nvfp4-sr, fp8 and nvfp4 / fp32]",
)
@click.option(
    "--windows",
    type=Numbers(),
    default="1,4,16,32,64",
    show_default=True,
    help="L; policies with two copies from L = 2.",
)
@click.option(
    "--seeds", type=Numbers(), default="0", show_default=True, help="Of the stochastic rounding."
)
@with_options(DRY_RUN)
@with_options(RUN)
def window(policies: tuple[str, ...], **options: Any) -> int:
    """Store every L tokens: KL against the number of stores, measured and predicted.

    \b
    quantlab ablate window -M tiny-mamba2 --windows 1,2,4,8,16
    """  # noqa: D301
    from quantlab.study.ablate import WINDOW_POLICIES, window_spec

    return _run("window", window_spec, options, policies=policies or WINDOW_POLICIES)


@ablate.command()
@with_options(STUDY)
@with_options(STREAMS)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="Repeatable.  [default: five, with FP32 and BF16 records]",
)
@click.option("--window", "-L", type=SIZE, default=16, show_default=True, help="Steps per store.")
@with_options(DRY_RUN)
@with_options(RUN)
def correction(policies: tuple[str, ...], **options: Any) -> int:
    """Fold a delta rule's cached corrections at a flush, or derive them again.

    A model without a delta rule has no corrections: there both must be identical, which makes it
    the control.

    \b
    quantlab ablate correction -M tiny-gdn
    quantlab ablate correction -M tiny-mamba2
    """  # noqa: D301
    from quantlab.study.ablate import CORRECTION_POLICIES, correction_spec

    return _run("correction", correction_spec, options, policies=policies or CORRECTION_POLICIES)


@ablate.command()
@click.option("--read", default="nvfp4", show_default=True, help="Format of the read copy.")
@click.option("--windows", type=SIZE, default=128, show_default=True, help="Of 16 steps each.")
@click.option("--out", "-o", type=click.Path(path_type=Path), help="A .csv for the points.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document as last line.")
@click.option("--markdown", is_flag=True, help="The table in Markdown.")
def folding(read: str, windows: int, out: Path | None, as_json: bool, markdown: bool) -> int:
    """Fold corrections in synthetic recurrences: where it diverges, saturates or is harmless.

    Sweeps decay, write strength and the rank of the keys. Needs no model.
    """
    from quantlab.report.ablation_table import folding_table
    from quantlab.report.table import markdown as in_markdown
    from quantlab.report.table import plain
    from quantlab.study.ablate import run_folding

    points = run_folding(read, windows=windows, out=out)
    table = folding_table(points)
    click.echo(in_markdown(table) if markdown else plain(table))
    if as_json:
        echo_json({"read": read, "windows": windows, "points": points.to_pylist()})
    return 0


ablate.add_command(copies)


@ablate.command("digest")
@click.argument("directories", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", "-o", required=True, type=click.Path(path_type=Path), help="Directory of the page."
)
@click.option(
    "--introduction",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Markdown to put first.",
)
@click.option(
    "--folding",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="CSV of quantlab ablate folding.",
)
def make_digest(
    directories: tuple[Path, ...], out: Path, introduction: Path | None, folding: Path | None
) -> None:
    """Write a page on several runs: which claims of the papers hold.

    Takes runs of kl, ablate, attribute, propagate and predict; writes README.md, index.html, CSV
    and SVG.
    """
    from quantlab.report.digest import write_digest

    text = "# Ablations" if introduction is None else introduction.read_text("utf-8")
    click.echo(str(write_digest(directories, out, introduction=text, folding=folding)))


def _run(
    kind: Kind, make_spec: Callable[..., KlSpec], options: dict[str, Any], **chosen: Any
) -> int:
    run = {
        name: options.pop(name)
        for name in ("out", "resume", "figures", "dry_run", "as_json", "markdown", "quiet")
    }
    spec = make_spec(options.pop("model"), **chosen, **options)
    if run["dry_run"]:
        from quantlab_cli.kl import show_plan

        return show_plan(spec, as_json=run["as_json"])
    from quantlab.study.ablate import default_directory, run_ablation

    directory = run["out"] or default_directory(kind, spec)
    with Reporter(quiet=run["quiet"]) as reporter:
        ablation = run_ablation(
            kind,
            spec,
            directory,
            resume=run["resume"],
            progress=reporter,
            command=["quantlab", *click.get_current_context().find_root().obj],
        )
    files = page_of(ablation.result.path, wanted=run["figures"])
    show(ablation, files, run)
    for cell in ablation.result.failed:
        click.echo(f"failed: streams {cell['streams']}: {cell['error']}", err=True)
    return FAILED_CELLS if ablation.result.failed else 0


def show(ablation: Ablation, files: list[Path], run: dict[str, Any]) -> None:
    """Write the tables, then the JSON document if asked for, and say where the files are."""
    from quantlab.report.ablation_table import ablation_tables
    from quantlab.report.table import markdown, plain

    lay_out = markdown if run["markdown"] else plain
    tables = ablation_tables(ablation.kind, ablation.table)
    click.echo("\n\n".join(lay_out(table) for table in tables))
    result = ablation.result
    if not run["quiet"]:
        names = ["rows.parquet", "ablation.csv", "spec.json", *(path.name for path in files)]
        click.echo(f"in {result.path}: {', '.join(names)}", err=True)
    if run["as_json"]:
        echo_json(
            {
                "directory": str(result.path),
                "ablation": ablation.kind,
                "state": result.run.get("state"),
                "failed": result.failed,
                "spec": result.record["spec"],
                "files": [str(path) for path in files],
                "table": ablation.table.to_pylist(),
            }
        )
