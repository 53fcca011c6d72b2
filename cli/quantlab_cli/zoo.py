"""`quantlab zoo`: the embedded models."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from quantlab.errors import MissingAsset, UsageError
from quantlab_cli.types import SIZE, columns, echo_json


@click.group()
def zoo() -> None:
    """Small hybrids in real architectures, trained by this project."""


@zoo.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON document as last line of stdout.")
def list_models(as_json: bool) -> None:
    """List the embedded models."""
    from quantlab.models.zoo import SHIPPED

    found = [
        {
            "name": name,
            "architecture": entry.model_type,
            "recurrence": entry.kind,
            "shipped": (entry.path / "model.safetensors").is_file(),
            "path": str(entry.path),
        }
        for name, entry in SHIPPED.items()
    ]
    if as_json:
        echo_json(found)
        return
    rows = [
        (
            str(f["name"]),
            str(f["architecture"]),
            str(f["recurrence"]),
            "yes" if f["shipped"] else "no: train it with quantlab zoo train",
        )
        for f in found
    ]
    click.echo(columns(rows, ("name", "architecture", "recurrence", "shipped")))


@zoo.command()
@click.argument("name")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Directory with books-train.txt.xz and books-test/ (data_manifests/); needed where "
    "the model is trained on books.",
)
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory of the checkpoint, the log and the card.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Budget of this call in seconds; or",
)
@click.option("--tokens", type=SIZE, help="in tokens.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--resume", is_flag=True, help="Go on with the run in OUT under a further budget.")
def train(
    name: str,
    data: Path | None,
    out: Path,
    seconds: float | None,
    tokens: int | None,
    device: str,
    resume: bool,
) -> None:
    """Train NAME by its recipe."""
    from quantlab.models.zoo import TRAINABLE

    if name not in TRAINABLE:
        near = difflib.get_close_matches(name, TRAINABLE, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"no zoo model {name!r}.{hint} Known: {', '.join(TRAINABLE)}")
    if (seconds is None) == (tokens is None):
        raise UsageError("give the budget as one of --seconds and --tokens")
    if TRAINABLE[name].problems is None:
        _check_books(name, data)
    elif data is not None:
        raise UsageError(f"--data: {name} is trained on worked problems, which are made")
    import logging

    from quantlab.models.device import check_device_name, parse_device

    check_device_name(device)
    from quantlab.models.zoo.train import saved_state
    from quantlab.models.zoo.train import train as run

    if resume:
        saved_state(out)
    parse_device(device)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(name, data=data, out=out, device=device, seconds=seconds, tokens=tokens, resume=resume)
    click.echo(str(out))


def _check_books(name: str, data: Path | None) -> None:
    if data is None:
        raise UsageError(f"Missing option '--data': {name} is trained on books")
    if not data.exists():
        raise MissingAsset(
            f"--data {data} does not exist: the books are listed, with sources and hashes, in "
            "data_manifests/books-train.toml and books-test.toml"
        )
    if not data.is_dir():
        raise UsageError(f"--data {data} is a file; give the directory that holds the books")
