"""Watched scans: outputs as they were, and every quantity against an independent computation."""

import math

import pytest
import torch

from quantlab.analysis.observations import SERIES
from quantlab.analysis.observer import observed
from quantlab.analysis.ranges import range_counts
from quantlab.recurrence import OpInputs, exact_scan, textbook
from quantlab.replay import WindowedScan, parse_policy
from quantlab.replay.seeded import by_seed
from tests.recurrence.sampling import sample_inputs

STREAMS = torch.tensor([2, 5])
TEXTS = ("conventional:fp64", "shared:fp8-sr L=4", "shared:int6@row L=8", "conventional:fp8")
POLICIES = [parse_policy(f"{text} records=exact") for text in TEXTS]
PROMPT = 11
STEPS = PROMPT + 40
# FP64 sums in another order, some 1e-15 relative; a stored value flips only where it lies that
# close to a rounding boundary, which none does for these seeds.
FP64 = 1e-11


def inputs_of(kind):
    one = sample_inputs(kind, steps=STEPS, half_lives=(2.0, 200.0))
    return one.rows(torch.arange(2).repeat(len(POLICIES)))


def run(kind, cuts=(40,), stride=8, reference=0):
    inputs = inputs_of(kind)
    build, built = observed(WindowedScan, stride=stride, reference=reference)
    scan = build(POLICIES, STREAMS, layer=1, seed=3)
    outputs = [scan.prefill(inputs.slice(0, PROMPT))]
    at = PROMPT
    for count in cuts:
        outputs.append(scan(inputs.slice(at, at + count)))
        at += count
    assert built == [scan]
    return inputs, scan, torch.cat(outputs, 1)


def series(scan, name):
    return scan.seen.series[name].tensor()


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_outputs_are_the_scans_own_and_cuts_do_not_matter(kind):
    inputs, scan, outputs = run(kind)
    plain = WindowedScan(POLICIES, STREAMS, layer=1, seed=3)
    expected = torch.cat(
        [plain.prefill(inputs.slice(0, PROMPT)), plain(inputs.slice(PROMPT, STEPS))], 1
    )
    assert (outputs - expected).abs().max() < FP64 * expected.abs().max()
    assert torch.equal(scan.diverged_at, plain.diverged_at)
    _, other, _ = run(kind, cuts=(3, 1, 20, 16))
    assert other.seen.positions == scan.seen.positions == [8, 16, 24, 32, 40]
    for name in SERIES:
        assert torch.allclose(series(scan, name), series(other, name), rtol=1e-8, atol=1e-14), name
    for name, counts in scan.seen.ranges.items():
        assert torch.equal(counts.tensor(), other.seen.ranges[name].tensor()), name


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_deviation_and_write_error_by_the_textbook(kind):
    inputs, scan, _ = run(kind)
    _, exact = textbook(inputs)
    stored = scan.state()
    heads = stored - exact
    assert torch.allclose(scan.deviation(), heads, atol=FP64)
    last = series(scan, "deviation")[-1]
    assert torch.allclose(last, heads.square().mean((-2, -1)), rtol=1e-6, atol=1e-20)
    # the exact policy does not deviate, the others do
    assert last[:2].max() < 1e-20 and last[2:].min() > 1e-8
    q = inputs.q[:, -1].repeat_interleave(2, 1)
    error = (heads @ q.unsqueeze(-1)).squeeze(-1).square().mean(-1)
    assert torch.allclose(series(scan, "output_error")[-1], error, rtol=1e-6, atol=1e-20)
    # a write's own error: the stored state against the exact window from the one before
    for p, policy in enumerate(POLICIES):
        rows, start = slice(2 * p, 2 * p + 2), STEPS - policy.window
        before = WindowedScan(POLICIES, STREAMS, layer=1, seed=3)
        before.prefill(inputs.slice(0, PROMPT))
        if start > PROMPT:
            before(inputs.slice(PROMPT, start))
        _, unrounded = exact_scan(inputs.rows(rows).slice(start, STEPS), before.state()[rows])
        assert torch.allclose(scan.write_error()[rows], stored[rows] - unrounded, atol=FP64)
    reference = (stored - stored[:2].repeat(len(POLICIES), 1, 1, 1)).square().mean((-2, -1))
    assert torch.allclose(series(scan, "from_reference")[-1], reference)


