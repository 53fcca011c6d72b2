"""`quantlab kl`: options to a spec, the study, its table and its figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantlab.engine import ENGINES
from quantlab.errors import UsageError
from quantlab.study.spec import DEFAULT_PROMPT, DEFAULT_TOKENS, DTYPES
from quantlab_cli.progress import Reporter, duration
from quantlab_cli.types import SIZE, Choice, columns, echo_json, given

if TYPE_CHECKING:
    from quantlab.replay import Policy
    from quantlab.study import KlSpec, Result

FAILED_CELLS = 3
DEFAULT_SUITE = "replayssm"


@click.command()
@click.option("--model", "-M", required=True, help="Zoo name, preset, directory or hub id.")
@click.option("--suite", help="A named list of policies (quantlab ls suites).")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="shared:nvfp4-sr, nvfp4/fp16-sr, conventional:fp8-sr, …; repeatable.",
)
@click.option("--shared", multiple=True, metavar="FORMAT", help="Short for --policy shared:FORMAT.")
@click.option("--read", metavar="FORMAT", help="Read copy of a policy with two copies.")
@click.option("--recur", metavar="FORMAT", help="Its recurrence copy.")
@click.option(
    "--window",
    "-L",
    type=SIZE,
    default=16,
    show_default=True,
    help="Steps per store, where a policy does not say L=….",
)
@click.option(
    "--records",
    type=Choice(["auto", "bf16", "fp32", "exact"]),
    default="auto",
    show_default=True,
    help="Types of a window's records.",
)
@click.option(
    "--corrections",
    type=Choice(["rederive", "fold"]),
    default="rederive",
    show_default=True,
    help="Delta rules at a flush; fold is the ablation.",
)
@click.option(
    "--floor/--no-floor",
    default=True,
    show_default=True,
    help="Add shared:fp32, the noise floor, if it is not listed.",
)
@click.option(
    "--tokens",
    "-N",
    type=SIZE,
    default=DEFAULT_TOKENS,
    show_default=True,
    help="Positions to measure to.",
)
@click.option("--streams", type=SIZE, help="Token streams.  [default: 4, or what the data have]")
@click.option(
    "--data",
    help="books, pg19, or a .txt, .jsonl (field text) or folder of them.  "
    "[default: books for the zoo, pg19 otherwise]",
)
@click.option(
    "--prompt",
    type=SIZE,
    default=DEFAULT_PROMPT,
    show_default=True,
    help="Tokens before position 1, in full precision.",
)
@click.option(
    "--engine",
    type=Choice(ENGINES),
    default="windowed",
    show_default=True,
    help="windowed: at prefill speed; stepwise: the oracle, one token a forward.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    show_default=True,
    help="Of the stochastic rounding.",
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, …")
@click.option(
    "--dtype",
    type=Choice(DTYPES),
    help="Of weights and activations.  [default: the checkpoint's; fp32 for the zoo on a CPU]",
)
@click.option("--batch-rows", type=SIZE, help="Rows in a batch.  [default: what memory allows]")
@click.option("--segment", type=SIZE, help="Tokens of a row in one forward.  [default: planned]")
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    help="Run directory.  [default: runs/kl-MODEL-N-HASH]",
)
@click.option("--resume", is_flag=True, help="Go on with the run in the directory, if any.")
@click.option(
    "--save-every",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Save the state of a batch so often: what a kill can cost. Slow saves come less often.",
)
@click.option("--figures/--no-figures", default=True, help="Draw figures and page at the end.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and for how long.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document as last line of stdout.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
def kl(
    *,
    out: Path | None,
    resume: bool,
    save_every: float,
    figures: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Measure KL from FP32-state decoding against generation length, per policy.

    \b
    quantlab kl -M tiny-gdn --suite replayssm
    quantlab kl -M tiny-gdn --shared nvfp4-sr --policy nvfp4/fp16-sr -N 16K
    """  # noqa: D301 - click's mark for lines that stay as they are
    spec = make_spec(**options)
    if dry_run:
        return show_plan(spec, as_json=as_json)
    from quantlab.study.build import default_directory
    from quantlab.study.run import run_kl

    directory = default_directory(spec) if out is None else out
    with Reporter(quiet=quiet) as reporter:
        result = run_kl(
            spec,
            directory,
            resume=resume,
            progress=reporter,
            checkpoint_seconds=save_every,
            command=["quantlab", *click.get_current_context().find_root().obj],
        )
    show(result, figures=figures, as_json=as_json, quiet=quiet)
    for cell in result.failed:
        click.echo(f"failed: streams {cell['streams']}: {cell['error']}", err=True)
    return FAILED_CELLS if result.failed else 0


