"""How long a training run is, and what its progress in [0, 1] decides: length and rates."""

from __future__ import annotations

from dataclasses import dataclass

from quantlab.models.zoo.recipe import Phase, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long to train: exactly one of the two, for this call.

    Args:
        seconds: wall clock from the call to the end of its last step, compilation included.
        tokens: training tokens.
    """

    seconds: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        """Check that one is given."""
        if (self.seconds is None) == (self.tokens is None):
            raise ValueError("give exactly one of seconds and tokens")


def phase_at(hyper: Training, progress: float) -> Phase:
    """Pick the phase at a progress in [0, 1]."""
    for phase in hyper.phases:
        progress -= phase.share
        if progress < 0:
            return phase
    return hyper.phases[-1]


def rate_at(hyper: Training, progress: float, step: int) -> float:
    """Share of the recipe's rates: linear warm-up over steps, flat, linear decay over progress."""
    warm = min(1.0, (step + 1) / hyper.warmup_steps)
    left = max(0.0, 1.0 - progress) / hyper.decay_share
    return warm * (hyper.final_lr + (1.0 - hyper.final_lr) * min(1.0, left))
