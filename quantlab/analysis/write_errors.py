"""What one write of each policy gets wrong, measured on the op inputs of a calibration text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quantlab.analysis.shadow import in_double
from quantlab.recurrence import OpInputs, exact_scan
from quantlab.replay import Policy

# Steps between the writes that are looked at, where windows allow it; less where that would leave
# fewer than so many writes.
STRIDE, WRITES = 64, 16
# Least growth of a state, in mean square.
NOTHING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteErrors:
    """Errors of one layer's writes; means over writes and value rows.

    Attributes:
        variance: [policies, H, dk] of the recurrence or only copy: mean square of what differs
            from write to write, by key channel. Writes are taken as independent of each other.
        bias: [policies, H, dk, dk] products of the elements' mean errors, or None where no policy
            has any: rounding to nearest repeats its errors in a state that hardly moves;
            stochastic rounding has none by construction.
        fresh: [policies, H, dk] mean square error of the read copy's own cast; 0 with one copy.
        step_error: [policies, H] mean square over dv of the outputs' errors over all steps: what
            the prediction is to come to on the calibration text itself.
        step_output: [policies, H] mean square over dv of the outputs.
        states: [looks, H] mean square of the exact state's elements, after every `stride` steps
            from 0 on; writes are looked at in all but the first of these places.
        stride: steps between two looks.
        dv: value rows.
        steps: decoded.
    """

    variance: Tensor
    bias: Tensor | None
    fresh: Tensor
    step_error: Tensor
    step_output: Tensor
    states: Tensor
    stride: int
    dv: int
    steps: int

    def growth(self, stores: int, *, window: int) -> Tensor:
        """Mean square of the state over that of the looked-at writes, at every store.

        Between looks it is interpolated; after the last it stays, since nothing is known of it.

        Args:
            stores: from the one after the prompt on.
            window: L, steps between two of them.

        Returns:
            [stores, H].
        """
        at = torch.arange(stores, device=self.states.device) * (window / self.stride)
        at = at.clamp(max=len(self.states) - 1).to(self.states.dtype)
        before = at.long()
        part = (at - before)[:, None]
        after = (before + 1).clamp(max=len(self.states) - 1)
        found = self.states[before] * (1 - part) + self.states[after] * part
        mean = self.states[1:].mean(0)
        # of a state that was nothing yet, errors are nothing, but ratios of them are taken
        return (found / mean).clamp(min=NOTHING)

    def relative(self) -> Tensor:
        """Mean square error of one write over that of the state, of what most steps read."""
        own = self.variance.mean(-1)
        if self.bias is not None:
            own = own + self.bias.diagonal(dim1=-2, dim2=-1).mean(-1)
        fresh = self.fresh.mean(-1)
        return torch.where(fresh > 0, fresh, own) / self.states[1:].mean(0)

    def of(self, policies: Sequence[int]) -> WriteErrors:
        """Return those of some policies, by index."""
        chosen = list(policies)
        return replace(
            self,
            variance=self.variance[chosen],
            bias=None if self.bias is None else self.bias[chosen],
            fresh=self.fresh[chosen],
            step_error=self.step_error[chosen],
            step_output=self.step_output[chosen],
        )


@torch.inference_mode()
def write_errors(
    state: Tensor,
    inputs: OpInputs,
    policies: Sequence[Policy],
    *,
    layer: int,
    seed: int,
    scan: Callable[..., Any],
) -> WriteErrors:
    """Decode with every policy on recorded inputs, and look at a write every so many steps.

    A write's error is what was stored minus the exact course, in FP64, from what was stored a
    window before; records rounded in the window count in.

    Args:
        state: [1, H, dv, dk] after the prompt, unrounded.
        inputs: one row, the steps after the prompt.
        policies: of any windows.
        layer: ordinal, keys draws.
        seed: likewise.
        scan: constructor of the scan.

    Raises:
        ValueError: fewer than two writes would be looked at.
    """
    stride = math.lcm(*(p.window for p in policies))
    stride *= max(1, min(STRIDE, inputs.steps // WRITES) // stride)
    count = inputs.steps // stride
    if count < 2:
        raise ValueError(f"{inputs.steps} steps: writes are looked at every {stride}, need two")
    device = inputs.v.device
    rows = torch.zeros(len(policies), dtype=torch.int64, device=device)
    decoding = scan(policies, torch.zeros_like(rows[:1]), layer=layer, seed=seed)
    decoding.start(state[rows], inputs.rows(rows))
    exact, sums = state.double(), _Sums.zeros(len(policies), exact_shape=state.shape, device=device)
    states = [_mean_square(exact)]
    windows = {
        window: torch.tensor([p for p, x in enumerate(policies) if x.window == window]).to(device)
        for window in {p.window for p in policies}
    }
    cuts = sorted({stride - p.window for p in policies} | {0, stride})
    for begin in range(0, count * stride, stride):
        before: dict[int, Tensor] = {}
        for start, stop in pairwise(cuts):
            before[stride - start] = decoding.copies()[0]
            piece = inputs.slice(begin + start, begin + stop)
            o = decoding(piece.rows(rows))
            right, exact = exact_scan(in_double(piece), exact)
            sums.outputs(o - right, right)
        recur, read = (x.double() for x in decoding.copies())
        unrounded = torch.empty_like(recur)
        for window, chosen in windows.items():
            last = inputs.slice(begin + stride - window, begin + stride)
            unrounded[chosen] = _courses(before[window][chosen].double(), last)
        sums.writes(recur - unrounded, read - unrounded)
        states.append(_mean_square(exact))
    return sums.errors(policies, torch.stack(states), stride)


def _mean_square(state: Tensor) -> Tensor:
    return state[0].square().mean((-2, -1))


def _courses(states: Tensor, inputs: OpInputs) -> Tensor:
    """Exact final states from [n, H, dv, dk], all on the same one row of inputs."""
    n, heads, dv, dk = states.shape
    exact = in_double(inputs)
    together = states.transpose(0, 1).reshape(1, heads, n * dv, dk)
    v = exact.v.repeat(1, 1, 1, n)
    after = exact_scan(replace(exact, v=v), together)[1]
    return after.view(heads, n, dv, dk).transpose(0, 1)


@dataclass(slots=True, kw_only=True)
class _Sums:
    """Sums over writes, of all policies."""

    error: Tensor  # [P, H, dv, dk]
    square: Tensor  # [P, H, dv, dk]
    fresh: Tensor  # [P, H, dk], mean over dv
    step_error: Tensor  # [P, H], mean over dv, sum over steps
    step_output: Tensor  # [1, H]

    @classmethod
    def zeros(cls, policies: int, *, exact_shape: Sequence[int], device: torch.device) -> _Sums:
        _, heads, dv, dk = exact_shape

        def zero(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(
            error=zero(policies, heads, dv, dk),
            square=zero(policies, heads, dv, dk),
            fresh=zero(policies, heads, dk),
            step_error=zero(policies, heads),
            step_output=zero(1, heads),
        )

    def outputs(self, error: Tensor, right: Tensor) -> None:
        self.step_error += error.square().mean(-1).sum(1)
        self.step_output += right.square().mean(-1).sum(1)

    def writes(self, error: Tensor, fresh: Tensor) -> None:
        self.error += error
        self.square += error.square()
        self.fresh += fresh.square().mean(-2)

    def errors(self, policies: Sequence[Policy], states: Tensor, stride: int) -> WriteErrors:
        device, count = self.error.device, len(states) - 1
        steps = count * stride
        mean, square = self.error / count, self.square / count
        spread = (square - mean.square()).clamp(min=0).mean(-2) * count / (count - 1)
        nearest = [p.recur.rounding == "rtn" and not p.recur.is_exact for p in policies]
        biased = torch.tensor(nearest).to(device)[:, None, None]
        bias = None
        if any(nearest):
            # of the products of means of few writes, what chance alone makes is taken off
            product = mean.mT @ mean / mean.shape[-2] - torch.diag_embed(spread / count)
            bias = torch.where(biased[..., None], product, torch.zeros_like(product))
        separate = torch.tensor([p.kind == "separate" for p in policies]).to(device)
        return WriteErrors(
            variance=torch.where(biased, spread, square.mean(-2)),
            bias=bias,
            fresh=self.fresh / count * separate[:, None, None],
            step_error=self.step_error / steps,
            step_output=(self.step_output / steps).expand_as(self.step_error),
            states=states,
            stride=stride,
            dv=self.error.shape[-2],
            steps=steps,
        )