def make_spec(**options: Any) -> KlSpec:
    """Build the spec from the options; every name is checked, no weight and no torch is loaded.

    Raises:
        UsageError: for a name that does not exist, or options that contradict each other.
    """
    from quantlab.study.build import build_spec

    policies = list_policies(
        suite=options.pop("suite"),
        policies=options.pop("policies"),
        shared=options.pop("shared"),
        read=options.pop("read"),
        recur=options.pop("recur"),
        window=options.pop("window"),
        records=options.pop("records"),
        corrections=options.pop("corrections"),
    )
    return build_spec(options.pop("model"), policies, **options)


def list_policies(
    *,
    suite: str | None,
    policies: tuple[str, ...],
    shared: tuple[str, ...],
    read: str | None,
    recur: str | None,
    **defaults: Any,
) -> list[Policy]:
    """Collect the policies of all options, naming the option of one that is wrong.

    Raises:
        UsageError: an unknown name, or one copy of two.
    """
    from quantlab.replay.policy import parse_policy
    from quantlab.replay.policy import suite as named_suite

    if (read is None) != (recur is None):
        there, missing = ("--read", "--recur") if recur is None else ("--recur", "--read")
        raise UsageError(
            f"{there} is one copy of two: give {missing} as well (such as {missing} fp32), or "
            "--shared FORMAT for a single copy"
        )

    def parse(text: str) -> Policy:
        return parse_policy(text, **defaults)

    found: list[Policy] = []
    if suite is None and not policies and not shared and read is None:
        suite = DEFAULT_SUITE
    if suite is not None:
        found += given("--suite", lambda name: named_suite(name, **defaults), suite)
    found += [given("--policy", parse, text) for text in policies]
    found += [given("--shared", parse, f"shared:{text}") for text in shared]
    if read is not None:
        found.append(given("--read/--recur", parse, f"{read} / {recur}"))
    return found


def show(
    result: Result,
    *,
    figures: bool = True,
    as_json: bool = False,
    quiet: bool = False,
    markdown: bool = False,
) -> None:
    """Write the table, draw figures and page, and say where they are.

    The table comes first: a disk that has no room for figures must not hide it.

    Args:
        result: of a run.
        figures: whether to draw.
        as_json: whether a JSON document is the last line of stdout.
        quiet: whether to leave out where the files are.
        markdown: the table in Markdown.
    """
    from quantlab.report.table import markdown_table

    click.echo(markdown_table(result.summary) if markdown else str(result))
    files: list[Path] = []
    if figures:
        from quantlab.report.page import write_report

        files = write_report(result)
    if not quiet:
        names = ["rows.parquet", "summary.csv", "spec.json", *(path.name for path in files)]
        click.echo(f"in {result.path}: {', '.join(names)}", err=True)
    if as_json:
        echo_json(
            {
                "directory": str(result.path),
                "state": result.run.get("state"),
                "failed": result.failed,
                "spec": result.record["spec"],
                "files": [str(path) for path in files],
                "summary": result.summary.to_pylist(),
            }
        )


def show_plan(spec: KlSpec, *, as_json: bool) -> int:
    """Write what a study would do, and for how long."""
    from quantlab.study.estimate import estimate

    found = estimate(spec)
    seconds = found.pop("seconds")
    if as_json:
        echo_json({**found, "seconds": seconds, "spec": spec.to_json()})
        return 0
    lines = [(name.replace("_", " "), str(value)) for name, value in found.items()]
    click.echo(columns([*lines, ("time", f"about {duration(seconds)}")]))
    click.echo("\npolicies (the FP32 reference rides along):")
    for policy in spec.policies:
        click.echo(f"  {policy.short:24}  {policy}")
    return 0
