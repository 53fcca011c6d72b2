"""`quantlab bench`: measure the kernels and the engine, and compare results with targets."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantlab.errors import UsageError
from quantlab_cli.types import SIZE, columns, echo_json

if TYPE_CHECKING:
    from quantlab.bench.measure import Bench, Row
    from quantlab.bench.result import Result

REPORTS = Path("reports/performance")
SELF_TEST = "self-test of the harness: not a measurement"


def _common(command: Any) -> Any:
    """Options of every benchmark."""
    for option in (
        click.option("--device", default="cuda", show_default=True, help="cuda, cuda:1, …"),
        click.option("--repeats", type=click.IntRange(1), default=20, show_default=True),
        click.option(
            "--out",
            type=click.Path(path_type=Path, dir_okay=False),
            help="Write the result here; until it is whole, its rows to FILE.unfinished.  "
            "[default: BENCH.json in the working directory]",
        ),
        click.option(
            "--quick",
            is_flag=True,
            help="Tiny sizes, on the CPU under Triton's interpreter unless --device is given: tests"
            " the harness, measures nothing.",
        ),
    ):
        command = option(command)
    return command


@click.group()
def bench() -> None:
    """Measure casts, the scan, the engine and decoding on a GPU; compare results with targets.

    Every operation is checked on the inputs it is timed on first, and has no speed if it fails.
    Exit code 1 if one failed.
    """


@bench.command()
@_common
@click.option("--elements", type=SIZE, default=1 << 30, show_default="1024M")
@click.option("--sweep", is_flag=True, help="Other launches of every cast too.")
@click.pass_context
def casts(ctx: click.Context, /, elements: int, sweep: bool, **common: Any) -> int:
    """Measure casts and decoders of all formats against a device copy."""
    bench_, quick = _prepare(ctx, **common)
    from quantlab.bench.casts import bench_casts

    size: dict[str, Any] = {"elements": 1 << 16 if quick else elements}
    heads = {"heads": 2} if quick else {}
    rows = bench_casts(bench_, sweep=sweep, **size, **heads)
    return _report(ctx, "casts", rows, bench_, common, size)


@bench.command()
@_common
@click.option("--rows", type=SIZE, default=48, show_default=True)
@click.option("--tokens", type=SIZE, default=32_768, show_default=True)
@click.option("--slice-rows", type=SIZE, default=12, show_default=True, help="Rows of one launch.")
@click.option("--sweep", is_flag=True, help="Other launches of windowed policies too.")
@click.pass_context
def scan(
    ctx: click.Context, /, rows: int, tokens: int, slice_rows: int, sweep: bool, **common: Any
) -> int:
    """Measure the scan of one layer against flash-linear-attention's kernels."""
    common["repeats"] = min(common["repeats"], 8)
    bench_, quick = _prepare(ctx, **common)
    from quantlab.bench.scan import TINY, bench_scan

    size: dict[str, Any] = {"rows": rows, "tokens": tokens, "slice_rows": slice_rows}
    shapes: dict[str, Any] = {}
    if quick:
        size, shapes = {"rows": 2, "tokens": 32, "slice_rows": 1}, {"shapes": (TINY,)}
    return _report(
        ctx, "scan", bench_scan(bench_, sweep=sweep, **size, **shapes), bench_, common, size
    )


@bench.command()
@_common
@click.option("--only", default="", help="Models whose name contains this text.")
@click.option("--budget", type=SIZE, default=256, show_default=True, help="Tokens of an output.")
@click.pass_context
def generation(ctx: click.Context, /, only: str, budget: int, **common: Any) -> int:
    """Measure free-running generation: sampling, and rows that are replaced."""
    bench_, quick = _prepare(ctx, **common)
    from quantlab.bench.generation import generation_rows

    size: dict[str, Any] = {"only": only, "budget": budget}
    rows = generation_rows(bench_, quick=quick, **size)
    return _report(ctx, "generation", rows, bench_, common, size)


