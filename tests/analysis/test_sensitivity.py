"""Noise in single heads: where it goes, how it evolves, and what is gathered of it."""

import pytest
import torch

from quantlab.analysis.sensitivity import AMPLITUDE, InjectedScan, Injection
from quantlab.recurrence import exact_scan, textbook
from quantlab.replay import parse_policy
from tests.recurrence.sampling import sample_inputs

INJECTIONS = [Injection(1, 2, "kept"), Injection(1, 0, "fresh"), Injection(0, 1, "kept")]
PROMPT, STEPS, WINDOW, FIRST = 6, 24, 8, 10


def injected(kind, cuts=(24,), layer=1):
    one = sample_inputs(kind, rows=1, steps=PROMPT + STEPS, half_lives=(3.0, 300.0))
    inputs = one.rows(torch.zeros(4, dtype=torch.int64))
    scan = InjectedScan(
        [parse_policy("conventional")] * 4, torch.tensor([0]), layer=layer, seed=3,
        injections=INJECTIONS, window=WINDOW, first=FIRST,
    )  # fmt: skip
    outputs = [scan.prefill(inputs.slice(0, PROMPT))]
    at = PROMPT
    for count in cuts:
        outputs.append(scan(inputs.slice(at, at + count)))
        at += count
    return one, scan, torch.cat(outputs, 1)


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_noise_is_in_one_head_of_its_row(kind):
    one, scan, o = injected(kind)
    exact, _ = textbook(one)
    error = o - exact
    assert error[0].abs().max() < 1e-12 and error[3].abs().max() < 1e-12  # another layer's
    for row, head in ((1, 2), (2, 0)):
        others = [h for h in range(4) if h != head]
        assert error[row][:, others].abs().max() < 1e-12
        assert not error[row, :PROMPT].any() or error[row, :PROMPT].abs().max() < 1e-12
        assert (error[row, PROMPT:, head].abs().amax(-1) > 1e-9).all()
    # steps before the first one gathered do not count
    for row, head in ((1, 2), (2, 0)):
        gathered = error[row, PROMPT + FIRST - 1 :, head].square().sum()
        assert torch.allclose(scan.energy[row], gathered, rtol=1e-6)
        size = exact[0, PROMPT + FIRST - 1 :, head].square().sum()
        assert torch.allclose(scan.size[row], size, rtol=1e-6)
    assert not scan.energy[[0, 3]].any() and not scan.size[[0, 3]].any()
    _, _, cut = injected(kind, cuts=(3, 10, 11))
    assert torch.allclose(o, cut, atol=1e-12)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_kept_noise_is_carried_along_and_fresh_noise_is_not(kind):
    one, _, o = injected(kind)
    tail = one.slice(PROMPT + 2 * WINDOW, PROMPT + STEPS)
    _, before = exact_scan(one.slice(0, PROMPT + 2 * WINDOW))
    exact, _ = exact_scan(tail, before)
    size = before.square().mean(-1).sqrt()[0]  # [H, dv]
    relative = (o[:, PROMPT + 2 * WINDOW :] - exact).square().mean(1).sqrt()
    # fresh: only the last window's noise, of its amplitude times the row, seen through q and k
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(64, 1, 8, 16, generator=generator, dtype=torch.float64)
    clean = torch.zeros(1, 4, 8, 16, dtype=torch.float64)
    alone = []
    for draw in draws:
        noise = clean.clone()
        noise[:, 0] = AMPLITUDE["fresh"] * size[0, :, None] * draw
        alone.append((exact_scan(tail, before + noise)[0] - exact)[0, :, 0].square().mean())
    level = torch.stack(alone).mean().sqrt()
    got = relative[2, 0].square().mean().sqrt()
    assert 0.6 < float(got / level) < 1.6  # one draw of 128 elements
    # kept in a slow head: three windows' noise, more than one's
    one_kept = AMPLITUDE["kept"] / AMPLITUDE["fresh"]
    slow = relative[1, 2].square().mean().sqrt() / relative[2, 0].square().mean().sqrt()
    assert float(slow) > one_kept * 0.5


def test_rows_and_streams_are_counted():
    with pytest.raises(ValueError, match="a row for every injection"):
        InjectedScan(
            [parse_policy("conventional")], torch.tensor([0]), layer=0, seed=0,
            injections=INJECTIONS, window=8, first=1,
        )  # fmt: skip
