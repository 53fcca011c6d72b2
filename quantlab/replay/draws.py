"""Random words of one store, drawn once for all streams and shared by all policies."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

RECUR, READ = 0, 1  # copy indices in the counter; a shared copy counts as RECUR


@dataclass(slots=True, kw_only=True)
class Draws:
    """Words of one flush, by copy, drawn on first use.

    Attributes:
        seed: 64-bit key.
        layer: recurrent layer's ordinal.
        streams: [n] global stream ids.
        flush: index of the store; 0 is the post-prefill store.
        state_shape: (H, dv, dk).
        device: of the words.
    """

    seed: int
    layer: int
    streams: Tensor
    flush: int
    state_shape: tuple[int, int, int]
    device: torch.device
    _drawn: dict[int, Tensor] = field(default_factory=dict)

    def words(self, copy: int) -> Tensor:
        """Words [n streams, H, dv, dk] for RECUR or READ."""
        if copy not in self._drawn:
            from quantlab.formats.philox import sr_words

            heads, dv, dk = self.state_shape
            self._drawn[copy] = sr_words(
                seed=self.seed,
                layer=self.layer,
                copy=copy,
                stream=self.streams,
                flush=self.flush,
                heads=heads,
                dv=dv,
                dk=dk,
                device=self.device,
            )
        return self._drawn[copy]
