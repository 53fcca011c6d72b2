"""Decays inside one window: always as sums and differences of logs, never as products.

Logs are cumulated and subtracted in FP64 and narrowed before the exponential: after a strong gate
(log decay −300) an FP32 sum has lost the fifth digit of every later decay. Narrowing a difference
x ≤ 0 changes exp(x) by at most |x|·exp(x) ≤ 0.4 units of FP32's last place of 1.
All exponents taken are ≤ 0, so nothing overflows: k/γ, which factors the products in a single
matrix product, would for a window that decays by more than e^88.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.recurrence.gates import MIN_LOG_DECAY


@dataclass(frozen=True, slots=True)
class WindowDecays:
    """Decays between the steps 1 … n of a window, for any leading axes.

    Attributes:
        log: [..., n, 1] or [..., n, dk] FP64, Σ_{i ≤ s} of the log decays: from before step 1
            (which is the checkpoint) to after step s.
    """

    log: Tensor

    @classmethod
    def of(cls, log_decay: Tensor, *, per_channel: bool) -> WindowDecays:
        """Cumulate [..., n] (per head) or [..., n, dk] (per channel) log decays."""
        log = log_decay if per_channel else log_decay.unsqueeze(-1)
        return cls(log.double().clamp(min=MIN_LOG_DECAY).cumsum(-2))

    @property
    def per_channel(self) -> bool:
        """Whether key channels decay on their own."""
        return self.log.shape[-1] > 1

    def start_factors(self, dtype: torch.dtype) -> Tensor:
        """Form γ_{1:s}, the checkpoint's decay until step s: [..., n, 1 or dk]."""
        return torch.exp(self.log.to(dtype))

    def end_factors(self, dtype: torch.dtype) -> Tensor:
        """Form γ_{j+1:n}, the decay of step j's write until the end: [..., n, 1 or dk]."""
        return torch.exp((self.log[..., -1:, :] - self.log).to(dtype))

    def total(self, dtype: torch.dtype) -> Tensor:
        """Form γ_{1:n}, [..., 1, 1] or [..., 1, dk]."""
        return torch.exp(self.log[..., -1:, :].to(dtype))

    def products(self, k: Tensor, *others: Tensor) -> list[Tensor]:
        """Form P_sj = Σ_c x_sc γ_{j+1:s,c} k_jc for j ≤ s, else 0, for each x in others.

        Args:
            k: [..., n, dk] keys, written at step j.
            others: [..., n, dk] each, keys or queries that meet them at step s.

        Returns:
            [..., n, n] each, lower triangular with the diagonal.
        """
        if not self.per_channel:
            log = self.log.squeeze(-1)
            ones = torch.ones(k.shape[-2], k.shape[-2], dtype=torch.bool, device=k.device)
            gap = log.unsqueeze(-1) - log.unsqueeze(-2)
            # Masked before the exponential: above the diagonal it may overflow.
            decay = torch.exp(gap.to(k.dtype).masked_fill_(ones.triu(1), -torch.inf))
            return [torch.matmul(x, k.mT) * decay for x in others]
        outs = [x.new_zeros((*x.shape[:-1], k.shape[-2])) for x in others]
        self._fill(k, others, outs, 0, k.shape[-2])
        return outs

    def _fill(
        self, k: Tensor, others: tuple[Tensor, ...], outs: list[Tensor], a: int, b: int
    ) -> None:
        """Fill in the products among steps a … b − 1 by halving.

        For j < m ≤ s, γ_{j+1:s} = γ_{j+1:m} γ_{m+1:s}, both ≤ 1: each half is scaled by its own
        factor and one matrix product joins them. Pairwise differences throughout would take n
        times the exponentials.
        """
        if b - a == 1:
            for x, out in zip(others, outs, strict=True):
                out[..., a, a] = (x[..., a, :] * k[..., a, :]).sum(-1)
            return
        m = (a + b) // 2
        middle = self.log[..., m - 1 : m, :]
        early = k[..., a:m, :] * torch.exp((middle - self.log[..., a:m, :]).to(k.dtype))
        late = torch.exp((self.log[..., m:b, :] - middle).to(k.dtype))
        for x, out in zip(others, outs, strict=True):
            out[..., m:b, a:m] = torch.matmul(x[..., m:b, :] * late, early.mT)
        self._fill(k, others, outs, a, m)
        self._fill(k, others, outs, m, b)
