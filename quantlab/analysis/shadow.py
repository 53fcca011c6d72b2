"""Exact FP64 recurrences beside a rounded one, and what its gates predict for it.

A shadow is fed the op inputs of the run it follows. A probe follows one rounding error alone: with
nothing written, S' = S·A is what the recurrence does to a deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantlab.recurrence import OpInputs


def in_double(inputs: OpInputs) -> OpInputs:
    """Widen the values; `exact_scan` then computes in FP64, from inputs that are what they were."""
    return replace(inputs, v=inputs.v.double())


def nothing_written(inputs: OpInputs, *, feedback: bool = True) -> OpInputs:
    """Op inputs under which a state is a deviation.

    Args:
        inputs: of the run.
        feedback: whether a delta rule reads the deviation back, as it does. Without it corrections
            are those of the exact state (the oracle), and only the gates act on the deviation.
    """
    return replace(
        inputs, v=torch.zeros_like(inputs.v), beta=inputs.beta if feedback else None, dt=None
    )


@dataclass(slots=True, kw_only=True)
class Gains:
    """What independent errors of past writes add up to under a run's own gates.

    For unit errors at every write: Σ γ² (in mean square) and Σ γ (of a bias), γ the decay from
    after the write to now. [rows, H, 1], or [rows, H, dk] with a decay per key channel.

    Attributes:
        windows: [rows] int64, L of every row.
        position: tokens since the prompt.
        square: Σ γ² of the writes since the last `take`.
        contracted: the same with the mean contraction of a delta rule under isotropic keys.
        linear: Σ γ of these writes.
        decay: log of the gates' product since then.
        contraction: log of the contraction's product since then, of mean squares; ≤ 0.
    """

    windows: Tensor
    position: int
    square: Tensor
    contracted: Tensor
    linear: Tensor
    decay: Tensor
    contraction: Tensor

    @classmethod
    def begin(cls, policies: Sequence[int], streams: int, inputs: OpInputs) -> Gains:
        """Begin after a store at position 0.

        Args:
            policies: windows L.
            streams: rows of each.
            inputs: any of the layer's; shape and device are looked at.
        """
        width = inputs.dk if inputs.per_channel else 1
        shape = (inputs.n_rows, inputs.heads, width)
        zero = torch.zeros(shape, dtype=torch.float64, device=inputs.v.device)
        windows = torch.tensor(policies, device=zero.device).repeat_interleave(streams)
        return cls(
            windows=windows,
            position=0,
            square=zero,
            contracted=zero,
            linear=zero,
            decay=zero,
            contraction=zero,
        )

    def advance(self, inputs: OpInputs) -> None:
        """Take the gates of some steps and count the writes among them."""
        log = inputs.log_decay.double()
        log = log if inputs.per_channel else log.unsqueeze(-1)
        passed = log.cumsum(1)  # [rows, T, H, 1 or dk]
        shrunk = torch.zeros_like(passed)
        if inputs.beta is not None:
            beta = inputs.beta.double()
            factor = torch.log1p(-(beta * (2 - beta)).clamp(max=1.0) / inputs.dk)
            shrunk = shrunk + factor.unsqueeze(-1).cumsum(1)
        steps = self.position + 1 + torch.arange(inputs.steps, device=log.device)
        written = (steps % self.windows[:, None] == 0)[:, :, None, None]
        left = passed[:, -1:] - passed
        pressed = 2 * left + shrunk[:, -1:] - shrunk

        def added(exponent: Tensor) -> Tensor:
            return (exponent.exp() * written).sum(1)

        total, contraction = passed[:, -1], shrunk[:, -1]
        self.square = self.square * (2 * total).exp() + added(2 * left)
        self.contracted = self.contracted * (2 * total + contraction).exp() + added(pressed)
        self.linear = self.linear * total.exp() + added(left)
        self.decay = self.decay + total
        self.contraction = self.contraction + contraction
        self.position += inputs.steps

    def take(self) -> Gains:
        """Return what has gathered, and begin again."""
        taken = replace(self)
        zero = torch.zeros_like(self.decay)
        self.square = self.contracted = self.linear = self.decay = self.contraction = zero
        return taken
