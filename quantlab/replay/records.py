"""What a window remembers of its tokens, and in which types.

A record is rounded when it is appended. A token's own step uses its unrounded values, later steps
use the record, and the L-th token of a window is folded at once and never recorded.

- Mamba-2: x and B in the activations' type, Δ in FP32 (the value Δ·x is formed in FP32).
- Delta rules: k after its L2 norm and v in the activations' type, u in FP16 when activations are
  16-bit, else FP32; β and the decays in FP32, as they are given.

With FP32 activations records are FP32: BF16 records would set a floor above FP16-SR's own effect.
Source: arXiv 2610.13778, algorithms 1, 2 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.recurrence import OpInputs
from quantlab.replay.policy import Records

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTypes:
    """Types of a window's records; None where rounding would change nothing.

    Attributes:
        k: keys (Mamba-2: B).
        v: values (Mamba-2: x).
        u: corrections; None without a delta rule.
    """

    k: torch.dtype | None
    v: torch.dtype | None
    u: torch.dtype | None

    @property
    def exact(self) -> bool:
        """Whether every record equals the value it records."""
        return self.k is None and self.v is None and self.u is None

    @classmethod
    def of(cls, records: Records, inputs: OpInputs) -> RecordTypes:
        """Types for one layer's inputs.

        Args:
            records: of the policy.
            inputs: dtypes, activation_dtype and whether there is a delta rule are looked at.
        """
        working = inputs.compute_dtype
        if records == "exact":
            return cls(k=None, v=None, u=None)
        if records == "auto":
            activations = inputs.activation_dtype
        else:
            activations = torch.bfloat16 if records == "bf16" else torch.float32
        corrections = torch.float16 if activations in _SIXTEEN_BIT else activations

        def unless_same(record: torch.dtype, given: torch.dtype) -> torch.dtype | None:
            wide = record == torch.float32 and working == torch.float32
            return None if record in (given, working) or wide else record

        return cls(
            k=unless_same(activations, inputs.k.dtype),
            v=unless_same(activations, inputs.v.dtype),
            u=unless_same(corrections, working) if inputs.is_delta else None,
        )


def rounded(x: Tensor, record: torch.dtype | None) -> Tensor:
    """Round to a record's type and widen again; beyond FP16's range this is infinite."""
    return x if record is None else x.to(record).to(x.dtype)


@dataclass(slots=True, kw_only=True)
class OpenWindow:
    """Records of the h < L tokens of a window that is not flushed yet, heads beside rows.

    Attributes:
        k: [B, h, dk].
        v: [B, h, dv] values as recorded: what corrections are derived from again at a flush;
            without a delta rule equal to u.
        u: [B, h, dv] what is written: corrections, or Δ·x.
        log_decay: [B, h] or [B, h, dk].
        beta: [B, h], or None without a delta rule.
    """

    k: Tensor
    v: Tensor
    u: Tensor
    log_decay: Tensor
    beta: Tensor | None

    @property
    def count(self) -> int:
        """Records, h."""
        return self.k.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Fields by name, without absent ones."""
        named = {
            "k": self.k,
            "v": self.v,
            "u": self.u,
            "log_decay": self.log_decay,
            "beta": self.beta,
        }
        return {name: x for name, x in named.items() if x is not None}
