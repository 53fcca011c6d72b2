"""`quantlab zoo`: the embedded models."""

from __future__ import annotations

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
    from quantlab.models.zoo import ZOO

    found = [
        {
            "name": name,
            "architecture": entry.model_type,
            "recurrence": entry.kind,
            "shipped": (entry.path / "model.safetensors").is_file(),
            "path": str(entry.path),
        }
        for name, entry in ZOO.items()
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
    required=True,
    help="Directory of the books (data_manifests/books-train.toml).",
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
@click.option("--resume", is_flag=True, help="Go on from OUT/stable.pt under a further budget.")
def train(
    name: str,
    data: Path,
    out: Path,
    seconds: float | None,
    tokens: int | None,
    device: str,
    resume: bool,
) -> None:
    """Train NAME by its recipe."""
    from quantlab.models.zoo import ZOO

    if name not in ZOO:
        raise UsageError(f"no zoo model {name!r}; known: {', '.join(ZOO)}")
    if (seconds is None) == (tokens is None):
        raise UsageError("give the budget as one of --seconds and --tokens")
    if not data.exists():
        raise MissingAsset(
            f"--data {data} does not exist: the training books are listed, with their hashes, in "
            "data_manifests/books-train.toml"
        )
    if resume and not (out / "stable.pt").is_file():
        raise UsageError(f"--resume: {out} has no stable.pt")
    import logging

    from quantlab.models.device import parse_device
    from quantlab.models.zoo.train import train as run

    parse_device(device)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(name, data=data, out=out, device=device, seconds=seconds, tokens=tokens, resume=resume)
    click.echo(str(out))