@bench.command()
@_common
@click.option("--streams", type=SIZE, default=4, show_default=True)
@click.option("--tokens", type=SIZE, default=32_768, show_default=True)
@click.option(
    "--part",
    type=click.Choice(["all", "suite"]),
    default="all",
    show_default=True,
    help="suite: only the whole suite, with metrics and rows written, and where its time goes.",
)
@click.pass_context
def engine(ctx: click.Context, /, streams: int, tokens: int, part: str, **common: Any) -> int:
    """Measure suite replayssm on a Qwen3.5-4B-shaped model against its own prefill and decode."""
    bench_, quick = _prepare(ctx, **common)
    from quantlab.bench.engine import QWEN, TINY, bench_engine

    size: dict[str, Any] = {"streams": streams, "tokens": tokens}
    if quick:
        size = {"streams": 1, "tokens": 48}
    size["part"] = part
    rows = bench_engine(bench_, shape=TINY if quick else QWEN, **size)
    return _report(ctx, "engine", rows, bench_, common, size)


@bench.command()
@_common
@click.option("--windows", type=SIZE, default=16, show_default=True, help="Of 16 tokens a layer.")
@click.option("--tokens", type=SIZE, default=1024, show_default=True, help="N of the studies.")
@click.option("--streams", type=SIZE, default=4, show_default=True)
@click.pass_context
def agreement(ctx: click.Context, /, windows: int, tokens: int, streams: int, **common: Any) -> int:
    """Compare the engine on the device with the CPU: codes, draws and KL curves of the zoo."""
    bench_, quick = _prepare(ctx, **common)
    from quantlab.bench.agreement import MODELS, bench_agreement

    size: dict[str, Any] = {"windows": windows, "tokens": tokens, "streams": streams}
    if quick:
        size = {"windows": 1, "tokens": 16, "streams": 2}
    rows = bench_agreement(bench_, models=MODELS[:1] if quick else MODELS, **size)
    return _report(ctx, "agreement", rows, bench_, common, size)


@bench.command()
@_common
@click.option(
    "--part",
    type=click.Choice(["all", "kernels", "models"]),
    default="all",
    show_default=True,
    help="One layer's kernels, whole model steps, or both.",
)
@click.option("--sweeps/--no-sweeps", default=True, show_default=True, help="Batches and windows.")
@click.option("--only", default="", help="Kernel rows whose name contains this text.")
@click.option(
    "--jobs",
    type=click.IntRange(0),
    default=12,
    show_default=True,
    help="Kernels compiled at once before they are timed; 0 for none.",
)
@click.pass_context
def decode(
    ctx: click.Context, /, part: str, sweeps: bool, only: str, jobs: int, **common: Any
) -> int:
    """Measure decode kernels and whole model steps, conventional and replayed."""
    common["repeats"] = min(common["repeats"], 8)
    bench_, quick = _prepare(ctx, **common)
    sizes: dict[str, Any] = {"part": part, "sweeps": sweeps, "only": only}
    rows = _decode_rows(bench_, quick=quick, jobs=0 if quick else jobs, **sizes)
    return _report(ctx, "decode", rows, bench_, common, sizes)


def _decode_rows(
    bench_: Bench, *, quick: bool, jobs: int, part: str, sweeps: bool, only: str
) -> Iterator[Row]:
    from quantlab.bench.decode import CEILING_ELEMENTS, bench_decode, cases, tiny_cases
    from quantlab.bench.decode_model import bench_model, models
    from quantlab.bench.decode_rivals import rival_rows

    if part != "models":
        wanted = tiny_cases() if quick else cases(sweeps=sweeps)
        wanted = [case for case in wanted if only in case.name]
        ceiling = 1 << 16 if quick else CEILING_ELEMENTS
        yield from bench_decode(bench_, wanted, jobs=jobs, ceiling_elements=ceiling)
        shapes = {case.shape.name: case.shape for case in wanted}
        yield from rival_rows(bench_, list(shapes.values()), 2 if quick else 256)
    if part != "kernels":
        for name, m, sizes in models(bench_, quick=quick):
            yield from bench_model(bench_, m, name, **sizes)


