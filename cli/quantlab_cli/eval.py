"""`quantlab eval`: generate, grade, and bin accuracy by FP32 output length."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantlab.errors import UsageError
from quantlab.study.spec import DTYPES
from quantlab_cli.progress import Reporter, duration
from quantlab_cli.types import SIZE, Size, columns, echo_json, given

if TYPE_CHECKING:
    from quantlab.report.table import Table
    from quantlab.study.accuracy import EvalResult
    from quantlab.study.accuracy_spec import EvalSpec

DEFAULT_POLICIES = ("shared:nvfp4-sr", "nvfp4/fp16-sr")
ROWS = {"cpu": 32, "cuda": 256}
AUTO = "auto"
CONTEXT = 4096
"""Tokens of RULER's contexts unless said."""
LONGEST = 4096
"""Most tokens that a pilot for `--budget auto` tries of an embedded task; its longest solution."""


class Budget(Size):
    """A number of tokens, or "auto"."""

    name = "SIZE|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it."""
        return AUTO if value == AUTO else super().convert(value, param, ctx)


@click.command("eval")
@click.option("--model", "-M", required=True, help="Zoo name, preset, directory or hub id.")
@click.option(
    "--task",
    "tasks",
    multiple=True,
    help="chain, permutation, addition, recall (embedded), mmlu-pro, gpqa-diamond, math-level-5, "
    "gsm8k, aime or ruler-… (quantlab ls tasks); repeatable.  [default: chain]",
)
@click.option("--suite", help="A named list of policies (quantlab ls suites).")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help=f"Repeatable.  [default: {', '.join(DEFAULT_POLICIES)}]",
)
@click.option("--window", type=SIZE, default=16, show_default=True, help="Where no L=… is said.")
@click.option("--limit", "-L", type=SIZE, help="Questions of a task.  [default: 6; benchmarks all]")
@click.option("--repetitions", type=SIZE, help="Draws of each question.  [default: the task's]")
@click.option(
    "--budget",
    type=Budget(),
    help="Output tokens; auto: 99th percentile of FP32's in a pilot.  [default: 1,024; "
    "benchmarks their own]",
)
@click.option(
    "--context", type=SIZE, help="Tokens of RULER's prompt and output together.  [default: 4,096]"
)
@click.option("--temperature", type=float, help="0 is greedy.  [default: the paper's, or 1]")
@click.option("--top-p", type=float, help="[default: the paper's, or 0.95]")
@click.option("--top-k", type=int, help="0 keeps all.  [default: the paper's, or 0]")
@click.option("--presence-penalty", type=float, help="[default: the paper's, or 0]")
@click.option("--seed", type=click.IntRange(0, 2**64 - 2), default=0, show_default=True)
@click.option(
    "--margin",
    type=float,
    default=1.0,
    show_default=True,
    metavar="POINTS",
    help="Of the equivalence verdict.",
)
@click.option("--rows", type=SIZE, help="Rows of every forward.  [default: 32; 256 on a GPU]")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, …")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of weights and activations.")
@click.option("--out", "-o", type=click.Path(path_type=Path), help="Run directory.")
@click.option("--resume", is_flag=True, help="Go on with the run in the directory, if any.")
@click.option(
    "--save-every", type=click.FloatRange(min=0), default=120.0, show_default=True,
    metavar="SECONDS", help="What a kill can cost.",
)  # fmt: skip
@click.option("--figures/--no-figures", default=True, help="Draw the figures at the end.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and for how long.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document as last line of stdout.")
@click.option("--markdown", is_flag=True, help="The tables in Markdown.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
def eval(
    *,
    out: Path | None,
    resume: bool,
    save_every: float,
    figures: bool,
    dry_run: bool,
    as_json: bool,
    markdown: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Measure accuracy of long generations, paired with FP32 and binned by its output length.

    \b
    quantlab eval -M MODEL --task chain --task recall --suite replayssm --limit 500 --repetitions 3
    """  # noqa: D301 - click's mark for lines that stay as they are
    spec = make_spec(**options)
    if options["budget"] == AUTO:
        spec = with_budget(spec, out if resume else None, quiet=quiet)
    if dry_run:
        return show_plan(spec, as_json=as_json)
    from quantlab.study.accuracy import run_eval

    directory = out or Path("runs") / f"eval-{Path(spec.model).name.lower()}-{spec.digest()}"
    with Reporter(quiet=quiet, unit="tokens", rate="tokens") as reporter:
        result = run_eval(
            spec,
            directory,
            resume=resume,
            progress=reporter,
            checkpoint_seconds=save_every,
            command=["quantlab", *click.get_current_context().find_root().obj],
        )
    show_tables(result, as_json=as_json, markdown=markdown)
    if figures:
        from quantlab.report.accuracy import write_report

        files = write_report(result)
        if not quiet:
            names = ["rows.parquet", "summary.csv", "bins.csv", *(f.name for f in files)]
            click.echo(f"in {result.path}: {', '.join(names)}", err=True)
    if as_json:
        echo_json(document(result))
    return 0


def make_spec(**options: Any) -> EvalSpec:
    """Build the spec from the options; every name is checked before any weight is loaded.

    Raises:
        UsageError: for a name that does not exist, or options that contradict each other.
    """
    from quantlab.data.benchmarks.benchmark import BENCHMARKS, load_benchmark, paper_sampling
    from quantlab.data.ruler import RULER, ruler_tasks
    from quantlab.models.source import resolve
    from quantlab.replay.policy import parse_policy, suite
    from quantlab.study.accuracy_spec import EvalSpec, task_or_fail

    tasks = tuple(options["tasks"]) or ("chain",)
    for task in tasks:
        given("--task", task_or_fail, task)
    window = options["window"]
    named = options["policies"]
    found = []
    if options["suite"] is not None:
        found += given("--suite", lambda name: suite(name, window=window), options["suite"])
    elif not named:
        named = DEFAULT_POLICIES
    found += [given("--policy", lambda t: parse_policy(t, window=window), text) for text in named]
    resolve(options["model"])
    public = [load_benchmark(task) for task in tasks if task in BENCHMARKS]
    long = [ruler_tasks()[task] for task in tasks if task in RULER]
    if public and len(tasks) > 1:
        raise UsageError(
            "--task: a public benchmark has a budget and repetitions of its own; run it alone"
        )
    if long and len(long) < len(tasks):
        raise UsageError(
            "--task: RULER's tasks are greedy and of one context length; run them alone"
        )
    protocol = {"temperature": 1.0, "top_p": 0.95} | paper_sampling(options["model"])
    protocol |= {"budget": 1024, "repetitions": 1, "limit": 6}
    if public:
        protocol |= {"budget": public[0].budget, "repetitions": public[0].repetitions}
        protocol.pop("limit")
    if long:
        budget = max(settings["budget"] for settings in long)
        protocol = {"temperature": 0.0, "budget": budget, "limit": long[0]["questions"]}
        protocol["context"] = CONTEXT
    asked = {
        name: options[name]
        for name in (
            "limit", "repetitions", "budget", "context", "temperature", "top_p", "top_k",
            "presence_penalty",
        )
        if options[name] is not None and options[name] != AUTO
    }  # fmt: skip
    if options["budget"] == AUTO and not public and not long:
        asked["budget"] = LONGEST
    values = {"limit": None, **protocol, **asked}
    device = _device(options["device"])
    from quantlab.engine.sampling import Sampling

    names = ("temperature", "top_p", "top_k", "presence_penalty")
    Sampling(**{name: values[name] for name in names if name in values})
    return EvalSpec(
        model=options["model"],
        policies=tuple({str(p): p for p in found}.values()),
        tasks=tasks,
        seed=options["seed"],
        margin=options["margin"] / 100,
        rows=options["rows"] or ROWS["cuda" if device.startswith("cuda") else "cpu"],
        device=device,
        dtype=options["dtype"],
        **values,
    )


def _device(name: str) -> str:
    from quantlab.models.device import check_device_name

    if name != "auto":
        check_device_name(name)
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def with_budget(spec: EvalSpec, gone_on: Path | None, *, quiet: bool) -> EvalSpec:
    """Set the budget that FP32 needs; a run that is gone on with keeps its own.

    Args:
        spec: its budget is the most that is tried.
        gone_on: directory of the run to go on with, if any.
        quiet: do not say what was found.
    """
    from dataclasses import replace

    from quantlab.study.accuracy_plan import find_budget
    from quantlab.study.store import RunDirectory

    recorded = {}
    if gone_on is not None:
        directory = RunDirectory(gone_on)
        recorded = directory.read_json(directory.spec_file).get("spec", {})
    budget = recorded.get("budget") or find_budget(spec)
    if not quiet:
        click.echo(f"budget: {budget:,} tokens", err=True)
    return replace(spec, budget=budget)


def show_plan(spec: EvalSpec, *, as_json: bool) -> int:
    """Write what a study would generate, and for how long."""
    from quantlab.study.accuracy_plan import plan_eval

    found = plan_eval(spec)
    seconds = found.pop("seconds")
    if as_json:
        echo_json({**found, "seconds": seconds, "spec": spec.to_json()})
        return 0
    lines = [(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
             for name, value in found.items()]  # fmt: skip
    click.echo(columns([*lines, ("time", f"about {duration(seconds)}")]))
    return 0


def show_tables(
    result: EvalResult, *, as_json: bool, markdown: bool, count: int = 4, log: bool = False
) -> None:
    """Write the table of accuracies, then that by length, task by task."""
    from quantlab.report.accuracy import bins_tables, summary_tables

    shown = [*summary_tables(result.summary()), *bins_tables(result.bins(count=count, log=log))]
    click.echo("\n\n".join(_text(table, markdown) for _, table in shown))


def _text(table: Table, markdown: bool) -> str:
    from quantlab.report.table import markdown as as_markdown
    from quantlab.report.table import plain

    return as_markdown(table) if markdown else plain(table)


def document(result: EvalResult, *, count: int = 4, log: bool = False) -> dict[str, Any]:
    """Describe a run as JSON values."""
    return {
        "directory": str(result.path),
        "state": result.run.get("state"),
        "spec": result.spec.to_json(),
        "summary": result.summary().to_pylist(),
        "bins": result.bins(count=count, log=log).to_pylist(),
    }
