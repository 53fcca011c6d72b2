"""What a watched scan has seen of one layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantlab.analysis.growing import Growing
from quantlab.recurrence import OpInputs

SERIES = {
    "state": "mean square of the stored state's elements",
    "deviation": "mean square of D, stored minus shadow",
    "read_deviation": "mean square of the read copy minus shadow; D where there is one copy",
    "from_reference": "mean square of stored minus the reference run's stored state",
    "write": "mean square of e, the error of the write just made",
    "write_mean": "mean over elements of e, signed",
    "output": "mean square over dv of (stored state) q of the last token",
    "output_error": "mean square over dv of D q of the last token",
    "step_output": "mean square over dv of the shadow's output, mean of the steps since before",
    "step_error": "likewise of the output minus the shadow's: what steps got wrong, copies as read",
    "independent": "mean square of D if errors of writes were independent and only gates acted",
    "contracted": "the same with the mean contraction of a delta rule under isotropic keys",
    "bias_gain": "Σ γ over writes: what a bias of 1 per write would have come to",
    "probe": "mean square of what is left of the post-prefill store's error",
    "oracle": "the same if a delta rule did not read it back",
}


@dataclass(slots=True, kw_only=True)
class Observations:
    """What was seen of one layer; rows are policies × streams.

    Sums are over the observations unless another is said.

    Attributes:
        positions: tokens since the prompt at each observation.
        series: name → [observations, rows, H]; see `SERIES`.
        ranges: name → int64 [observations, rows, 2], of the recurrence and the read copy; see
            `ranges.RANGE_COUNTS`.
        first_error: [rows, H] mean square of the post-prefill store's error.
        write_sum: [rows, H, dv, dk] sum of e, element by element.
        write_square: likewise of e².
        deviation_sum: likewise of D.
        state_by_key: [rows, H, dk] sum of the state's mean square over dv.
        state_by_value: [rows, H, dv] likewise over dk.
        deviation_by_key: [rows, H, dk] as `state_by_key`, of D.
        deviation_by_value: [rows, H, dv] likewise.
        output_error_by_key: [rows, H, dk] as `state_by_key`, of D q channel by channel.
        log_decay: [rows, H] or [rows, H, dk] summed over all steps.
        probe_output: [rows, H] sum over steps of the mean square over dv of the probe's S q.
        oracle_output: the same of the oracle.
        steps: tokens since the prompt.
    """

    positions: list[int] = field(default_factory=list)
    series: dict[str, Growing] = field(default_factory=dict)
    ranges: dict[str, Growing] = field(default_factory=dict)
    first_error: Tensor
    write_sum: Tensor
    write_square: Tensor
    deviation_sum: Tensor
    state_by_key: Tensor
    state_by_value: Tensor
    deviation_by_key: Tensor
    deviation_by_value: Tensor
    output_error_by_key: Tensor
    log_decay: Tensor
    probe_output: Tensor
    oracle_output: Tensor
    steps: int = 0

    @classmethod
    def begin(cls, first_error: Tensor, inputs: OpInputs) -> Observations:
        """Begin after the post-prefill store.

        Args:
            first_error: [rows, H, dv, dk] FP64 of that store.
            inputs: any of the layer's; whether decays are per channel is looked at.
        """
        rows, heads, dv, dk = first_error.shape
        zero = first_error.new_zeros(rows, heads)
        by_key, by_value = zero.new_zeros((rows, heads, dk)), zero.new_zeros((rows, heads, dv))
        full = torch.zeros(first_error.shape, dtype=torch.float32, device=zero.device)
        return cls(
            first_error=first_error.square().mean((-2, -1)),
            write_sum=full,
            write_square=full.clone(),
            deviation_sum=full.clone(),
            state_by_key=by_key,
            state_by_value=by_value,
            deviation_by_key=by_key.clone(),
            deviation_by_value=by_value.clone(),
            output_error_by_key=by_key.clone(),
            log_decay=by_key.clone() if inputs.per_channel else zero.clone(),
            probe_output=zero.clone(),
            oracle_output=zero.clone(),
        )

    def add(self, values: dict[str, Tensor], counts: dict[str, Tensor], position: int) -> None:
        """Append one observation's series and counts."""
        for name in SERIES:
            self.series.setdefault(name, Growing()).append(values[name])
        for name, value in counts.items():
            self.ranges.setdefault(name, Growing()).append(value)
        self.positions.append(position)