def test_without_a_delta_rule_deviations_follow_the_gates_exactly():
    """D after a stride is γ D before it plus the write's error: L equal to the stride."""
    inputs, scan, _ = run("mamba2", cuts=(32,))
    before = scan.deviation()
    scan(inputs.slice(PROMPT + 32, STEPS))
    decay = inputs.log_decay[:, PROMPT + 32 :].sum(1).exp()[..., None, None]
    rows = slice(4, 6)  # L = 8 = stride
    expected = decay[rows] * before[rows] + scan.write_error()[rows]
    assert torch.allclose(scan.deviation()[rows], expected, atol=FP64)


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_probe_and_oracle_follow_the_first_error_alone(kind):
    inputs, scan, _ = run(kind)
    first, rest = inputs.slice(0, PROMPT), inputs.slice(PROMPT, STEPS)
    _, exact = exact_scan(first)
    fresh = WindowedScan(POLICIES, STREAMS, layer=1, seed=3)
    fresh.prefill(first)
    error = fresh.state() - exact
    disturbed, exact_o = textbook(rest, exact + error), textbook(rest, exact)
    left = disturbed[1] - exact_o[1]
    assert torch.allclose(
        series(scan, "probe")[-1], left.square().mean((-2, -1)), rtol=1e-4, atol=1e-18
    )
    output = (disturbed[0] - exact_o[0]).square().mean(-1).sum(1)
    assert torch.allclose(scan.seen.probe_output, output, rtol=1e-4, atol=1e-16)
    decay = rest.log_decay.sum(1).exp()
    gated = error * (decay.unsqueeze(-2) if rest.per_channel else decay[..., None, None])
    assert torch.allclose(
        series(scan, "oracle")[-1], gated.square().mean((-2, -1)), rtol=1e-8, atol=1e-20
    )
    if kind == "mamba2":
        assert torch.equal(series(scan, "oracle"), series(scan, "probe"))


def test_predictions_are_the_closed_forms_under_constant_gates():
    decay, steps, window, stride = 0.97, 64, 4, 8
    ones = torch.ones(1, steps, 1, 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, steps, 3, 5, generator=generator, dtype=torch.float64)
    inputs = OpInputs(
        q=ones, k=ones, v=values,
        log_decay=torch.full((1, steps, 3), math.log(decay), dtype=torch.float64),
    )  # fmt: skip
    build, _ = observed(WindowedScan, stride=stride, reference=None)
    scan = build([parse_policy(f"shared:fp8-sr L={window}")], torch.tensor([0]), layer=0, seed=0)
    scan.start(torch.zeros(1, 3, 5, 1, dtype=torch.float64), inputs)
    scan(inputs)
    a = decay**window
    writes = steps // window + 1  # the post-prefill store is one
    expected = (1 - a**writes) / (1 - a)
    assert series(scan, "bias_gain")[-1].flatten().tolist() == pytest.approx([expected] * 3)
    # Σ γ² e², each stride's writes with the error of its last
    energy = torch.zeros(1, 3, dtype=torch.float64)
    for e in series(scan, "write"):
        energy = decay ** (2 * stride) * energy + e * (1 + a * a)
    assert torch.allclose(series(scan, "independent")[-1], energy)
    assert torch.isnan(series(scan, "from_reference")).all()
    assert torch.allclose(scan.seen.log_decay, torch.tensor(steps * math.log(decay)).double())


def test_contraction_of_a_delta_rule_lowers_the_prediction():
    _, scan, _ = run("gdn")
    loose, tight = series(scan, "independent")[:, 2:], series(scan, "contracted")[:, 2:]
    assert (tight < loose).all() and (tight > 0).all()
    _, scan, _ = run("mamba2")
    assert torch.equal(series(scan, "independent"), series(scan, "contracted"))


def test_ranges_are_counted_of_what_is_stored():
    _, scan, _ = run("gdn")
    counts = {name: x.tensor()[-1, :, 0] for name, x in scan.seen.ranges.items()}
    stored = scan.state()
    # FP8 and INT6 per row: what was flushed is zero in the store, and nothing else is
    for rows in (slice(2, 4), slice(4, 6), slice(6, 8)):
        zeros = (stored[rows] == 0).flatten(1).sum(1)
        assert torch.equal(counts["flushed"][rows], zeros)
    assert (counts["flushed"][4:6] > 0).all() and (counts["flushed"][:2] == 0).all()


