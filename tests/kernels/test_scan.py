"""The Triton scan against `quantlab.replay.WindowedScan` on the CPU.

Oracle: the torch reference in FP32, whose own oracle is the stepwise cache in FP64 (tests/replay).
Both round at the same points with the same draws, and add in another order. Each window starts from
the reference's stored copies: a free run decorrelates after the first flip.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantlab.dispatch import implementation_name, scan_class
from quantlab.formats import Format
from quantlab.recurrence import OpInputs, exact_scan
from quantlab.replay import Policy, WindowedScan, parse_policy
from tests.kernels.device import DEVICE, MARKS, ON_GPU
from tests.recurrence.sampling import relative, sample_inputs

from quantlab_kernels.triton_scan import TritonScan  # isort: skip

pytestmark = MARKS

# Outputs over the largest output: two orders of at most 128 + 16 FP32 terms, each off by 6e-8 (CPU)
# or, from three TF32 products, 2.4e-7 (GPU), adding as a random walk: 12 · 2.4e-7. Measured 5e-7.
# Mutants: one TF32 product 1e-4; a record left unrounded 5e-4; the other copy read 1e-3 and more.
OUTPUT = 3e-6
# Share of stored elements that may differ after a window. A boundary lies between the two values
# with probability d / step: d about 1e-7 of the largest element, steps from 5e-4 of an element
# (FP16) up, small elements more often. Measured up to 4e-4. Mutant: any wrong draw flips a third.
FLIPS = 2e-3
# Likewise for FP16 records of corrections: a flipped record moves later outputs of its window and
# the fold by 5e-4 of one correction. It moves a whole row of the state, which those outputs name:
# in all other rows the share of flipped codes is that without records.
FLIPPED_RECORDS = 0.02

STREAMS = torch.tensor([3, 8])
PROMPT = 9


def on_device(inputs: OpInputs) -> OpInputs:
    return inputs._map(lambda x: x.to(DEVICE))


def inputs_of(kind: str, rows: int, steps: int, **shape: object) -> OpInputs:
    return sample_inputs(kind, rows=rows, steps=PROMPT + steps, dtype=torch.float32, **shape)


def started(
    policies: list[Policy], inputs: OpInputs, streams: torch.Tensor = STREAMS
) -> tuple[TritonScan, WindowedScan]:
    """Both scans after the same prompt."""
    prompt = inputs.slice(0, PROMPT)
    _, state = exact_scan(prompt)
    ours = TritonScan(policies, streams.to(DEVICE), layer=2, seed=2**63 + 11)
    reference = WindowedScan(policies, streams, layer=2, seed=2**63 + 11)
    ours.start(state.to(DEVICE), on_device(prompt))
    reference.start(state, prompt)
    assert torch.equal(ours.state().cpu(), reference.state())
    return ours, reference


def restart(ours: TritonScan, reference: WindowedScan) -> None:
    """Give our single group the copies that the reference stored."""
    assert reference.carried is not None
    (group,), (lane,) = ours.groups, reference.carried.groups[0].lanes
    group.recur = lane.recur.to(DEVICE, copy=True)
    group.read = None if lane.read is None else lane.read.to(DEVICE, copy=True)


def differing(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of elements that differ by more than the FP32 noise of a scale: by a code."""
    return float(((a - b).abs() > 1e-5 * torch.maximum(a.abs(), b.abs())).float().mean())


def check_stored(a: torch.Tensor, b: torch.Tensor, fmt: Format, moved: torch.Tensor) -> None:
    """Compare stored values [rows, heads, dv, dk], but for rows [rows, heads, dv] that moved."""
    if fmt.is_exact:
        assert relative(a, b) < OUTPUT
    else:
        assert differing(a[~moved], b[~moved]) < FLIPS


def check_windows(policy: Policy, inputs: OpInputs, windows: int, rounded: bool = False) -> None:
    """Run windows of one stream, each from the reference's stored copies."""
    ours, reference = started([policy], inputs, STREAMS[: inputs.n_rows])
    for window in range(windows):
        start = PROMPT + window * policy.window
        piece = inputs.slice(start, start + policy.window)
        o, expected = ours(on_device(piece)).cpu(), reference(piece)
        assert o.shape == expected.shape and o.isfinite().all()
        off = (o - expected).abs() > OUTPUT * expected.abs().max()
        if rounded:
            assert off.float().mean() < FLIPPED_RECORDS
            assert relative(o, expected) < 1e-3
        else:
            assert relative(o, expected) < OUTPUT
        check_stored(ours.state().cpu(), reference.state(), policy.recur, off.any(1))
        if policy.kind == "separate":
            read = reference.carried.groups[0].lanes[0].read
            check_stored(ours.groups[0].read.cpu(), read, policy.read, off.any(1))
        restart(ours, reference)
    assert torch.equal(ours.diverged_at.cpu(), reference.diverged_at)


