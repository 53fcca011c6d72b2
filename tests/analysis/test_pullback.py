"""Pulled-back read-outs and what they predict, where the prediction is exact."""

import math
from dataclasses import replace

import pytest
import torch

from quantlab.analysis.expected import expected_errors
from quantlab.analysis.pullback import gains, windows_of
from quantlab.analysis.shadow import nothing_written
from quantlab.analysis.theory import Moments, deviation
from quantlab.analysis.write_errors import WriteErrors, write_errors
from quantlab.recurrence import OpInputs, exact_scan, textbook
from quantlab.replay import WindowedScan, parse_policy
from tests.recurrence.sampling import sample_inputs

LENGTH = 4
# FP64 sums of some hundred terms in another order
FP64 = 1e-11


def one_row(kind, steps=24, **shape):
    return sample_inputs(kind, rows=1, steps=steps, half_lives=(2.0, 60.0), **shape)


def per_head(inputs):
    """Queries by value head: [T, H, dk]."""
    return inputs.q[0].repeat_interleave(inputs.heads // inputs.q.shape[2], 1)


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_a_deviation_and_its_outputs_by_the_textbook(kind):
    inputs = one_row(kind)
    found = windows_of(inputs, LENGTH)
    generator = torch.Generator().manual_seed(1)
    d = torch.randn(1, inputs.heads, inputs.dv, inputs.dk, generator=generator, dtype=torch.float64)
    for w in range(6):
        piece = nothing_written(inputs.slice(w * LENGTH, (w + 1) * LENGTH))
        o, after = textbook(piece, d)
        assert torch.allclose(d[0] @ found.readouts[w], o[0].permute(1, 2, 0), atol=FP64)
        step = found.transitions[w]
        moved = d[0] @ step if step.ndim == 3 else d[0] * step[:, None]
        assert torch.allclose(moved, after[0], atol=FP64)
        d = after


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_moments_are_those_of_outputs_of_single_errors(kind, grown):
    """Errors of one key channel and one store at a time, decoded by the textbook."""
    inputs = one_row(kind, steps=12, dk=6, heads=2, key_heads=1)
    sizes = None
    if grown:
        sizes = torch.tensor([[1.0, 8], [2, 5], [4, 2], [3, 2], [5, 1]], dtype=torch.float64)
    found = gains(windows_of(inputs, LENGTH), [1, 3, 5], window=LENGTH, products=True, sizes=sizes)
    assert found.stores == (1, 3, 5)
    unit = torch.eye(6, dtype=torch.float64).expand(1, 2, 6, 6)
    blank = inputs.v.new_zeros(()).expand(1, LENGTH, 2, 6)

    def window(w):
        piece = inputs.slice(w % 3 * LENGTH, (w % 3 + 1) * LENGTH)
        return replace(nothing_written(piece), v=blank)

    for entry, stores in enumerate(found.stores):
        squares = torch.zeros(2, 2, 6, dtype=torch.float64)
        products = torch.zeros(2, 2, 6, 6, dtype=torch.float64)
        for read in range(3):  # a ring of three windows
            y = torch.zeros(2, 6, LENGTH, dtype=torch.float64)
            for age in range(stores):
                state = unit
                if sizes is not None:
                    relative = sizes[stores - 1 - age] / sizes[stores - 1]
                    state = relative[:, None, None] * unit
                for w in range(read - age, read):
                    state = textbook(window(w), state)[1]
                o = textbook(window(read), state)[0][0].permute(1, 2, 0)  # [H, dk, L]
                y += o
                squares[0] += o[..., :-1].square().sum(-1)
                squares[1] += o[..., -1].square()
            products[0] += y[..., :-1] @ y[..., :-1].mT
            products[1] += y[..., -1:] @ y[..., -1:].mT
        for group, of in ((0, 0), (2, 1)):
            assert torch.allclose(found.squares[entry, group], squares[of] / 12, atol=FP64)
            assert torch.allclose(found.products[entry, group], products[of] / 12, atol=FP64)
    newest = found.squares[0, 0]
    assert torch.allclose(found.squares[:, 1], found.squares[:, 0] - newest, atol=FP64)
    assert not found.products[0, 1].any()


def made_up(variance, bias=None, fresh=None):
    shape = variance.shape
    zero = torch.zeros(shape[:2], dtype=torch.float64)
    return WriteErrors(
        variance=variance, bias=bias, fresh=torch.zeros(shape) if fresh is None else fresh,
        step_error=zero, step_output=zero, states=zero[:2], stride=8, dv=1, steps=0,
    )  # fmt: skip


@pytest.mark.parametrize("window", [1, 16])
def test_closed_forms_under_a_constant_gate(window):
    """One channel, q = 1: the outputs' errors are the deviation itself."""
    decay, writes = 0.97, 40
    ones = torch.ones(1, 2 * window, 1, 1, dtype=torch.float64)
    inputs = OpInputs(q=ones, k=ones, v=ones, log_decay=math.log(decay) * ones[..., 0])
    found = gains(windows_of(inputs, window), [1, writes], window=window, products=True)
    sigma, b = 0.7, 0.2
    errors = made_up(sigma**2 * ones[:1, :1, :, 0], b**2 * ones[:1, :1])
    policy = parse_policy("shared:fp8", window=window)
    expected = 0.0
    for after in range(1, window + 1):
        moments = deviation(
            Moments(mean=b, variance=sigma**2), decay=decay, window=window, writes=writes,
            after=after,
        )  # fmt: skip
        expected += (moments.mean**2 + moments.variance) / window
    got = expected_errors(errors, found, [policy], dv=1).kept[0, -1, 0]
    assert float(got) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_expectation_of_a_delta_rule_is_the_mean_over_many_errors(kind):
    """Value rows are independent draws: 4,096 of them put the mean within a few per cent."""
    inputs = one_row(kind, steps=16, heads=2, key_heads=1, dk=8)
    generator = torch.Generator().manual_seed(2)
    size = torch.rand(2, 8, generator=generator, dtype=torch.float64) + 0.5
    mean = 0.3 * torch.randn(2, 1, 8, generator=generator, dtype=torch.float64)
    fresh = torch.rand(2, 8, generator=generator, dtype=torch.float64)
    errors = made_up(size.square()[None], (mean.mT @ mean)[None], fresh.square()[None])
    found = gains(windows_of(inputs, LENGTH), [1, 4], window=LENGTH, products=True)
    shared, separate = parse_policy("shared:fp8 L=4"), parse_policy("fp8 / fp16 L=4")
    dv = 4096

    def noise(scale):
        draws = torch.randn(1, 2, dv, 8, generator=generator, dtype=torch.float64)
        return scale.unsqueeze(-2) * draws

    # the ring read at every window, four stores back
    sums = {"shared": 0.0, "separate": 0.0}
    for read in range(4):
        d = torch.zeros(1, 2, dv, 8, dtype=torch.float64)
        for w in range(read - 3, read + 1):
            piece = inputs.slice(w % 4 * LENGTH, (w % 4 + 1) * LENGTH)
            piece = replace(
                nothing_written(piece), v=inputs.v.new_zeros(()).expand(1, LENGTH, 2, dv)
            )
            before, d = d, d + noise(size) + mean
            o, after = exact_scan(piece, d)
            seen, _ = exact_scan(piece, before + noise(fresh))
            d = after
        sums["shared"] += o.square().sum((0, 1, 3)) / 16
        both = torch.cat([seen[:, :-1], o[:, -1:]], 1)
        sums["separate"] += both.square().sum((0, 1, 3)) / 16
    one = expected_errors(errors, found, [shared], dv)
    # relative error of a mean of 4,096 squares: sqrt(2 / 4096) = 2.2 %, less for sums of several
    assert torch.allclose(one.kept[0, -1], sums["shared"], rtol=0.05)
    two = expected_errors(errors, found, [separate], dv)
    assert torch.allclose(two.kept[0, -1] + two.fresh[0], sums["separate"], rtol=0.05)
    assert (two.kept[0, -1] < 0.9 * one.kept[0, -1]).all()


def test_write_errors_by_hand():
    policies = [
        parse_policy(t) for t in ("conventional:int8@row", "shared:fp8-sr L=4", "nvfp4 / fp8 L=8")
    ]
    inputs = sample_inputs(
        "gdn", rows=1, steps=128, dtype=torch.float32, activation_dtype=torch.float32
    )
    state = torch.zeros(1, 4, 8, 16)
    found = write_errors(state, inputs, policies, layer=2, seed=5, scan=WindowedScan)
    assert found.steps == 128 and found.dv == 8
    assert found.stride == 8 and found.states.shape == (17, 4) and not found.states[0].any()
    rows = torch.zeros(3, dtype=torch.int64)
    scan = WindowedScan(policies, torch.tensor([0]), layer=2, seed=5)
    scan.start(state[rows], inputs.rows(rows))
    many = inputs.rows(rows)
    written, fresh, seen = [], [], [0]
    outputs = []
    for stop in range(8, 129, 8):
        one, two = [], []
        at = seen[-1]
        marks = sorted({stop - p.window for p in policies})
        copies = {}
        for mark in [*marks, stop]:
            if mark > at:
                outputs.append(scan(many.slice(at, mark)))
            copies[stop - mark] = scan.copies()[0]
            at = mark
        recur, read = scan.copies()
        for p, policy in enumerate(policies):
            last = inputs.slice(stop - policy.window, stop)
            double = last._map(lambda x: x.double())
            exact = textbook(double, copies[policy.window][p : p + 1].double())[1]
            one.append(recur[p].double() - exact[0])
            two.append(read[p].double() - exact[0])
        written.append(torch.stack(one))
        fresh.append(torch.stack(two))
        seen.append(stop)
    e, f = torch.stack(written), torch.stack(fresh)
    # FP32 against FP64: 1e-7 of a state, 1e-4 of an error of a part in a thousand
    stochastic = e[:, 1].square().mean((0, 2))
    assert torch.allclose(found.variance[1], stochastic, rtol=1e-3)
    spread = e.var(0).mean(-2)
    assert torch.allclose(found.variance[[0, 2]], spread[[0, 2]], rtol=1e-3)
    product = e.mean(0).mT @ e.mean(0) / 8 - torch.diag_embed(spread / 16)
    assert torch.allclose(found.bias[[0, 2]], product[[0, 2]], atol=1e-3 * float(product.max()))
    assert not found.bias[1].any() and not found.fresh[:2].any()
    assert torch.allclose(found.fresh[2], f[:, 2].square().mean((0, 2)), rtol=1e-3)
    right, end = textbook(inputs._map(lambda x: x.double()), state.double())
    assert torch.allclose(found.states[-1], end[0].square().mean((-2, -1)), rtol=1e-9)
    off = (torch.cat(outputs, 1).double() - right).square().mean(-1).mean(1)
    assert torch.allclose(found.step_error, off, rtol=1e-3)


def test_growth_is_that_of_the_states_that_are_looked_at():
    errors = replace(
        made_up(torch.zeros(1, 2, 3)),
        states=torch.tensor([[1.0, 0], [3, 4], [5, 4]], dtype=torch.float64),
    )
    # looks at 0, 8 and 16 steps; what two writes made is taken relative to their mean, 4
    every = errors.growth(4, window=8)
    assert every[:, 0].tolist() == [0.25, 0.75, 1.25, 1.25]
    assert every[1:, 1].tolist() == [1, 1, 1] and 0 < every[0, 1] < 1e-9
    between = errors.growth(6, window=4)
    assert between[:, 0].tolist() == [0.25, 0.5, 0.75, 1, 1.25, 1.25]
    assert errors.growth(2, window=16)[:, 0].tolist() == [0.25, 1.25]


def test_what_cannot_be_is_refused():
    inputs = sample_inputs("gdn", rows=2, steps=8)
    with pytest.raises(ValueError, match="one row of at least 4 steps, got 2"):
        windows_of(inputs, 4)
    with pytest.raises(ValueError, match="need two"):
        write_errors(
            torch.zeros(1, 4, 8, 16), inputs.rows(slice(0, 1)), [parse_policy("shared:fp8")],
            layer=0, seed=0, scan=WindowedScan,
        )  # fmt: skip
    found = gains(windows_of(inputs.rows(slice(0, 1)), 4), [2], window=4)
    with pytest.raises(ValueError, match="begin with one store"):
        expected_errors(made_up(torch.zeros(1, 4, 16)), found, [parse_policy("shared:fp8 L=4")], 8)
