"""`quantlab cast`: quantize a tensor and say what it loses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantlab.errors import RunError, UsageError
from quantlab_cli.types import columns, echo_json, given

if TYPE_CHECKING:
    from torch import Tensor

    from quantlab.formats import Encoded, Format

SUFFIXES = (".npy", ".safetensors")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--format", "-f", "name", required=True, help="quantlab ls formats lists them.")
@click.option("--key", help="Tensor in a .safetensors file.  [default: the only one]")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    show_default=True,
    help="Of the stochastic rounding.",
)
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    help="Write codes and scales to this .safetensors.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document as last line of stdout.")
def cast(
    file: Path, name: str, key: str | None, seed: int, out: Path | None, as_json: bool
) -> None:
    """Quantize FILE (.npy or .safetensors), a state [..., dv, dk], and print its error."""
    from quantlab.formats import parse_format

    fmt = given("--format", parse_format, name)
    if file.suffix not in SUFFIXES:
        raise UsageError(f"{file}: expected a {' or '.join(SUFFIXES)} file")
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    if out is not None and out.suffix != ".safetensors":
        raise UsageError(f"--out {out}: codes and scales go to a .safetensors file")
    x = read_tensor(file, key)
    encoded, report = quantize_report(x, fmt, seed=seed)
    if out is not None:
        write_encoded(encoded, out, shape=tuple(x.shape))
    if as_json:
        echo_json({"file": str(file), "shape": list(x.shape), "seed": seed, **report})
    else:
        click.echo(columns([(label, _shown(value)) for label, value in report.items()]))


def read_tensor(file: Path, key: str | None) -> Tensor:
    """Read a floating-point tensor with at least the two axes of a state.

    Raises:
        UsageError: no such tensor, or not a state.
        RunError: a damaged file.
    """
    import torch

    try:
        if file.suffix == ".npy":
            import numpy as np

            x = torch.from_numpy(np.load(file, allow_pickle=False))
        else:
            from safetensors import safe_open

            with safe_open(file, framework="pt") as tensors:
                names = sorted(tensors.keys())
                if key is None and len(names) != 1:
                    raise UsageError(
                        f"{file} holds {len(names)} tensors: name one with --key "
                        f"({', '.join(names[:8])}{', …' if len(names) > 8 else ''})"
                    )
                if key is not None and key not in names:
                    raise UsageError(f"--key {key!r}: {file} holds {', '.join(names[:8])}")
                x = tensors.get_tensor(key or names[0])
    except UsageError:
        raise
    except Exception as error:
        # numpy, safetensors and torch each raise their own kind for a damaged file
        raise RunError(f"{file} cannot be read: {error}") from error
    if not x.is_floating_point():
        raise UsageError(f"{file}: expected a floating-point tensor, got {x.dtype}")
    if x.ndim < 2 or 0 in x.shape:
        raise UsageError(f"{file}: expected a state [..., dv, dk], got shape {list(x.shape)}")
    return x


def quantize_report(
    x: Tensor, fmt: Format, *, seed: int
) -> tuple[Encoded, dict[str, float | int | str]]:
    """Store and load `x`; return what is stored and the error's measures, taken in FP64."""
    import torch

    from quantlab.formats import decode, encode
    from quantlab.formats.philox import sr_words

    dv, dk = x.shape[-2:]
    heads = x.shape[-3] if x.ndim > 2 else 1
    state = x.reshape(-1, heads, dv, dk)
    words = None
    if fmt.needs_words:
        rows = torch.arange(state.shape[0])
        words = sr_words(
            seed=seed, layer=0, copy=0, stream=rows, flush=0, heads=heads, dv=dv, dk=dk
        )
    encoded = encode(state, fmt, words)
    exact, stored = state.double(), decode(encoded).double()
    finite = exact.isfinite() & stored.isfinite()
    exact, stored = exact[finite], stored[finite]
    error = stored - exact
    signal, noise = float(exact.square().sum()), float(error.square().sum())
    relative = (error.abs() / exact.abs())[exact != 0]
    counts = encoded.counts
    return encoded, {
        "format": str(fmt),
        "bits per element": float(fmt.bits_per_element(dv, dk)),
        "elements": x.numel(),
        "SQNR dB": _decibels(signal, noise),
        "RMS error": float(error.square().mean().sqrt()) if error.numel() else float("nan"),
        "mean error": float(error.mean()) if error.numel() else float("nan"),
        "max |error|": float(error.abs().max()) if error.numel() else float("nan"),
        "max |error / x|": float(relative.max()) if relative.numel() else 0.0,
        "clipped": int(counts.clipped),
        "flushed to zero": int(counts.flushed),
        "zeroed blocks": int(counts.zeroed),
        "non-finite inputs": int(counts.nonfinite),
        "non-finite outputs": int((~decode(encoded).isfinite()).sum()),
    }


def _decibels(signal: float, noise: float) -> float:
    import math

    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _shown(value: float | int | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_encoded(encoded: Encoded, out: Path, *, shape: tuple[int, ...]) -> None:
    """Write codes, 4-bit ones two to a byte along dk with the first in the low nibble, and scales.

    Args:
        encoded: the stored state.
        out: the file. Its metadata say format, shape and codes in an item of `codes`.
        shape: of the tensor.

    Raises:
        RunError: if the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from quantlab.formats.codes import pack_nibbles

    codes, per_item = encoded.codes.reshape(shape), 1
    if encoded.fmt.element.bits == 4:
        codes, per_item = pack_nibbles(codes), 2
    tensors: dict[str, Any] = {"codes": codes.contiguous()}
    if encoded.scales is not None:
        tensors["scales"] = encoded.scales.contiguous()
    if encoded.state_scale is not None:
        tensors["state_scale"] = encoded.state_scale.contiguous()
    metadata = {
        "format": str(encoded.fmt),
        "shape": json.dumps(list(shape)),
        "codes_per_item": str(per_item),
    }
    try:
        save_file(tensors, out, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise RunError(f"--out {out} cannot be written: {error}") from error
