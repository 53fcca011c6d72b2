"""What a recurrent layer feeds its recurrence: one canonical layout for every model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OpInputs:
    """One layer's op inputs over T steps; adapters bring every family into this form.

    rows are independent sequences (in a study: policies × streams), H value heads, Hq query and
    key heads. Hq divides H and value head h uses query and key head h // (H / Hq), which is
    `repeat_interleave`, not tiling.

    Attributes:
        q: [rows, T, Hq, dk] query. Delta rules: L2-normalised and scaled by dk**-0.5 already,
            FP32. Mamba-2: C.
        k: [rows, T, Hq, dk] key. Delta rules: L2-normalised, FP32. Mamba-2: B.
        v: [rows, T, H, dv] value, activation dtype or FP32. Mamba-2: x, before Δ.
        log_decay: [rows, T, H], or [rows, T, H, dk] for a decay per key channel; natural
            logarithm, FP32, ≤ 0.
        beta: [rows, T, H] write strength, FP32. Present exactly for delta rules.
        dt: [rows, T, H] Mamba-2's Δ, FP32: the value written is Δ·v, formed in FP32.
        activation_dtype: dtype of the model's activations; decides the record dtypes of a policy
            with records="auto".

    Raises:
        ValueError: shapes that do not fit each other, or both beta and dt.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None = None
    dt: Tensor | None = None
    activation_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        rows, steps, heads = self.v.shape[:3]
        if self.q.shape != self.k.shape or self.q.ndim != 4 or self.v.ndim != 4:
            raise ValueError(
                f"q, k and v are [rows, T, heads, width], q and k alike; got q {_shape(self.q)}, "
                f"k {_shape(self.k)}, v {_shape(self.v)}"
            )
        if self.q.shape[:2] != (rows, steps) or steps == 0 or heads % self.q.shape[2]:
            raise ValueError(
                f"q and v need the same rows and T ≥ 1, and key heads that divide the value "
                f"heads; got q {_shape(self.q)}, v {_shape(self.v)}"
            )
        per_head = (rows, steps, heads)
        if self.log_decay.shape not in (per_head, (*per_head, self.dk)):
            raise ValueError(
                f"log_decay is {per_head} or {(*per_head, self.dk)}, got {_shape(self.log_decay)}"
            )
        if self.beta is not None and self.dt is not None:
            raise ValueError("beta belongs to delta rules, dt to Mamba-2: give one of them")
        for name in ("beta", "dt"):
            value = getattr(self, name)
            if value is not None and value.shape != per_head:
                raise ValueError(f"{name} is {per_head}, got {_shape(value)}")

    @property
    def n_rows(self) -> int:
        """Independent sequences."""
        return self.v.shape[0]

    @property
    def steps(self) -> int:
        """Tokens, T."""
        return self.v.shape[1]

    @property
    def heads(self) -> int:
        """Value heads, H."""
        return self.v.shape[2]

    @property
    def dv(self) -> int:
        """Value width: rows of a head's state."""
        return self.v.shape[3]

    @property
    def dk(self) -> int:
        """Key width: columns of a head's state."""
        return self.k.shape[3]

    @property
    def is_delta(self) -> bool:
        """Whether a delta rule turns values into corrections."""
        return self.beta is not None

    @property
    def per_channel(self) -> bool:
        """Whether each key channel decays on its own."""
        return self.log_decay.ndim == 4

    @property
    def compute_dtype(self) -> torch.dtype:
        """FP64 when any of q, k, v, log_decay is, else FP32, whatever the activations are."""
        values = (self.q, self.k, self.v, self.log_decay)
        return torch.float64 if any(x.dtype == torch.float64 for x in values) else torch.float32

    def rows(self, select: slice | Tensor) -> OpInputs:
        """Take some of the rows: views for a slice, copies for an index."""
        return self._map(lambda x: x[select])

    def slice(self, start: int, stop: int) -> OpInputs:
        """Take steps start … stop − 1, as views."""
        return self._map(lambda x: x[:, start:stop])

    def _map(self, take: Callable[[Tensor], Tensor]) -> OpInputs:
        return replace(
            self,
            q=take(self.q),
            k=take(self.k),
            v=take(self.v),
            log_decay=take(self.log_decay),
            beta=None if self.beta is None else take(self.beta),
            dt=None if self.dt is None else take(self.dt),
        )


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
