"""A scan that is watched: how far its stored states are from exact ones, and why.

`ObservedScan` wraps any scan and gives its outputs unchanged but for the cuts it makes. Beside
it run FP64 recurrences fed the same op inputs (`companions`):

- the *shadow* from the prompt on: the stored state minus the shadow is the deviation D_t;
- a *restart* from the stored state one write before an observation: the stored state minus the
  restart is that write's own error e, with records rounded in its window counted in;
- the *probe*, which carries the error of the post-prefill store and nothing else; and for delta
  rules the *oracle*, the same without the rule reading the deviation back.

Stored state means the recurrence copy where a policy has two; the read copy is compared with the
same shadow. Observations are made where all policies have just stored: at multiples of a stride
that every window divides. Nothing here waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quantlab.analysis.companions import Companions
from quantlab.analysis.observations import Observations
from quantlab.analysis.ranges import range_counts
from quantlab.analysis.shadow import Gains, in_double
from quantlab.recurrence import OpInputs, exact_scan
from quantlab.replay import Policy


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
        self._beside: Companions | None = None
        self._gains: Gains | None = None
        self._write = torch.empty(0)
        self._energy = self._contracted = self._bias_gain = torch.empty(0)
        self._step_output = self._step_error = torch.empty(0)

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
            self._follow(piece, outputs[-1])
            begin = stop
            if self.position % self.stride == 0:
                self._observe(piece)
            self._rewind()
        return torch.cat(outputs, 1)

    def state(self) -> Tensor:
        """Return the scan's current state."""
        state: Tensor = self.scan.state()
        return state

    def copies(self) -> tuple[Tensor, Tensor]:
        """Return the scan's stored copies."""
        copies: tuple[Tensor, Tensor] = self.scan.copies()
        return copies

    def deviation(self) -> Tensor:
        """Return D now, [rows, H, dv, dk] FP64: the scan's state minus the shadow."""
        return self.state().double() - self._companions.shadow

    def write_error(self) -> Tensor:
        """Return e of the last observation's write, [rows, H, dv, dk] FP64."""
        return self._write

    @property
    def _companions(self) -> Companions:
        assert self._beside is not None
        return self._beside

    def _cuts(self, steps: int) -> list[int]:
        """Offsets, up to `steps`, at which something is looked at."""
        marks = {0, *(-p.window % self.stride for p in self.policies)}
        inside = [i for i in range(1, steps) if (self.position + i) % self.stride in marks]
        return [*inside, steps]

    def _begin(self, state: Tensor, inputs: OpInputs) -> None:
        stored = self.scan.copies()[0].double()
        self.position = 0
        self._beside = Companions(state, stored)
        self._write = stored - state  # the post-prefill store is the first write
        self.seen = Observations.begin(self._write, inputs)
        windows = [p.window for p in self.policies]
        self._gains = Gains.begin(windows, self.streams.numel(), inputs)
        self._energy = self._write.square().mean(-2)
        self._contracted = self._energy.clone()
        self._bias_gain = torch.ones_like(self._gains.decay)
        self._step_output = torch.zeros_like(self.seen.probe_output)
        self._step_error = self._step_output.clone()

    def _follow(self, piece: OpInputs, o: Tensor) -> None:
        """Advance everything that runs beside the scan, whose outputs were o."""
        seen, gains = self.seen, self._gains
        assert seen is not None and gains is not None
        exact, probe, oracle = self._companions.advance(piece)
        self._step_output += exact.square().mean(-1).sum(1)
        self._step_error += (o - exact).square().mean(-1).sum(1)
        seen.probe_output += probe.square().mean(-1).sum(1)
        if piece.is_delta:
            seen.oracle_output += oracle.square().mean(-1).sum(1)
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
            stored, _ = self.scan.copies()
            for p in due:
                rows = slice(p * n, (p + 1) * n)
                self._companions.restart_from(stored[rows], rows)

    def _observe(self, piece: OpInputs) -> None:
        seen, gains, beside = self.seen, self._gains, self._companions
        assert seen is not None and gains is not None
        recur, read = self.scan.copies()
        stored, shadow = recur.double(), beside.shadow
        deviation = stored - shadow
        self._write = write = stored - beside.restart
        q = piece.q[:, -1].double().repeat_interleave(piece.heads // piece.q.shape[2], dim=1)
        taken = gains.take()
        error = write.square().mean(-2)  # [rows, H, dk]
        self._energy = self._energy * (2 * taken.decay).exp() + error * taken.square
        kept = (2 * taken.decay + taken.contraction).exp()
        self._contracted = self._contracted * kept + error * taken.contracted
        self._bias_gain = self._bias_gain * taken.decay.exp() + taken.linear
        off_by_key = deviation.square().mean(-2)
        values = {
            "state": stored.square().mean((-2, -1)),
            "deviation": off_by_key.mean(-1),
            "read_deviation": (read.double() - shadow).square().mean((-2, -1)),
            "from_reference": self._from_reference(stored),
            "write": error.mean(-1),
            "write_mean": write.mean((-2, -1)),
            "output": _read(stored, q),
            "output_error": _read(deviation, q),
            "step_output": self._step_output / self.stride,
            "step_error": self._step_error / self.stride,
            "independent": self._energy.mean(-1),
            "contracted": self._contracted.mean(-1),
            "bias_gain": self._bias_gain.mean(-1),
            "probe": beside.probe.square().mean((-2, -1)),
            "oracle": beside.oracle.square().mean((-2, -1)),
        }
        self._step_output = torch.zeros_like(self._step_output)
        self._step_error = torch.zeros_like(self._step_error)
        seen.write_sum += write.float()
        seen.write_square += write.square().float()
        seen.deviation_sum += deviation.float()
        seen.state_by_key += stored.square().mean(-2)
        seen.state_by_value += stored.square().mean(-1)
        seen.deviation_by_key += off_by_key
        seen.deviation_by_value += deviation.square().mean(-1)
        seen.output_error_by_key += off_by_key * q.square()
        counts = range_counts(
            beside.restart.float(),
            self.policies,
            self.streams,
            seed=self.seed,
            layer=self.layer,
            position=self.position,
        )
        seen.add(values, counts, self.position)

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
