"""Proof 1 in FP32: every window restarted from the reference's stored copies.

A free run in FP32 decorrelates under rounding, so each window starts from the copies that the
stepwise cache stored, on the same op inputs. Two orders of the same additions differ by d per
element of the unrounded state; a rounding boundary lies between the two values with probability
d / step, for nearest and for stochastic rounding with the same draw. So the codes that differ
number about Σ d/step, which is computed here from the very states, and no others may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from quantlab.formats import Format, encode, quantize
from quantlab.replay import StepwiseCache, WindowedScan, lane, parse_policy, stepwise, whole
from tests.recurrence.sampling import KINDS, relative, sample_inputs
from tests.replay.decoding import decode

# Unrounded states: two orders of about 16 + log2(dk) FP32 additions on values up to the largest
# element: 20 · 6e-8. The outputs likewise, over dk products.
FP32 = 2e-6


@dataclass
class Casts:
    """States given to a cast and the codes that came of them, in order."""

    states: list[torch.Tensor] = field(default_factory=list)
    codes: list[torch.Tensor] = field(default_factory=list)

    def __call__(
        self, x: torch.Tensor, fmt: Format, words: torch.Tensor | None, *, counts: bool
    ) -> tuple[torch.Tensor, None]:
        self.states.append(x.flatten(0, -4).clone())
        self.codes.append(encode(x, fmt, words).codes.flatten(0, -4).to(torch.int64))
        return quantize(x, fmt, words, counts=False)[0], None


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Casts, Casts]]:
    windowed, reference = Casts(), Casts()
    monkeypatch.setattr(lane, "quantize", windowed)
    monkeypatch.setattr(stepwise, "quantize", reference)
    yield windowed, reference


def expected_flips(a: torch.Tensor, b: torch.Tensor, fmt: Format) -> float:
    """Σ d/step with the steps of the grid at a, from the format's own values."""
    spread = a.abs() * 2.0**-24 + 1e-30  # the width over which the grid is probed
    low, _ = quantize(a, fmt, torch.zeros_like(a, dtype=torch.int64), counts=False)
    up = torch.full_like(a, 2**32 - 1).to(torch.int64)
    high, _ = quantize(a, fmt, up, counts=False)
    step = (high - low).abs()
    known = step > spread
    return float(((a - b).abs()[known] / step[known]).sum())


TEXTS = (
    "shared:nvfp4", "shared:nvfp4-sr", "shared:fp8", "shared:fp16-sr", "nvfp4 / fp16-sr",
    "fp8 / fp8-sr", "shared:fp16-sr corrections=fold",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("records", ["bf16", "fp32"])
@pytest.mark.parametrize("text", TEXTS)
def test_codes_differ_only_at_boundaries(
    kind: str,
    records: str,
    text: str,
    casts: tuple[Casts, Casts],
    record_property: Callable[[str, object], None],
) -> None:
    policy = parse_policy(f"{text} records={records}")
    streams = torch.tensor([0, 1])
    inputs = sample_inputs(kind, steps=8 + 16 * 6, dv=64, dk=128, dtype=torch.float32)
    cache = StepwiseCache([policy], streams, layer=0, seed=1)
    cache.prefill(inputs.slice(0, 8))
    scan = WindowedScan([policy], streams, layer=0, seed=1)
    scan.prefill(inputs.slice(0, 8))
    windowed, reference = casts
    flips = expected = 0.0
    for start in range(8, inputs.steps, 16):
        scan.load_state_dict(_as_windowed(cache, scan))
        piece = inputs.slice(start, start + 16)
        del windowed.states[:], windowed.codes[:], reference.states[:], reference.codes[:]
        o, o_ref = scan(piece), cache(piece)
        formats = [policy.read, policy.recur] if policy.kind == "separate" else [policy.recur]
        for i, fmt in enumerate(formats):
            a, b = windowed.states[i], reference.states[i]
            # a record of u that falls on the other side of a boundary is half an FP16 unit of u
            assert relative(a, b) < (FP32 if policy.corrections == "rederive" else 2e-4)
            flips += float((windowed.codes[i] != reference.codes[i]).sum())
            expected += expected_flips(a, b, _stochastic(fmt))
        apart = (o - o_ref).abs() / o_ref.abs().max()
        if records == "fp32" or kind == "mamba2":
            assert apart.max() < FP32
        else:  # an FP16 record of u may fall on the other side of a boundary: half a unit, 2^-11
            assert apart.max() < 2.0**-11
            assert (apart > FP32).double().mean() < 0.1
    record_property("flips", f"{flips:.0f} counted, {expected:.1f} expected")
    # Poisson: five standard deviations, and a block scale that flips takes up to 32 codes along
    assert flips <= expected + 5 * expected**0.5 + 32


def test_mutant_products_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten fraction bits in a product's operand: caught by the bound on unrounded states.
    run = whole.WholeWindows.run

    def narrow(self, w, recur, read):  # type: ignore[no-untyped-def]
        self.flush_map[w] = self.flush_map[w].half().float()
        return run(self, w, recur, read)

    inputs = sample_inputs("gdn", steps=40, dv=64, dk=128, dtype=torch.float32)
    policies = [parse_policy("shared:fp32")]
    _, cache = decode(StepwiseCache, policies, inputs, [24])
    _, scan = decode(WindowedScan, policies, inputs, [24])
    assert relative(scan.state(), cache.state()) < FP32
    monkeypatch.setattr(whole.WholeWindows, "run", narrow)
    _, scan = decode(WindowedScan, policies, inputs, [24])
    assert relative(scan.state(), cache.state()) > 10 * FP32


def _stochastic(fmt: Format) -> Format:
    return replace(fmt, rounding="sr")


def _as_windowed(cache: StepwiseCache, scan: WindowedScan) -> dict[str, torch.Tensor]:
    """The stepwise cache's copies, in the windowed scan's names."""
    (held,) = cache.caches
    named = scan.state_dict()
    named["0.0.recur"] = held.recur
    if held.read is not None:
        named["0.0.read"] = held.read
    named["0.counters"][2] = held.flush
    return named
