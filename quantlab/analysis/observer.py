"""A scan that is watched: how far its stored states are from exact ones, and why.

`ObservedScan` wraps any scan and gives its outputs unchanged but for the cuts it makes. Beside
it run FP64 recurrences fed the same op inputs:

- the *shadow* from the prompt on: the stored state minus the shadow is the deviation D_t;
- a *restart* from the stored state one write before an observation: the stored state minus the
  restart is that write's own error e, with records rounded in its window counted in;
- the *probe*, which carries the error of the post-prefill store and nothing else; and for delta
  rules the *oracle*, the same without the rule reading the deviation back.

Stored state means the recurrence copy where a policy has two. Observations are made where all
policies have just stored: at multiples of a stride that every window divides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantlab.analysis.growing import Growing
from quantlab.analysis.ranges import RANGE_COUNTS, range_counts
from quantlab.analysis.shadow import Gains, in_double, nothing_written
from quantlab.recurrence import OpInputs, exact_scan
from quantlab.replay import Policy


@dataclass(slots=True, kw_only=True)
class Observations:
    """What was seen of one layer; rows are policies × streams.

    Attributes:
        positions: tokens since the prompt at each observation.
        series: name → [observations, rows, H]; see `SERIES`.
        ranges: name → int64 [observations, rows]; see `ranges.RANGE_COUNTS`.
        write_sum: [rows, H, dv, dk] sum of e over the observations, element by element.
        write_square: likewise of e².
        state_by_key: [rows, H, dk] sum over observations of the state's mean square over dv.
        state_by_value: [rows, H, dv] likewise over dk.
        deviation_by_key: [rows, H, dk] as `state_by_key`, of D.
        log_decay: [rows, H] or [rows, H, dk] summed over all steps.
        probe_output: [rows, H] sum over steps of the mean square over dv of the probe's S q.
        oracle_output: the same of the oracle.
        steps: tokens since the prompt.
    """

    positions: list[int] = field(default_factory=list)
    series: dict[str, Growing] = field(default_factory=dict)
    ranges: dict[str, Growing] = field(default_factory=dict)
    write_sum: Tensor
    write_square: Tensor
    state_by_key: Tensor
    state_by_value: Tensor
    deviation_by_key: Tensor
    log_decay: Tensor
    probe_output: Tensor
    oracle_output: Tensor
    steps: int = 0


SERIES = {
    "state": "mean square of the stored state's elements",
    "deviation": "mean square of D, stored minus shadow",
    "from_reference": "mean square of stored minus the reference run's stored state",
    "write": "mean square of e, the error of the write just made",
    "write_mean": "mean over elements of e, signed",
    "output": "mean square over dv of (stored state) q of the last token",
    "output_error": "mean square over dv of D q of the last token",
    "independent": "mean square of D if errors of writes were independent and only gates acted",
    "contracted": "the same with the mean contraction of a delta rule under isotropic keys",
    "bias_gain": "Σ γ over writes: what a bias of 1 per write would have come to",
    "probe": "mean square of what is left of the post-prefill store's error",
    "oracle": "the same if a delta rule did not read it back",
}


class ObservedScan:
    """A scan and its shadows; constructor and methods are those of a scan, see `observed`."""

    def __init__(
        self,
        policies: Sequence[Policy],
        streams: Tensor,
        *,
        layer: int,
        seed: int,
        inner: Callable[..., Any],
        stride: int,
        reference: int | None = 0,
    ) -> None:
        wrong = [p.short for p in policies if stride % p.window]
        if stride < 1 or wrong:
            raise ValueError(
                f"observations every {stride} tokens: the window of {', '.join(wrong)} does not "
                "divide that"
            )
        self.policies, self.streams = tuple(policies), streams
        self.layer, self.seed = layer, seed
        self.scan = inner(policies, streams, layer=layer, seed=seed)
        self.stride, self.reference = stride, reference
        self.seen: Observations | None = None
        self.position = 0
        self._shadow = self._restart = self._probe = self._oracle = torch.empty(0)
        self._write = torch.empty(0)
        self._energy = self._contracted = self._bias_gain = torch.empty(0)
        self._gains: Gains | None = None

    @property
    def diverged_at(self) -> Tensor:
        """As the scan's own."""
        at: Tensor = self.scan.diverged_at
        return at

    @torch.inference_mode()
    def prefill(self, inputs: OpInputs) -> Tensor:
        """Consume the prompt; the shadow consumes it in FP64."""
        o: Tensor = self.scan.prefill(inputs)
        _, state = exact_scan(in_double(inputs))
        self._begin(state, inputs)
        return o

    @torch.inference_mode()
    def start(self, state: Tensor, inputs: OpInputs) -> None:
        """Begin decoding from an unrounded state [rows, H, dv, dk]."""
        self.scan.start(state, inputs)
        self._begin(state.double(), inputs)

    @torch.inference_mode()
    def __call__(self, inputs: OpInputs) -> Tensor:
        """Consume the next T ≥ 1 tokens; outputs [rows, T, H, dv]."""
        if self.seen is None:
            raise RuntimeError("call prefill (or start) before decoding")
        outputs = []
        begin = 0
        for stop in self._cuts(inputs.steps):
            piece = inputs.slice(begin, stop)
            outputs.append(self.scan(piece))
            self._follow(piece)
            begin = stop
            if self.position % self.stride == 0:
                self._observe(piece)
            self._rewind()
        return torch.cat(outputs, 1)

    def state(self) -> Tensor:
        """Return the scan's current state."""
        state: Tensor = self.scan.state()
        return state

    def deviation(self) -> Tensor:
        """Return D now, [rows, H, dv, dk] FP64: the scan's state minus the shadow."""
        return self.state().double() - self._shadow

    def write_error(self) -> Tensor:
        """Return e of the last observation's write, [rows, H, dv, dk] FP64."""
        return self._write

    def _cuts(self, steps: int) -> list[int]:
        """Offsets, up to `steps`, at which something is looked at."""
        marks = {0, *(-p.window % self.stride for p in self.policies)}
        inside = [i for i in range(1, steps) if (self.position + i) % self.stride in marks]
        return [*inside, steps]

    def _begin(self, state: Tensor, inputs: OpInputs) -> None:
        stored = self.scan.state().double()
        rows, heads, dv, dk = stored.shape
        zero = stored.new_zeros(rows, heads)
        narrow = stored.new_zeros((rows, heads, dk))
        decay = narrow if inputs.per_channel else zero
        full = torch.zeros(stored.shape, dtype=torch.float32, device=stored.device)
        self.seen = Observations(
            write_sum=full,
            write_square=full.clone(),
            state_by_key=narrow.clone(),
            state_by_value=stored.new_zeros((rows, heads, dv)),
            deviation_by_key=narrow.clone(),
            log_decay=decay.clone(),
            probe_output=zero.clone(),
            oracle_output=zero.clone(),
        )
        self.position = 0
        self._shadow = state.clone()
        self._restart = stored.clone()
        self._probe = stored - state
        self._oracle = self._probe.clone()
        self._write = self._probe.clone()
        windows = [p.window for p in self.policies]
        self._gains = Gains.begin(windows, self.streams.numel(), inputs)
        # the post-prefill store is the first write
        self._energy = self._probe.square().mean(-2)
        self._contracted = self._energy.clone()
        self._bias_gain = torch.ones_like(self._gains.decay)

    def _follow(self, piece: OpInputs) -> None:
        """Advance everything that runs beside the scan."""
        seen, gains = self.seen, self._gains
        assert seen is not None and gains is not None
        exact = in_double(piece)
        self._shadow = exact_scan(exact, self._shadow)[1]
        self._restart = exact_scan(exact, self._restart)[1]
        o, self._probe = exact_scan(nothing_written(exact), self._probe)
        seen.probe_output += o.square().mean(-1).sum(1)
        if piece.is_delta:
            o, self._oracle = exact_scan(nothing_written(exact, feedback=False), self._oracle)
            seen.oracle_output += o.square().mean(-1).sum(1)
        gains.advance(piece)
        seen.log_decay += piece.log_decay.double().sum(1)
        seen.steps += piece.steps
        self.position += piece.steps

    def _rewind(self) -> None:
        """Restart from the stored state where the write to be looked at begins."""
        n = self.streams.numel()
        due = [
            p for p, x in enumerate(self.policies) if (self.position + x.window) % self.stride == 0
        ]
        if due:
            stored = self.scan.state()
            for p in due:
                self._restart[p * n : (p + 1) * n] = stored[p * n : (p + 1) * n].double()

    def _observe(self, piece: OpInputs) -> None:
        seen, gains = self.seen, self._gains
        assert seen is not None and gains is not None
        stored = self.scan.state().double()
        deviation = stored - self._shadow
        self._write = write = stored - self._restart
        q = piece.q[:, -1].double().repeat_interleave(piece.heads // piece.q.shape[2], dim=1)
        taken = gains.take()
        error = write.square().mean(-2)  # [rows, H, dk]
        self._energy = self._energy * (2 * taken.decay).exp() + error * taken.square
        kept = (2 * taken.decay + taken.contraction).exp()
        self._contracted = self._contracted * kept + error * taken.contracted
        self._bias_gain = self._bias_gain * taken.decay.exp() + taken.linear
        values = {
            "state": stored.square().mean((-2, -1)),
            "deviation": deviation.square().mean((-2, -1)),
            "from_reference": self._from_reference(stored),
            "write": write.square().mean((-2, -1)),
            "write_mean": write.mean((-2, -1)),
            "output": _read(stored, q),
            "output_error": _read(deviation, q),
            "independent": self._energy.mean(-1),
            "contracted": self._contracted.mean(-1),
            "bias_gain": self._bias_gain.mean(-1),
            "probe": self._probe.square().mean((-2, -1)),
            "oracle": (self._oracle if piece.is_delta else self._probe).square().mean((-2, -1)),
        }
        for name in SERIES:
            seen.series.setdefault(name, Growing()).append(values[name])
        seen.positions.append(self.position)
        seen.write_sum += write.float()
        seen.write_square += write.square().float()
        seen.state_by_key += stored.square().mean(-2)
        seen.state_by_value += stored.square().mean(-1)
        seen.deviation_by_key += deviation.square().mean(-2)
        counts = range_counts(
            self._restart.float(),
            self.policies,
            self.streams,
            seed=self.seed,
            layer=self.layer,
            position=self.position,
        )
        for name in RANGE_COUNTS:
            seen.ranges.setdefault(name, Growing()).append(counts[name])

    def _from_reference(self, stored: Tensor) -> Tensor:
        if self.reference is None:
            return stored.new_full(stored.shape[:2], float("nan"))
        n = self.streams.numel()
        of = stored[self.reference * n : (self.reference + 1) * n]
        return (stored - of.repeat(len(self.policies), 1, 1, 1)).square().mean((-2, -1))


def observed(
    inner: Callable[..., Any], *, stride: int, reference: int | None = 0
) -> tuple[Callable[..., ObservedScan], list[ObservedScan]]:
    """Make a scan constructor whose scans are watched.

    Args:
        inner: constructor of the scans to watch.
        stride: tokens between observations; every policy's window divides it.
        reference: index of the policy that deviations are also measured from, None for none.

    Returns:
        The constructor, which `TeacherForcing` takes as `scan`, and the list that its scans are
        appended to, in the order of layers.
    """
    built: list[ObservedScan] = []

    def build(
        policies: Sequence[Policy], streams: Tensor, *, layer: int, seed: int
    ) -> ObservedScan:
        scan = ObservedScan(
            policies,
            streams,
            layer=layer,
            seed=seed,
            inner=inner,
            stride=stride,
            reference=reference,
        )
        built.append(scan)
        return scan

    build.__name__ = f"Observed{inner.__name__}"
    return build, built


def _read(state: Tensor, q: Tensor) -> Tensor:
    """Mean square over dv of S q: [rows, H]."""
    return torch.matmul(state, q.unsqueeze(-1)).squeeze(-1).square().mean(-1)
