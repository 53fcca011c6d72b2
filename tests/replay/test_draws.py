"""Proof 6: a random draw depends on what is stored, not on how the work was cut.

Checked on the words that reach the casts, for both engines, and on the stored states in FP64,
where the order of additions is far below any rounding boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from quantlab.formats import Format, quantize
from quantlab.formats.philox import sr_words
from quantlab.replay import Policy, StepwiseCache, WindowedScan, lane, parse_policy, stepwise
from tests.recurrence.sampling import sample_inputs
from tests.replay.decoding import Engine, decode, for_policies

ENGINES = [WindowedScan, StepwiseCache]
POLICIES = [parse_policy("shared:nvfp4-sr"), parse_policy("fp8-sr / fp16-sr")]


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Words of every stochastic cast, in order."""
    seen: list[torch.Tensor] = []

    def recording(
        x: torch.Tensor, fmt: Format, words: torch.Tensor | None, *, counts: bool
    ) -> tuple[torch.Tensor, None]:
        if words is not None:
            seen.append(words.clone())
        return quantize(x, fmt, words, counts=False)[0], None

    monkeypatch.setattr(lane, "quantize", recording)
    monkeypatch.setattr(stepwise, "quantize", recording)
    return seen


def drawn(
    seen: list[torch.Tensor], engine: type[Engine], policies: Sequence[Policy], prompt: int,
    cuts: Sequence[int] = (), streams: Sequence[int] = (3, 8), tokens: int = 70,
) -> list[torch.Tensor]:  # fmt: skip
    del seen[:]
    inputs = sample_inputs("gdn", rows=len(streams), steps=prompt + tokens)
    decode(
        engine, policies, for_policies(inputs, len(policies)),
        [prompt, *(prompt + c for c in cuts)], streams=torch.tensor(streams),
    )  # fmt: skip
    return list(seen)


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_words_are_those_of_the_counter(engine: type[Engine], words: list[torch.Tensor]) -> None:
    separate = POLICIES[1]
    got = drawn(words, engine, [separate], 5)
    assert len(got) == 2 * (1 + 70 // 16)
    for i, found in enumerate(got):
        expected = sr_words(
            seed=7, layer=2, copy=1 - i % 2, stream=torch.tensor([3, 8]), flush=i // 2,
            heads=4, dv=8, dk=16,
        )  # fmt: skip
        assert torch.equal(found.view_as(expected), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_prompt_length_does_not_matter(engine: type[Engine], words: list[torch.Tensor]) -> None:
    assert equal(drawn(words, engine, POLICIES, 509), drawn(words, engine, POLICIES, 512))


def test_segments_do_not_matter(words: list[torch.Tensor]) -> None:
    whole = drawn(words, WindowedScan, [POLICIES[1]], 9)
    for cuts in ((1, 2, 3), (15, 16, 17, 48), (16, 32)):
        assert equal(whole, drawn(words, WindowedScan, [POLICIES[1]], 9, cuts))
    assert equal(whole, drawn(words, StepwiseCache, [POLICIES[1]], 9))


@pytest.mark.parametrize("engine", ENGINES)
def test_order_and_company_of_streams_do_not_matter(
    engine: type[Engine], words: list[torch.Tensor]
) -> None:
    both = drawn(words, engine, [POLICIES[0]], 9, streams=(3, 8))
    swapped = drawn(words, engine, [POLICIES[0]], 9, streams=(8, 3))
    alone = drawn(words, engine, [POLICIES[0]], 9, streams=(8,))
    for a, b, c in zip(both, swapped, alone, strict=True):
        a, b, c = (x.view(-1, 4, 8, 16) for x in (a, b, c))
        assert torch.equal(a[1], b[0])
        assert torch.equal(a[0], b[1])
        assert torch.equal(a[1], c[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_policies_share_draws(engine: type[Engine], words: list[torch.Tensor]) -> None:
    alone = drawn(words, engine, [parse_policy("shared:fp16-sr")], 9)
    company = ["shared:nvfp4-sr", "shared:fp16-sr", "fp8 / fp16-sr", "shared:fp8-sr L=4"]
    del words[:]
    policies = [parse_policy(text) for text in company]
    inputs = for_policies(sample_inputs("gdn", steps=79), len(policies))
    o, _ = decode(engine, policies, inputs)
    seen = list(words)
    for x in alone:
        assert sum(torch.equal(x.view(-1), y.view(-1)) for y in seen) >= 3
    o_alone, _ = decode(engine, [policies[1]], sample_inputs("gdn", steps=79))
    assert torch.allclose(o[2:4], o_alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_states_do_not_depend_on_order_or_company(engine: type[Engine]) -> None:
    inputs = sample_inputs("gdn", rows=3, steps=79)
    ids = torch.tensor([3, 8, 5])
    _, scan = decode(engine, [POLICIES[0]], inputs, streams=ids)
    order = torch.tensor([2, 0])
    _, other = decode(engine, [POLICIES[0]], inputs.rows(order), streams=ids[order])
    assert torch.allclose(scan.state()[order], other.state(), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("engine", ENGINES)
def test_A12_other_seeds_layers_and_streams_draw_other_words(
    engine: type[Engine], words: list[torch.Tensor]
) -> None:
    seen = []
    for seed, layer, ids in ((7, 2, 3), (8, 2, 3), (7, 3, 3), (7, 2, 4)):
        del words[:]
        scan = engine([POLICIES[0]], torch.tensor([ids]), layer=layer, seed=seed)
        inputs = sample_inputs("gdn", rows=1, steps=60)
        scan.prefill(inputs.slice(0, 9))
        scan(inputs.slice(9, 60))
        seen += words
    for i, a in enumerate(seen):
        for b in seen[:i]:
            # 512 words of 32 bits: one pair in 2^23 coincides by chance
            assert (a.view(-1) == b.view(-1)).sum() <= 1
