"""Error of a stored state under decay against its closed forms (F03, F07; App. C.6).

x' = a·x + u with x rounded to integers at each store. A store's error e has variance 1/12 (to
nearest) or 1/6 (stochastic), and right after a store the deviation Σ a^(L·i) e has variance
var(e) / (1 − a^(2L)).
"""

from __future__ import annotations

import math
from itertools import count

import pytest
import torch

from quantlab.recurrence import OpInputs
from quantlab.replay import WindowedScan, lane, parse_policy

A = 0.99
HEADS = 4000
STEPS = 480  # a^(2·480) = 6e-5: the variance has reached its limit


def rms(window: int, stochastic: bool, monkeypatch: pytest.MonkeyPatch) -> float:
    """RMS deviation right after the last store, from a run without rounding."""
    seeds = count()

    def to_integers(x, fmt, words, *, counts):  # type: ignore[no-untyped-def]
        if not stochastic:
            return x.round(), None
        g = torch.Generator().manual_seed(next(seeds))
        return (x + torch.rand(x.shape, generator=g, dtype=x.dtype)).floor(), None

    monkeypatch.setattr(lane, "quantize", to_integers)
    g = torch.Generator().manual_seed(0)
    ones = torch.ones(1, STEPS, 1, 1, dtype=torch.float64)
    u = 50**0.5 * torch.randn(1, STEPS, HEADS, 1, generator=g, dtype=torch.float64)
    inputs = OpInputs(
        q=ones,
        k=ones,
        v=u,
        log_decay=torch.full((1, STEPS, HEADS), math.log(A), dtype=torch.float64),
    )
    states = []
    for text in (f"shared:fp32 L={window} records=exact", "shared:fp64 records=exact"):
        scan = WindowedScan([parse_policy(text)], torch.tensor([0]), layer=0, seed=0)
        scan.start(torch.zeros(1, HEADS, 1, 1, dtype=torch.float64), inputs)
        scan(inputs)
        states.append(scan.state())
    return float((states[0] - states[1]).square().mean().sqrt())


# The sample of 4,000 heads has a relative standard error of 1/√(2·4000) = 1.1 %; four of them.
@pytest.mark.parametrize(
    ("window", "stochastic", "published"),
    [(1, False, 2.05), (1, True, 2.89), (16, False, 0.550), (16, True, 0.778)],
)
def test_F07_rms_by_window(
    window: int, stochastic: bool, published: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    variance = 1 / 6 if stochastic else 1 / 12
    predicted = math.sqrt(variance / (1 - A ** (2 * window)))
    assert predicted == pytest.approx(published, rel=0.003)
    assert rms(window, stochastic, monkeypatch) == pytest.approx(predicted, rel=0.045)


def test_F04_rounded_once_decays_rounded_every_window_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = {}
    for once in (True, False):
        stores = count()

        def to_integers(x, fmt, words, *, counts, once=once, stores=stores):  # type: ignore[no-untyped-def]
            return (x if once and next(stores) else x.round()), None

        monkeypatch.setattr(lane, "quantize", to_integers)
        g = torch.Generator().manual_seed(0)
        ones = torch.ones(1, STEPS, 1, 1, dtype=torch.float64)
        u = 50**0.5 * torch.randn(1, STEPS, 1000, 1, generator=g, dtype=torch.float64)
        decay = torch.full((1, STEPS, 1000), math.log(A), dtype=torch.float64)
        inputs = OpInputs(q=ones, k=ones, v=u, log_decay=decay)
        start = torch.rand(1, 1000, 1, 1, generator=g, dtype=torch.float64) * 100
        outputs = []
        for fmt in ("fp32", "fp64"):
            policy = parse_policy(f"shared:{fmt} records=exact")
            scan = WindowedScan([policy], torch.tensor([0]), layer=0, seed=0)
            scan.start(start, inputs)
            outputs.append(scan(inputs))
        errors[once] = (outputs[0] - outputs[1]).square().mean((0, 2, 3)).sqrt()
    decayed = errors[True][0] * A ** torch.arange(STEPS, dtype=torch.float64)
    assert torch.allclose(errors[True], decayed, rtol=1e-6)
    assert errors[False][-16:].mean() > 0.9 * errors[False][:16].mean()