@pytest.mark.parametrize(
    ("text", "state", "expected"),
    [
        # beyond 65504; 2^-15 is subnormal, 2^-26 is below half the smallest one
        ("shared:fp16", [1.0, 7e4, 2.0**-15, 2.0**-26], [1, 1, 1, 0]),
        # scale amax / 448: 2^-7 · scale is subnormal, 2^-11 · scale is flushed
        ("conventional:fp8", [448.0, 1.0, 2.0**-7, 2.0**-11], [0, 1, 1, 0]),
        ("conventional:int8@row", [127.0, 1.0, 0.4, 0.0], [0, 1, 0, 0]),
    ],
)
def test_range_counts_of_known_states(text, state, expected):
    counts = range_counts(
        torch.tensor(state).view(1, 1, 1, 4),
        [parse_policy(text)],
        torch.tensor([0]),
        seed=0,
        layer=0,
        position=16,
    )
    names = ("clipped", "flushed", "subnormal", "zeroed")
    assert [int(counts[n][0, 0]) for n in names] == expected
    assert not any(int(counts[n][0, 1]) for n in names)  # there is no read copy


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_two_copies_are_told_apart(kind):
    """An exact recurrence copy does not deviate; the read copy does, and the steps that read it."""
    policy = parse_policy("nvfp4 / fp64 L=8 records=exact")
    inputs = inputs_of(kind).rows(slice(0, 2))
    build, _ = observed(WindowedScan, stride=8, reference=None)
    scan = build([policy], STREAMS, layer=1, seed=3)
    o = torch.cat([scan.prefill(inputs.slice(0, PROMPT)), scan(inputs.slice(PROMPT, STEPS))], 1)
    exact_o, exact = textbook(inputs)
    recur, read = scan.copies()
    assert (recur - exact).abs().max() < FP64
    assert series(scan, "deviation").max() < 1e-20
    error = (read - exact).square().mean((-2, -1))
    assert torch.allclose(series(scan, "read_deviation")[-1], error, rtol=1e-9)
    assert error.min() > 1e-8
    assert not (scan.seen.ranges["flushed"].tensor()[..., 0]).any()
    assert torch.equal(
        scan.seen.ranges["flushed"].tensor()[-1, :, 1], (read == 0).flatten(1).sum(1)
    )
    off = (o - exact_o)[:, PROMPT:].square().mean(-1).unflatten(1, (5, 8))  # [rows, obs, 8, H]
    assert torch.allclose(series(scan, "step_error"), off.mean(2).transpose(0, 1), rtol=1e-6)
    assert (off[:, :, -1] < 1e-20).all()  # the L-th step reads the recurrence copy
    on = exact_o[:, PROMPT:].square().mean(-1).unflatten(1, (5, 8))
    assert torch.allclose(series(scan, "step_output"), on.mean(2).transpose(0, 1))


def test_windows_must_divide_the_stride():
    build, _ = observed(WindowedScan, stride=12)
    with pytest.raises(ValueError, match=r"every 12 tokens: the window of shared int6@row L=8"):
        build(POLICIES, STREAMS, layer=0, seed=0)


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_nothing_leaves_the_device_or_waits_for_it(kind):
    """On a device without values a host copy, a branch on a value and mixed devices all raise."""
    texts = (
        "conventional",
        "shared:nvfp4-sr L=8",
        "shared:int6@row-sr L=4 seed=5",
        "fp8 / fp16-sr",
    )
    policies = [parse_policy(f"{text}" if "L=" in text else f"{text} L=4") for text in texts]
    one = sample_inputs(kind, steps=29, rows=len(policies), dtype=torch.float32)
    inputs = one._map(lambda x: x.to("meta"))
    streams = torch.tensor([2], device="meta")
    build, _ = observed(by_seed(WindowedScan), stride=8)
    scan = build(policies, streams, layer=1, seed=3)
    scan.prefill(inputs.slice(0, 5))
    scan(inputs.slice(5, 16))
    scan(inputs.slice(16, 29))
    assert scan.seen.positions == [8, 16, 24]
    assert all(x.tensor().is_meta for x in scan.seen.series.values())