SUITE = [
    "shared:fp32",
    "shared:fp16-sr",
    "shared:fp8-sr",
    "shared:nvfp4-sr",
    "nvfp4 / fp32",
    "fp8 / fp16-sr",
    "nvfp4-sr / fp8-sr",
]
BASE = {"heads": 2, "key_heads": 1, "dv": 32, "dk": 32}


@pytest.mark.parametrize("kind", ["gdn", "mamba2", "kda", "gla"])
@pytest.mark.parametrize("policy", SUITE)
def test_windows_restarted_from_the_same_copies(kind: str, policy: str) -> None:
    inputs = inputs_of(kind, 1, 32, **BASE)
    check_windows(parse_policy(policy), inputs, 2)


@pytest.mark.parametrize(
    "policy",
    [
        "nvfp4 / fp16-sr L=2",
        "nvfp4 / fp16-sr L=5",
        "shared:fp8-sr L=33",
        "nvfp4 / bf16-sr L=64",
        "shared:nvfp4",
        "fp8 / int8@row-sr",
        "int4@row / fp32",
        "nvfp4 / fp16-sr corrections=fold",
        "shared:fp8-sr corrections=fold",
    ],
)
def test_windows_formats_and_corrections(policy: str) -> None:
    parsed = parse_policy(policy)
    check_windows(parsed, inputs_of("gdn", 1, 2 * parsed.window, **BASE), 2)


@pytest.mark.parametrize("dv, dk", [(128, 128), (80, 128), (64, 128), (7, 33), (48, 20), (140, 16)])
@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_shapes(kind: str, dv: int, dk: int) -> None:
    inputs = inputs_of(kind, 1, 16, heads=2, key_heads=1, dv=dv, dk=dk)
    check_windows(parse_policy("nvfp4 / fp8-sr"), inputs, 1)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("policy", ["shared:nvfp4-sr", "fp8 / int8@row-sr", "nvfp4 / fp16-sr"])
def test_columns_that_two_warps_share(kind: str, policy: str) -> None:
    """Scales of rows and of the state are those of both halves, and products their sums."""
    inputs = inputs_of(kind, 1, 32, heads=2, key_heads=1, dv=40, dk=60)
    check_windows(parse_policy(policy), inputs, 2)