@bench.command()
@click.argument(
    "result",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default=REPORTS / "decode.json",
)
def figures(result: Path) -> None:
    """Draw the figures of a decode benchmark beside its RESULT, PNG and SVG."""
    from quantlab.bench.decode_figure import decode_figures
    from quantlab.bench.result import read_result
    from quantlab.report.page import render

    found = read_result(result)
    if found.bench != "decode":
        raise UsageError(f"{result} is of bench {found.bench}; figures are drawn of bench decode")
    for name, chart in decode_figures(found).items():
        png, svg = render(chart)
        for suffix, data in ((".png", png), (".svg", svg.encode())):
            path = result.with_name(name + suffix)
            path.write_bytes(data)
            click.echo(path)


@bench.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=REPORTS)
@click.option(
    "--targets",
    type=click.Path(path_type=Path, dir_okay=False),
    help="[default: targets.toml in FOLDER]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document as last line of stdout.")
def verify(folder: Path, targets: Path | None, as_json: bool) -> int:
    """Compare the results in FOLDER with the targets; exit 1 naming what falls short."""
    from quantlab.bench.targets import read_targets
    from quantlab.bench.targets import verify as compare

    targets = targets or folder / "targets.toml"
    if not targets.is_file():
        raise UsageError(f"{targets}: no such file")
    verdicts = compare(read_targets(targets), folder)
    short = [v for v in verdicts if not v.met]
    lines = [
        (
            "met" if v.met else "short" if v.figure is not None else "none",
            "" if v.figure is None else f"{v.figure:.4g}",
            str(v.target),
            v.found,
        )
        for v in verdicts
    ]
    click.echo(columns(lines, ("", "figure", "target", "from")))
    for verdict in short:
        figure = verdict.found if verdict.figure is None else f"{verdict.figure:.4g}"
        click.echo(f"falls short: {verdict.target}: {figure}", err=True)
    if as_json:
        echo_json(
            {
                "met": len(verdicts) - len(short),
                "short": [
                    {"target": str(v.target), "figure": v.figure, "found": v.found} for v in short
                ],
            }
        )
    return 1 if short else 0


def _prepare(
    ctx: click.Context, *, device: str, repeats: int, quick: bool, out: Path | None
) -> tuple[Bench, bool]:
    given = ctx.get_parameter_source("device") is not click.core.ParameterSource.DEFAULT
    if quick and not given:
        device = "cpu"
    if device == "cpu":
        if not quick:
            raise UsageError("--device cpu measures nothing; --quick tests the harness there")
        # before any kernel is defined: that is when Triton looks
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from quantlab.bench.measure import Bench
    from quantlab.models.device import parse_device

    place = parse_device(device)
    return Bench(str(place), repeats=1 if quick else repeats, warmup=0 if quick else 3), quick


def _report(
    ctx: click.Context,
    name: str,
    rows: Iterable[Row],
    bench_: Bench,
    common: dict[str, Any],
    sizes: dict[str, Any],
) -> int:
    from quantlab.bench.result import new_result, write_result

    quick = common["quick"]
    if quick:
        click.echo(SELF_TEST)
    out = common["out"] or Path(f"{name}.json")
    # rows so far lie beside the last whole result: a benchmark that is killed loses nothing
    unfinished = out.with_name(f"{out.name}.unfinished")
    command = shlex.join(["quantlab", *(ctx.obj or ())])
    sizes = sizes | {"repeats": bench_.repeats}

    def result_of(rows: Sequence[Row], **state: bool) -> Result:
        place = str(bench_.device)
        result = new_result(name, rows, device=place, command=command, sizes=sizes | state)
        return replace(result, measurement=result.measurement and not quick)

    so_far = result_of([], stopped=True)
    done: list[Row] = []
    for row in rows:
        figures = "  ".join(f"{key} {value:.4g}" for key, value in row.values.items())
        click.echo(f"{row.name:34s} {figures or f'{row.status}: {row.reason}'}")
        sys.stdout.flush()
        done.append(row)
        write_result(replace(so_far, rows=tuple(done)), unfinished)
    result = result_of(done)
    write_result(result, out)
    unfinished.unlink(missing_ok=True)
    if quick:
        click.echo(SELF_TEST)
    echo_json(result.document())
    return 1 if any(row.status == "refused" for row in done) else 0
