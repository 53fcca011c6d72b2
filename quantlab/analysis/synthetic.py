"""Recurrences whose every parameter is known, run by the real scan and rounded by real formats.

Two grids of known spacing come out of formats as they are:

- `integers`: `int16@state` with one element of each state held at 32767, which makes the stored
  FP32 scale exactly 1: the others are rounded to integers, δ = 1;
- `binade`: `fp16` around 1536, where neighbours are 1 apart as long as values stay in
  1024 … 2048.

Elements are independent: dk = 1, and every value row is its own recurrence x' = α x + u with
Gaussian u. The delta rule has dk > 1 and random unit keys, and no grid of known δ: there the
variance of a write is measured in the same run.

Scans run in FP64 on FP64 inputs, so that nothing but the store rounds (a value is brought to FP32
before it is: 2^-24 relative, against a grid of 2^-15 or more).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quantlab.analysis.observer import ObservedScan
from quantlab.formats import parse_format
from quantlab.recurrence import OpInputs
from quantlab.replay import Policy, WindowedScan

Grid = Literal["integers", "binade"]
FORMATS: dict[Grid, str] = {"integers": "int16@state", "binade": "fp16"}
PIN = 32767.0
CENTRE = 1536.0
# Variance of u: stationary values then cover many gaps of the grid, and stay within the binade.
DRIVE = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Deviations of independent elements, and the errors of the last write.

    Attributes:
        deviation: [heads, n] FP64, right after the last store.
        write: [heads, n] error of that store.
        writes: stores in all; the first, of an exact start, has no error.
    """

    deviation: Tensor
    write: Tensor
    writes: int

    def mean(self) -> tuple[float, float]:
        """Mean deviation and its standard error."""
        n = self.deviation.numel()
        return float(self.deviation.mean()), float(self.deviation.std()) / math.sqrt(n)

    def by_head(self) -> tuple[float, float]:
        """Mean square deviation over that of a write, and its standard error over heads."""
        ratio = self.deviation.square().mean(1) / self.write.square().mean()
        return float(ratio.mean()), float(ratio.std()) / math.sqrt(ratio.numel())

    def variance(self) -> tuple[float, float]:
        """Variance of the deviation and its standard error, from the fourth moment."""
        x = self.deviation - self.deviation.mean()
        n, variance = x.numel(), float(x.square().mean())
        fourth = float(x.pow(4).mean())
        return variance, math.sqrt(max(fourth - variance**2, 0.0) / n)


def scalar_sample(
    *,
    decay: float,
    window: int,
    rounding: str,
    grid: Grid = "integers",
    writes: int = 40,
    elements: int = 4096,
    constant: float | None = None,
    drive: float = DRIVE,
    seed: int = 0,
) -> Sample:
    """Run x' = α x + u and compare its rounded with its exact course.

    Args:
        decay: α.
        window: L.
        rounding: "rtn" or "sr".
        grid: where δ = 1 comes from.
        writes: stores after the exact start.
        elements: independent ones.
        constant: u everywhere and always, from x = 0; None for Gaussian u.
        drive: variance of Gaussian u.
        seed: of u and of the rounding.
    """
    heads = 8
    dv = elements // heads + 1  # the last row holds the pin
    steps = writes * window
    generator = torch.Generator().manual_seed(seed)
    shape = (1, steps, heads, dv)
    if constant is None:
        u = math.sqrt(drive) * torch.randn(shape, generator=generator, dtype=torch.float64)
    else:
        u = torch.full(shape, constant, dtype=torch.float64)
    start = torch.zeros(1, heads, dv, 1, dtype=torch.float64)
    if grid == "binade":
        u, start = u + (1 - decay) * CENTRE, start + CENTRE
    u[..., -1], start[:, :, -1] = (1 - decay) * PIN, PIN
    ones = torch.ones(1, steps, 1, 1, dtype=torch.float64)
    inputs = OpInputs(
        q=ones,
        k=ones,
        v=u,
        log_decay=torch.full(shape[:3], math.log(decay), dtype=torch.float64),
    )
    return _sample(inputs, start, FORMATS[grid], rounding, window, seed, pinned=True)


def delta_sample(
    *,
    decay: float,
    beta: float,
    window: int,
    rounding: str,
    dk: int,
    writes: int = 40,
    dv: int = 8,
    heads: int = 256,
    seed: int = 0,
) -> Sample:
    """Run a delta rule with constant gates, isotropic unit keys and Gaussian values.

    Args:
        decay: α.
        beta: write strength.
        window: L.
        rounding: "rtn" or "sr".
        dk: width of the keys.
        writes: stores after the exact start.
        dv: value rows.
        heads: each with keys of its own; elements of one head share their contractions, so that
            `Sample.by_head` is what has independent entries.
        seed: of the inputs and of the rounding.
    """
    steps = writes * window
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    k = torch.nn.functional.normalize(normal(1, steps, heads, dk), dim=-1)
    v = normal(1, steps, heads, dv)
    inputs = OpInputs(
        q=k,
        k=k,
        v=v,
        log_decay=torch.full((1, steps, heads), math.log(decay), dtype=torch.float64),
        beta=torch.full((1, steps, heads), beta, dtype=torch.float64),
    )
    start = torch.zeros(1, heads, dv, dk, dtype=torch.float64)
    return _sample(inputs, start, "int16@state", rounding, window, seed, pinned=False)


def _sample(
    inputs: OpInputs,
    start: Tensor,
    format_name: str,
    rounding: str,
    window: int,
    seed: int,
    *,
    pinned: bool,
) -> Sample:
    fmt = parse_format(f"{format_name}-{rounding}")
    policy = Policy(kind="shared", read=fmt, recur=fmt, window=window, records="exact")
    streams = torch.zeros(1, dtype=torch.int64)
    scan = ObservedScan(
        [policy], streams, layer=0, seed=seed, inner=WindowedScan, stride=inputs.steps,
        reference=None,
    )  # fmt: skip
    scan.start(start, inputs)
    scan(inputs)
    deviation, write = scan.deviation(), scan.write_error()
    if pinned:
        deviation, write = deviation[:, :, :-1], write[:, :, :-1]
    return Sample(
        deviation=deviation[0].flatten(1), write=write[0].flatten(1), writes=inputs.steps // window
    )
