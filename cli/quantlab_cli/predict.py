"""`quantlab predict`: KL from calibration statistics, held against a measurement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantlab_cli.options import RUN, STREAMS, STUDY, with_options
from quantlab_cli.progress import Reporter
from quantlab_cli.report import page_of
from quantlab_cli.types import SIZE, echo_json, given

if TYPE_CHECKING:
    from quantlab.study import KlSpec
    from quantlab.study.predict import Prediction

SUITE = "replayssm"


# as every study has it, but a run named by --against knows its model
MODEL = click.option("--model", "-M", help="Zoo name, preset, directory or hub id.")


@click.command()
@with_options((MODEL, *STUDY[1:]))
@with_options(STREAMS)
@click.option(
    "--suite", help="A named list of policies.  [default: replayssm and three to nearest]"
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="Repeatable; instead of the suite, or beside one that is named.",
)
@click.option("--window", "-L", type=SIZE, default=16, show_default=True, help="Steps per store.")
@click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), default=0, help="Of rounding and of injections."
)
@click.option(
    "--calibrate",
    type=SIZE,
    default=1024,
    show_default=True,
    help="Tokens of a calibration text, which follow the measured ones.",
)
@click.option(
    "--texts", type=SIZE, default=2, show_default=True, help="Documents that give such a text."
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="A finished run of quantlab kl or ablate that is to be predicted; its model, policies, "
    "data and N are taken.  [default: measured here]",
)
@with_options(RUN)
def predict(against: Path | None, calibrate: int, texts: int, **options: Any) -> int:
    """Predict the order and size of KL at N from gates, rounding errors and read-outs alone.

    Policies are not decoded with until the prediction is on disk. Then it is held against what is
    measured: order, size, and where it fails.

    \b
    quantlab predict -M tiny-gdn
    quantlab predict --against runs/kl-tiny-gdn-4096-1a2b3c4d
    """  # noqa: D301 - click's mark for lines that stay as they are
    from quantlab.study.predict import default_directory, run_prediction

    run = {
        name: options.pop(name)
        for name in ("out", "resume", "figures", "as_json", "markdown", "quiet")
    }
    spec = _built(options) if against is None else _measured(against, options)
    with (
        Reporter(quiet=run["quiet"], unit="scans and injections", rate="of them") as reporter,
        Reporter(quiet=run["quiet"]) as measuring,
    ):
        result = run_prediction(
            spec,
            run["out"] or default_directory(spec, calibrate),
            tokens=calibrate,
            texts=texts,
            against=against,
            resume=run["resume"],
            progress=reporter,
            measuring=measuring,
            command=["quantlab", *click.get_current_context().find_root().obj],
        )
    files = page_of(result.path, wanted=run["figures"])
    _show(result, files, run)
    return 0


def _built(options: dict[str, Any]) -> KlSpec:
    from quantlab.replay.policy import parse_policy, suite
    from quantlab.study.build import build_spec
    from quantlab.study.predict import EXTRA

    model, window = options.pop("model"), options.pop("window")
    if model is None:
        raise click.UsageError("Missing option '--model' / '-M', or a run with --against.")
    named, texts = options.pop("suite"), options.pop("policies")
    chosen = []
    if named is not None or not texts:
        chosen = given("--suite", lambda name: suite(name, window=window), named or SUITE)
    if named is None and not texts:
        texts = EXTRA
    chosen += [
        given("--policy", lambda text: parse_policy(text, window=window), text) for text in texts
    ]
    return build_spec(model, chosen, **options)


def _measured(against: Path, options: dict[str, Any]) -> KlSpec:
    from click.core import ParameterSource

    from quantlab.study.build import build_spec
    from quantlab.study.result import load_result

    context = click.get_current_context()
    for name in ("model", "tokens", "data", "prompt", "streams", "suite", "policies", "window"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.rstrip('s')} is that of the run given by --against")
    result = load_result(against)
    of = result.spec
    return build_spec(
        of.model,
        list(of.policies),
        floor=False,
        data=of.data,
        tokens=of.tokens,
        streams=of.streams,
        prompt=of.prompt,
        seed=options["seed"],
        device=options["device"],
        dtype=options["dtype"],
    )


def _show(result: Prediction, files: list[Path], run: dict[str, Any]) -> None:
    from quantlab.report.prediction import prediction_tables
    from quantlab.report.table import markdown, plain

    lay_out = markdown if run["markdown"] else plain
    click.echo("\n\n".join(lay_out(table) for table in prediction_tables(result)))
    if not run["quiet"]:
        names = ["rows.parquet", "heads.parquet", "compared.csv", "agreement.csv"]
        click.echo(f"in {result.path}: {', '.join([*names, *(f.name for f in files)])}", err=True)
    if run["as_json"]:
        echo_json(
            {
                "directory": str(result.path),
                "measured": str(result.measured),
                "spec": result.record["spec"],
                "files": [str(path) for path in files],
                "compared": result.compared.to_pylist(),
                "agreement": result.agreement.to_pylist(),
            }
        )
