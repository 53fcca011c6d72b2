"""`quantlab check`: the self-test of a model."""

from __future__ import annotations

from dataclasses import asdict

import click

from quantlab.study.spec import DTYPES
from quantlab_cli.types import Choice, echo_json


@click.command()
@click.argument("model")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, …")
@click.option("--dtype", type=Choice(DTYPES), help="Of weights and activations.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document as last line of stdout.")
def check(model: str, device: str, dtype: str | None, as_json: bool) -> int:
    """Test that MODEL's history survives and that its recurrent op can be replaced.

    Several transformers versions lose a hybrid model's state without an error; a study runs the
    same test first.
    """
    from quantlab.models.source import resolve

    resolve(model)
    from quantlab.models import load_model
    from quantlab.models.check import check_model

    report = check_model(load_model(model, device=device, dtype=dtype))
    click.echo(report.table())
    if as_json:
        echo_json(
            {"model": model, "passed": report.passed, "checks": [asdict(r) for r in report.rows]}
        )
    return 0 if report.passed else 1
