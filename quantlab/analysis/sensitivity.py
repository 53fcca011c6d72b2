"""What a relative output error costs in nats, head by head, from small injections.

For small errors e of the recurrent ops' outputs the divergence of the logits is quadratic,

    KL ≈ ½ Σ_{s,s'} e_sᵀ (J_sᵀ F J_s') e_s',

J the response of the measured logits to an output at step s, through all that follows, and F the
Fisher information of the next-token distribution. Forming it is out of question (every step of
every head), and not needed: errors of different heads are independent, so the cross terms vanish in
the mean and

    KL ≈ Σ_heads κ_h ⟨‖e_h‖²⟩ / ⟨‖o_h‖²⟩,

κ_h the form's mean over errors like those of rounding. Errors count by what they are of the output,
since every family normalises what becomes of it (alone or with the heads of its group) before other
layers see it: once a state has grown fourfold the same error costs a sixteenth. κ_h is measured: a
row of a batch decodes with noise in one head's state and nowhere else, and its KL from the
undisturbed row is divided by the relative mean square output error that the noise made. Noise comes
in the two shapes that policies have:

- *kept*: added to the state at every window, and carried along, as a copy's that is written back;
- *fresh*: seen by the steps of one window and then gone, as a read copy's.

They differ in their course over time, which is what later layers integrate. The op's response is
exact in both; nothing here knows of formats, and no policy is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quantlab.analysis.companions import side_by_side
from quantlab.recurrence import OpInputs, exact_scan
from quantlab.replay import Policy

Shape = Literal["kept", "fresh"]
# RMS of the noise over the RMS of the state's row: far above the noise of FP32 additions (1e-7),
# and far below where KL stops being quadratic. Kept noise adds up over some tens of windows.
AMPLITUDE = {"kept": 0.01, "fresh": 0.03}


@dataclass(frozen=True, slots=True)
class Injection:
    """Where a row's noise goes.

    Attributes:
        layer: ordinal of the recurrent layer.
        head: of that layer.
        shape: "kept" or "fresh".
    """

    layer: int
    head: int
    shape: Shape


class InjectedScan:
    """One layer's exact scan, with noise in one head of some rows; methods are those of a scan.

    Row 0 is undisturbed, row i + 1 has injection i.

    Args:
        policies: only counted; rows = 1 + injections, with one stream.
        streams: [1] ids, unused.
        layer: ordinal of this layer.
        seed: of the noise.
        injections: of all layers.
        window: L, steps between injections.
        first: position from which output errors are gathered.

    Attributes:
        energy: [rows] Σ over gathered steps of ‖o − o*‖² of the disturbed head, o* the output of
            an undisturbed state on the row's own inputs; 0 for rows without noise here.
        size: [rows] likewise Σ ‖o*‖².
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        streams: Tensor,
        *,
        layer: int,
        seed: int,
        injections: Sequence[Injection],
        window: int,
        first: int,
    ) -> None:
        if len(policies) != 1 + len(injections) or streams.numel() != 1:
            raise ValueError("one stream, and a row for every injection after the first")
        self.layer, self.window, self.first = layer, window, first
        device = streams.device
        here = [(i + 1, x) for i, x in enumerate(injections) if x.layer == layer]
        self._rows = torch.tensor([row for row, _ in here], dtype=torch.int64, device=device)
        self._heads = torch.tensor([x.head for _, x in here], dtype=torch.int64, device=device)
        self._kept = torch.tensor([x.shape == "kept" for _, x in here], device=device)
        self._amplitude = torch.tensor([AMPLITUDE[x.shape] for _, x in here], device=device)
        # on the host, so that the noise is the same on every device
        self._generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
        self.diverged_at = torch.full((len(policies),), -1, device=device)
        self.energy = torch.zeros(len(policies), dtype=torch.float64, device=device)
        self.size = torch.zeros_like(self.energy)
        self._state = self._exact = torch.empty(0)
        self.position = 0

    @torch.inference_mode()
    def prefill(self, inputs: OpInputs) -> Tensor:
        """Consume the prompt, nothing injected yet."""
        o, self._state = exact_scan(inputs)
        self._exact = self._state.clone()
        self.position = 0
        return o

    @torch.inference_mode()
    def __call__(self, inputs: OpInputs) -> Tensor:
        """Consume T ≥ 1 tokens; outputs [rows, T, H, dv]."""
        if not len(self._rows):
            o, self._state = exact_scan(inputs, self._state)
            return o
        outputs, begin = [], 0
        while begin < inputs.steps:
            if self.position % self.window == 0:
                self._inject()
            left = self.window - self.position % self.window
            piece = inputs.slice(begin, min(inputs.steps, begin + left))
            (o, exact), (self._state, self._exact) = side_by_side(piece, (self._state, self._exact))
            self._gather(o - exact, exact)
            outputs.append(o)
            begin += piece.steps
            self.position += piece.steps
        return torch.cat(outputs, 1)

    def _inject(self) -> None:
        where = (self._rows, self._heads)
        exact = self._exact[where]  # [n, dv, dk]
        size = exact.square().mean(-1, keepdim=True).sqrt() * self._amplitude[:, None, None]
        drawn = torch.randn(exact.shape, generator=self._generator, dtype=exact.dtype)
        noise = drawn.to(exact.device)
        before = torch.where(self._kept[:, None, None], self._state[where], exact)
        self._state[where] = before + size * noise

    def _gather(self, error: Tensor, right: Tensor) -> None:
        skip = max(0, self.first - 1 - self.position)
        for sums, of in ((self.energy, error), (self.size, right)):
            taken = of[self._rows, skip:, self._heads]  # [n, steps, dv]
            sums[self._rows] += taken.double().square().sum((1, 2))