@pytest.mark.parametrize(
    "kind, activations",
    [
        ("gdn", torch.bfloat16),
        ("gdn", torch.float16),
        ("mamba2", torch.bfloat16),
        ("kda", torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    "policy",
    ["shared:nvfp4-sr", "nvfp4 / fp16-sr", "nvfp4 / fp16-sr corrections=fold"],
)
def test_sixteen_bit_records(kind: str, policy: str, activations: torch.dtype) -> None:
    inputs = inputs_of(kind, 1, 32, activation_dtype=activations, **BASE)
    inputs = replace(inputs, v=inputs.v.to(activations))
    check_windows(parse_policy(policy), inputs, 2, rounded=True)


@pytest.mark.parametrize("policy", ["shared:fp8-sr records=bf16", "nvfp4 / fp32 records=bf16"])
def test_forced_records_of_float32_values(policy: str) -> None:
    """Values and keys of FP32 activations, rounded to BF16 on append: as Mamba-2's x and B."""
    inputs = inputs_of("mamba2", 1, 32, **BASE)
    check_windows(parse_policy(policy), inputs, 2, rounded=True)
    exact = replace(parse_policy(policy), records="exact")
    scans = [started([p], inputs, STREAMS[:1])[0] for p in (parse_policy(policy), exact)]
    a, b = (scan(on_device(inputs.slice(PROMPT, PROMPT + 16))) for scan in scans)
    assert relative(a[:, 0].cpu(), b[:, 0].cpu()) == 0  # a step uses its own values unrounded
    assert relative(a[:, 1:].cpu(), b[:, 1:].cpu()) > 1e-4


@pytest.mark.parametrize("kind", ["gdn", "mamba2", "kda"])
@pytest.mark.parametrize("fmt", ["fp16-sr", "fp8-sr", "nvfp4-sr", "nvfp4"])
def test_conventional(kind: str, fmt: str) -> None:
    inputs = inputs_of(kind, 1, 4, **BASE)
    check_windows(parse_policy(f"conventional:{fmt}"), inputs, 4)


def test_conventional_float32_takes_single_steps_beside_windows() -> None:
    policies = [parse_policy(p) for p in ("conventional", "shared:fp32", "nvfp4 / fp32 L=8")]
    inputs = inputs_of("gdn", 2, 27, **BASE).rows(torch.arange(2).repeat(3))
    ours, reference = started(policies, inputs)
    assert [g.policy.window for g in ours.groups] == [1, 16, 8]
    piece = inputs.slice(PROMPT, PROMPT + 27)
    o, expected = ours(on_device(piece)).cpu(), reference(piece)
    assert relative(o[:4], expected[:4]) < OUTPUT
    # the same inputs in another order of additions: the floor under every divergence
    assert 0 < relative(o[:2], o[2:4]) < OUTPUT
    assert relative(o[4:], expected[4:]) < OUTPUT


@pytest.mark.parametrize(
    "policy, cuts",
    [
        ("nvfp4 / fp16-sr L=5", ([22], [3, 1, 9, 9], [5, 17])),
        ("shared:fp8-sr", ([35], [1, 2, 30, 2], [16, 19])),
        ("conventional:fp8-sr", ([7], [1, 6])),
    ],
)
def test_segments_change_nothing(policy: str, cuts: tuple[list[int], ...]) -> None:
    """Outputs, the replayed state and the draws are the same however it is cut."""
    steps = sum(cuts[0])
    inputs = inputs_of("gdn", 1, steps, **BASE)
    inputs = replace(inputs, activation_dtype=torch.bfloat16, v=inputs.v.bfloat16())
    results = []
    for lengths in cuts:
        scan, reference = started([parse_policy(policy)], inputs, STREAMS[:1])
        outputs, at = [], PROMPT
        for length in lengths:
            outputs.append(scan(on_device(inputs.slice(at, at + length))))
            at += length
        results.append((torch.cat(outputs, 1), scan.state()))
    for o, state in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(state, results[0][1])
    reference(inputs.slice(PROMPT, PROMPT + steps))
    assert relative(results[0][1].cpu(), reference.state()) < 5e-2  # a free run: some flips


def test_open_window_replays_as_the_reference() -> None:
    inputs = inputs_of("gdn", 4, 9, **BASE)
    policies = [parse_policy("nvfp4 / fp16-sr"), parse_policy("shared:fp8-sr L=12")]
    ours, reference = started(policies, inputs)
    piece = inputs.slice(PROMPT, PROMPT + 9)
    assert relative(ours(on_device(piece)).cpu(), reference(piece)) < OUTPUT
    assert relative(ours.state().cpu(), reference.state()) < OUTPUT


def test_saved_in_the_middle_of_a_window() -> None:
    inputs = inputs_of("kda", 4, 22, heads=1, key_heads=1, dv=16, dk=16)
    policies = [parse_policy("nvfp4 / fp16-sr"), parse_policy("conventional:fp8-sr")]
    whole, _ = started(policies, inputs)
    whole(on_device(inputs.slice(PROMPT, PROMPT + 13)))
    saved = whole.state_dict()
    resumed = TritonScan(policies, STREAMS.to(DEVICE), layer=2, seed=2**63 + 11)
    resumed.load_state_dict({name: x.cpu() for name, x in saved.items()})
    piece = on_device(inputs.slice(PROMPT + 13, PROMPT + 22))
    assert torch.equal(resumed(piece), whole(piece))
    assert torch.equal(resumed.state(), whole.state())
    other = TritonScan([policies[1], policies[0]], STREAMS.to(DEVICE), layer=2, seed=1)
    other.load_state_dict(saved)
    with pytest.raises(ValueError, match="other policies"):
        other(piece)


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    policies = [parse_policy(p) for p in ("shared:nvfp4-sr", "nvfp4 / fp16-sr")]
    inputs = inputs_of("gdn", 4, 16, **BASE)
    together, _ = started(policies, inputs)
    o = together(on_device(inputs.slice(PROMPT, PROMPT + 16)))
    one = inputs.rows(torch.tensor([3]))
    alone, _ = started(policies[1:], one, STREAMS[1:])
    assert torch.equal(alone(on_device(one.slice(PROMPT, PROMPT + 16))), o[3:])


def test_divergence_is_marked_at_its_first_flush() -> None:
    """An FP16 state that overflows: the row is marked, the run goes on, other rows are unharmed."""
    inputs = inputs_of("mamba2", 2, 48, half_lives=(2000.0, 2000.0), **BASE)
    v = inputs.v.clone()
    v[0, PROMPT + 20, 1] = 1e9
    inputs = replace(inputs, v=v)
    ours, reference = started([parse_policy("shared:fp16")], inputs)
    piece = inputs.slice(PROMPT, PROMPT + 48)
    o, expected = ours(on_device(piece)).cpu(), reference(piece)
    assert ours.diverged_at.tolist() == reference.diverged_at.tolist() == [32, -1]
    assert relative(o[1], expected[1]) < 1e-3 and not o[0].isfinite().all()


def test_the_prompts_store_can_diverge() -> None:
    inputs = inputs_of("mamba2", 2, 16, **BASE)
    state = torch.zeros(2, 2, 32, 32)
    state[1, 0, 3, 3] = 7e4
    scan = TritonScan([parse_policy("shared:fp16")], STREAMS.to(DEVICE), layer=0, seed=0)
    scan.start(state.to(DEVICE), on_device(inputs))
    assert scan.diverged_at.tolist() == [-1, 0]


def test_inputs_are_left_as_they_were() -> None:
    inputs = on_device(inputs_of("gdn", 2, 20, **BASE))
    before = {n: getattr(inputs, n).clone() for n in ("q", "k", "v", "log_decay", "beta")}
    scan, _ = started([parse_policy("nvfp4 / fp16-sr")], inputs._map(lambda x: x.cpu()))
    scan(inputs.slice(PROMPT, PROMPT + 20))
    for name, x in before.items():
        assert torch.equal(getattr(inputs, name), x)


def test_what_the_kernels_lack_is_refused() -> None:
    with pytest.raises(ValueError, match="windows of up to 64"):
        TritonScan([parse_policy("shared:fp8 L=65")], STREAMS, layer=0, seed=0)
    with pytest.raises(ValueError, match="cannot store"):
        TritonScan([parse_policy("shared:mxfp4")], STREAMS, layer=0, seed=0)
    wide = sample_inputs("gdn", rows=2)
    with pytest.raises(TypeError, match="FP32"):
        TritonScan([parse_policy("shared:fp8")], STREAMS, layer=0, seed=0).prefill(wide)
    with pytest.raises(RuntimeError, match="prefill"):
        TritonScan([parse_policy("shared:fp8")], STREAMS, layer=0, seed=0)(
            on_device(inputs_of("gdn", 2, 1))
        )


def test_dispatch() -> None:
    assert scan_class("cuda") is TritonScan and scan_class("cpu") is WindowedScan
    assert scan_class("cpu", "triton") is TritonScan and scan_class("cuda", "torch") is WindowedScan
    assert implementation_name(TritonScan) == "quantlab_kernels.triton_scan.TritonScan"
    with pytest.raises(ValueError, match="unknown implementation 'fast'"):
        scan_class("cpu", "fast")  # type: ignore[arg-type]


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_smoke_case_on_the_device() -> None:
    from quantlab_kernels.smoke import compare

    for family in ("gdn", "mamba2"):
        row = compare(parse_policy("nvfp4 / fp16-sr"), family, device="cuda", dtype=torch.float32)
        assert row["ok"], row


@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_formats_of_some_heads(kind: str) -> None:
    """Heads of one launch, inside and outside, are those of the plain policy and of FP32."""
    bodies = ("conventional:int6@row", "shared:nvfp4-sr", "nvfp4 / fp16-sr L=8")
    texts = [
        text
        for body in bodies
        for text in (body, f"{body} only=2.1", f"{body} except=2.1,0.0", f"{body} only=1")
    ]
    policies = [parse_policy(text) for text in texts]
    inputs = inputs_of(kind, 1, 24, **BASE).rows(torch.zeros(len(texts), dtype=torch.int64))
    ours, _ = started(policies, inputs, STREAMS[:1])
    o = ours(on_device(inputs.slice(PROMPT, PROMPT + 24))).cpu()
    state = ours.state().cpu()
    for p in range(0, len(texts), 4):
        plain, only, rest, none = range(p, p + 4)
        for row, inside in ((only, 1), (rest, 0)):
            for a in (o.transpose(1, 2), state):  # [rows, H, …]
                assert torch.equal(a[row, inside], a[plain, inside])
                assert torch.equal(a[row, 1 - inside], a[none, 1 - inside])
        assert not torch.equal(state[plain], state[none])
    saved = ours.state_dict()
    again = TritonScan(policies, STREAMS[:1].to(DEVICE), layer=2, seed=2**63 + 11)
    again.load_state_dict(saved)
    more = on_device(inputs.slice(PROMPT, PROMPT + 8))
    assert torch.equal(again(more), ours(more))
