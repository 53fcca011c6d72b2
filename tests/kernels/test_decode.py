"""Decode kernels against `quantlab.replay.StepwiseCache`, the FP64 recurrence and `formats.encode`.

The stepwise cache rounds at the same points with the same draws and adds in another order. Where a
narrow format would let the two part, each window starts from the values that the kernels stored:
the cache is given those, and what both store next is compared.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantlab.errors import UsageError
from quantlab.formats import encode, parse_format
from quantlab.formats.philox import sr_words
from quantlab.recurrence import OpInputs, exact_scan
from quantlab.recurrence.step import textbook
from quantlab.replay import StepwiseCache, parse_policy
from quantlab.study.backend import Backend
from tests.kernels.device import DEVICE, MARKS, ON_GPU
from tests.recurrence.sampling import relative, sample_inputs
from tests.study.fake import make_spec

from quantlab_kernels.decode import LayerCache  # isort: skip
from quantlab_kernels.decode_store import StateStore  # isort: skip
from quantlab_kernels.decode_launch import StepLaunch, TileLaunch, programs  # isort: skip
from quantlab_kernels.decode_plan import Cursors, Plan, advance  # isort: skip

pytestmark = MARKS

# Outputs over the largest output: at most 128 + 16 FP32 terms in another order, each off by 6e-8,
# adding as a random walk; the GPU's exponentials are good to 2e-7 (5e-7 at a log of -8). Measured
# 5e-7. Mutants: a record left unrounded 5e-4; the other copy read 1e-3; a decay missed 1e-2.
OUTPUT = 3e-6
# Share of stored elements that may differ by a code, beyond two: a boundary lies between values
# 1e-7 of the largest element apart, for small elements more often. Mutant: a wrong draw flips a
# third of them.
FLIPS = 5e-3
SEED = 2**63 + 11
PROMPT = 5
STREAMS = (3, 2**31 + 8)
BASE = {"heads": 2, "key_heads": 1, "dv": 16, "dk": 32}


def on_device(inputs: OpInputs) -> OpInputs:
    return inputs._map(lambda x: x.to(DEVICE))


class Bench:
    """Two sequences in slots 4 and 1 of six, the second started `lag` steps after the first."""

    def __init__(self, kind, policy, *, lag=0, activations=torch.float32, steps=40, **shape):
        self.policy = parse_policy(policy)
        inputs = sample_inputs(
            kind,
            rows=2,
            steps=PROMPT + steps,
            dtype=torch.float32,
            activation_dtype=activations,
            **{**BASE, **shape},
        )
        if activations != torch.float32:
            inputs = replace(inputs, v=inputs.v.to(activations))
        self.inputs, self.lag, self.slots = inputs, lag, (4, 1)
        self.cursors = Cursors.empty(6, DEVICE)
        self.cache = LayerCache.empty(self.policy, on_device(inputs), slots=6, layer=2, seed=SEED)
        for x in self.memory():
            x.view(torch.uint8).fill_(0xA5)  # an unwritten record or slot would be seen
        self.plan = Plan.empty(3, DEVICE)
        self.references = []
        for i in range(2):
            reference = StepwiseCache([self.policy], torch.tensor([STREAMS[i]]), layer=2, seed=SEED)
            _, state = exact_scan(inputs.rows(slice(i, i + 1)).slice(0, PROMPT))
            reference.start(state)
            self.references.append(reference)
            slot = torch.tensor([self.slots[i]], device=DEVICE)
            self.cursors.start(slot, torch.tensor([STREAMS[i]], device=DEVICE))
            self.cache.start(state.contiguous().to(DEVICE), slot, self.cursors)
            assert torch.equal(self.stored("recur", i), reference.caches[0].recur)
            if self.policy.kind == "separate":
                assert torch.equal(self.stored("read", i), reference.caches[0].read)

    def memory(self):
        stores = [self.cache.recur, self.cache.read]
        parts = [x for s in stores for x in (s.codes, s.scales, s.state_scale)]
        c = self.cache
        return [x for x in (*parts, c.keys, c.values, c.written, c.logs, c.strengths) if x.numel()]

    def stored(self, name, i):
        slot = torch.tensor([self.slots[i]], device=DEVICE)
        return getattr(self.cache, name).values(slot).cpu()

    def step(self, t):
        """Take step t of both (the second takes t - lag); rows 0 and 2, row 1 is padded."""
        taken = [t, t - self.lag]
        slots = [s if at >= 0 else -1 for s, at in zip(self.slots, taken, strict=True)]
        rows = [max(at, 0) + PROMPT for at in taken]
        pieces = [self.inputs.rows(slice(i, i + 1)).slice(r, r + 1) for i, r in enumerate(rows)]
        order = (0, 0, 1)
        x = replace(
            pieces[0],
            **{
                n: torch.cat([getattr(pieces[i], n) for i in order])
                for n in ("q", "k", "v", "log_decay", "beta", "dt")
                if getattr(pieces[0], n) is not None
            },
        )
        where = torch.tensor([slots[0], -1, slots[1]], dtype=torch.int32, device=DEVICE)
        heads, dv = self.inputs.heads, self.inputs.dv
        out = torch.full((3, heads, dv), float("nan"), device=DEVICE)
        advance(where, self.cursors, self.plan, window=self.policy.window)
        self.cache.step(on_device(x), self.plan, self.cursors, out)
        out = out.cpu()
        assert out[1].isnan().all()
        for i in range(2):
            if taken[i] < 0:
                assert out[2 * i].isnan().all()
                continue
            yield i, out[2 * i], self.references[i](pieces[i])[0, 0]

    def compare_stored(self, i):
        """After a flush of row i: the same codes but for flips; then go on from ours."""
        (cache,) = self.references[i].caches
        for name in ("recur", "read") if self.policy.kind == "separate" else ("recur",):
            ours, theirs = self.stored(name, i), getattr(cache, name)
            fmt = getattr(self.policy, name)
            if fmt.is_exact:
                assert relative(ours, theirs) < OUTPUT
            else:
                off = (ours - theirs).abs() > 1e-5 * torch.maximum(ours.abs(), theirs.abs())
                assert off.sum() <= 2 + FLIPS * off.numel(), name
            setattr(cache, name, ours)

    def run(self, steps, tolerance=OUTPUT):
        for t in range(steps):
            for i, o, expected in self.step(t):
                assert o.isfinite().all(), t
                assert relative(o, expected) < tolerance, (t, i)
                if not self.references[i].caches[0].buffer:
                    self.compare_stored(i)


KINDS = ("mamba2", "gdn", "kda")


@pytest.mark.parametrize(
    "kind, policy",
    [
        ("mamba2", "shared:fp32 L=3"),
        ("kda", "shared:fp8-sr L=3"),
        ("gdn", "nvfp4 / fp16-sr L=4"),
        ("mamba2", "nvfp4 / fp16-sr L=3"),
        ("kda", "nvfp4 / fp16-sr L=3"),
        ("gdn", "fp8 / fp32 L=3"),
        ("gdn", "bf16-sr / nvfp4-sr L=2"),
        ("kda", "fp16 / fp8-sr L=3 corrections=fold"),
        ("gdn", "shared:fp32 L=3 corrections=fold"),
        ("gdn", "int8@row / int8@row-sr L=3"),
        ("mamba2", "int4@row / fp32 L=2"),
    ],
)
def test_windows_with_rows_at_different_cursors(kind: str, policy: str) -> None:
    bench = Bench(kind, policy, lag=2)
    bench.run(bench.policy.window + 3)


def test_paper_window() -> None:
    Bench("gdn", "nvfp4 / fp16-sr", lag=2, heads=1, key_heads=1, dk=16).run(19)


def test_windows_longer_than_sixteen() -> None:
    Bench("gdn", "shared:fp32 L=20", heads=1, key_heads=1, dk=16).run(21)


@pytest.mark.parametrize("kind", [*KINDS, "gla"])
def test_against_the_recurrence_in_float64(kind: str) -> None:
    """FP32 copies and records are the recurrence itself, whatever the window."""
    bench = Bench(kind, "shared:fp32 L=5", heads=1, key_heads=1)
    outputs = [[o for _, o, _ in bench.step(t)] for t in range(7)]
    wide = bench.inputs._map(lambda x: x.double())
    exact, _ = textbook(wide)
    for i in range(2):
        ours = torch.stack([o[i] for o in outputs])
        assert relative(ours.double(), exact[i, PROMPT : PROMPT + 7]) < OUTPUT


@pytest.mark.parametrize(
    "kind, fmt",
    [
        *(("gdn", f) for f in ("fp32", "fp16-sr", "bf16-sr", "fp8-sr", "nvfp4-sr")),
        *(("mamba2", f) for f in ("fp32", "nvfp4")),
        ("kda", "fp8-sr"),
    ],
)
def test_conventional(kind: str, fmt: str) -> None:
    Bench(kind, f"conventional:{fmt}", lag=1).run(3)


@pytest.mark.parametrize(
    "kind, activations",
    [("mamba2", torch.bfloat16), ("gdn", torch.bfloat16), ("kda", torch.float16)],
)
def test_sixteen_bit_records(kind: str, activations: torch.dtype) -> None:
    """A flipped FP16 correction moves later outputs of its window by 5e-4 of one correction."""
    bench = Bench(kind, "nvfp4 / fp16-sr L=3", activations=activations, lag=1)
    assert bench.cache.key_record == {torch.bfloat16: "bf16", torch.float16: "fp16"}[activations]
    bench.run(6, tolerance=1e-3)


@pytest.mark.parametrize(
    "kind, dv, dk", [("gdn", 128, 128), ("mamba2", 80, 128), ("gdn", 7, 64), ("mamba2", 64, 16)]
)
def test_shapes(kind: str, dv: int, dk: int) -> None:
    Bench(kind, "nvfp4 / fp8-sr L=2", heads=2, key_heads=1, dv=dv, dk=dk).run(3)


@pytest.mark.parametrize("policy", ["shared:fp32 L=3", "fp16 / fp32 L=3"])
def test_tiles_that_span_heads_behind_records(policy: str) -> None:
    """Heads of 24 rows in tiles of 16 or 32: the last tile holds fewer heads than the others."""
    Bench("gdn", policy, heads=2, key_heads=1, dv=24, dk=16).run(3)


@pytest.mark.parametrize(
    "read, cut, tiles, ahead",
    [
        ("fp32", StepLaunch(block_v=8, width=16, warps=2), 1, True),
        ("fp16", StepLaunch(block_v=64, warps=1), 2, False),
        ("fp8", StepLaunch(block_v=32, warps=2), 2, True),
        ("nvfp4", StepLaunch(block_v=16, warps=4), 2, False),
    ],
)
def test_every_launch_gives_the_same(read: str, cut: StepLaunch, tiles: int, ahead: bool) -> None:
    bench = Bench("gdn", f"{read} / fp32 L=3", lag=1, heads=4, key_heads=2)
    bench.cache.step_cut = cut
    flush = TileLaunch(block_v=16, tiles=tiles, warps=1, per_sm=1, ahead=ahead)
    bench.cache.flush_cut = flush
    bench.run(4)


@pytest.mark.parametrize("name", ["fp32", "fp16", "fp16-sr", "bf16", "bf16-sr"])
@pytest.mark.parametrize("wide", [False, True])
def test_codes_are_the_formats_own(name: str, wide: bool) -> None:
    check_codes(name, wide)


@pytest.mark.parametrize("name", ["fp8", "fp8-sr", "nvfp4", "nvfp4-sr", "int8@row-sr", "int4@row"])
@pytest.mark.parametrize("wide", [False, True])
def test_scaled_codes_are_the_formats_own(name: str, wide: bool) -> None:
    check_codes(name, wide)


def check_codes(name: str, wide: bool) -> None:
    """Codes and scales, bit for bit, with the draws of the reference."""
    fmt = parse_format(name)
    for dv, dk in ((20, 64), (7, 128)):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(2, 3, dv, dk, generator=g)
        if wide:
            x = x * torch.exp(6 * torch.randn(x.shape, generator=g))
            x[0, 0, :, :16] = 0.0
            x[1, 2, 3, 5] = float("inf") if fmt.scale is None else 0.0
        store = StateStore.empty(fmt, slots=5, heads=3, dv=dv, dk=dk, device=DEVICE)
        slots = torch.tensor([4, 2], device=DEVICE)
        cursors = Cursors.empty(5, DEVICE)
        cursors.start(slots, torch.tensor(STREAMS, device=DEVICE))
        store.put(x.to(DEVICE), slots, cursors, seed=-5, layer=3, copy=1)
        words = sr_words(
            seed=-5, layer=3, copy=1, stream=torch.tensor(STREAMS), flush=0, heads=3, dv=dv, dk=dk
        )
        expected = encode(x, fmt, words if fmt.needs_words else None)
        ours = store.encoded(slots)
        assert torch.equal(ours.codes.cpu().to(torch.int64), expected.codes.to(torch.int64))
        if expected.scales is not None:
            assert torch.equal(ours.scales.cpu(), expected.scales)
        if expected.state_scale is not None:
            assert torch.equal(ours.state_scale.cpu(), expected.state_scale)


def test_nonfinite_blocks_decode_to_nan() -> None:
    x = torch.randn(1, 1, 16, 32)
    x[0, 0, 3, 5] = float("nan")
    for name in ("fp8", "nvfp4-sr"):
        fmt = parse_format(name)
        store = StateStore.empty(fmt, slots=1, heads=1, dv=16, dk=32, device=DEVICE)
        slots, cursors = torch.tensor([0], device=DEVICE), Cursors.empty(1, DEVICE)
        store.put(x.to(DEVICE), slots, cursors, seed=0, layer=0, copy=0)
        words = sr_words(
            seed=0, layer=0, copy=0, stream=torch.tensor([0]), flush=0, heads=1, dv=16, dk=32
        )
        expected = encode(x, fmt, words if fmt.needs_words else None)
        scales = store.encoded(slots).scales.cpu()
        if scales.dtype == torch.uint8:
            assert torch.equal(scales, expected.scales)
        else:
            assert torch.equal(scales.isnan(), expected.scales.isnan())


@pytest.mark.parametrize("policy", ["shared:fp16 L=3", "nvfp4 / fp16 L=3", "conventional:fp8"])
def test_the_first_store_that_is_not_finite_is_marked(policy: str) -> None:
    """FP16 overflows at 65520; a scaled block is lost to one NaN. The other slots stay unmarked."""
    bench = Bench("gdn", policy, lag=1)
    for t in range(8):
        if t == 4:
            bench.inputs.v[0] = float("nan") if "fp8" in policy else 1e6
        list(bench.step(t))
    # the first sequence, slot 4, took tokens 0 to 7: store 2 comes with token 5 (L = 3)
    assert bench.cursors.diverged[4] == (5 if bench.policy.window == 1 else 2)
    assert (bench.cursors.diverged[[0, 1, 2, 3, 5]] == -1).all()
    bench.cache.start(
        torch.full((1, 2, 16, 32), float("inf"), device=DEVICE),
        torch.tensor([2], device=DEVICE),
        bench.cursors,
    )
    assert bench.cursors.diverged[2] == 0


def test_other_slots_and_inputs_are_left_as_they_were() -> None:
    bench = Bench("gdn", "nvfp4 / fp16-sr L=3", lag=1)
    others = torch.tensor([0, 2, 3, 5], device=DEVICE)
    before = [x[others].clone() for x in bench.memory()]
    inputs = bench.inputs._map(lambda x: x.clone())
    bench.run(5)
    for x, y in zip(bench.memory(), before, strict=True):
        assert torch.equal(x[others].view(torch.uint8), y.view(torch.uint8))
    for name in ("q", "k", "v", "log_decay", "beta"):
        assert torch.equal(getattr(bench.inputs, name), getattr(inputs, name))


def test_strided_inputs_and_slots() -> None:
    """q, k, v as slices of one projection, a pool whose slots hold other layers' states too."""
    plain = Bench("gdn", "fp8 / fp16-sr L=3")
    paged = Bench("gdn", "fp8 / fp16-sr L=3")
    for name in ("recur", "read"):
        store = getattr(paged.cache, name)
        pools = {}
        for part in ("codes", "scales"):
            x = getattr(store, part)
            if x.numel():
                pools[part] = torch.cat([x, x, x], 1)[:, 2:4]
        setattr(paged.cache, name, replace(store, **pools))
    assert paged.cache.read.slot_states == 6
    for t in range(4):
        x = plain.inputs.slice(PROMPT + t, PROMPT + t + 1)
        wide = torch.zeros(2, 1, 128)
        parts, at = {}, 16
        for name in ("q", "k", "v"):
            part = getattr(x, name)
            n = part.shape[2] * part.shape[3]
            wide[..., at : at + n] = part.flatten(2)
            parts[name] = (at, n, part.shape[2:])
            at += n
        wide = wide.to(DEVICE)
        views = {n: wide[..., a : a + m].unflatten(2, tuple(s)) for n, (a, m, s) in parts.items()}
        scalars = {
            n: torch.stack([getattr(x, n)] * 3, -1).to(DEVICE)[..., 1]
            for n in ("log_decay", "beta")
        }
        strided = replace(on_device(x), **views, **scalars)
        outs = []
        for bench, given in ((plain, on_device(x)), (paged, strided)):
            out = torch.empty(2, 2, 16, device=DEVICE)
            plan = Plan.empty(2, DEVICE)
            advance(torch.tensor([4, 1], device=DEVICE), bench.cursors, plan, window=3)
            bench.cache.step(given, plan, bench.cursors, out)
            outs.append(out)
        assert torch.equal(outs[0], outs[1])
    slots = torch.tensor([4, 1], device=DEVICE)
    assert torch.equal(plain.cache.recur.values(slots), paged.cache.recur.values(slots))


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    """The batch moves no bit of what is stored."""
    both = Bench("gdn", "nvfp4 / fp8-sr L=3")
    alone = Bench("gdn", "nvfp4 / fp8-sr L=3", lag=1000)
    for t in range(4):
        outputs = [[o for _, o, _ in bench.step(t)] for bench in (both, alone)]
        assert torch.equal(outputs[0][0], outputs[1][0])
    for name in ("recur", "read"):
        assert torch.equal(both.stored(name, 0), alone.stored(name, 0))


def test_plan_sorts_rows_and_moves_cursors() -> None:
    cursors = Cursors.empty(8, DEVICE)
    cursors.count.copy_(torch.tensor([0, 3, 1, 3, 2, 0, 3, 1]))
    cursors.flush.copy_(torch.arange(8))
    slots = torch.tensor([6, -1, 2, 5, 1, -1, 7], device=DEVICE)
    plan = Plan.empty(7, DEVICE)
    advance(slots, cursors, plan, window=4)
    assert plan.counts.tolist() == [3, 2]
    lines = plan.lines[:, :5].tolist()
    assert lines[0] == [2, 3, 6, 0, 4] and lines[1] == [2, 5, 7, 6, 1]
    assert lines[2] == [1, 0, 1, 3, 3] and lines[3] == [2, 5, 7, 6, 1]
    assert cursors.count.tolist() == [0, 0, 2, 3, 2, 1, 0, 2]
    assert cursors.flush.tolist() == [0, 2, 2, 3, 4, 5, 7, 7]


def test_a_batch_of_padded_rows() -> None:
    bench = Bench("gdn", "shared:fp32 L=3")
    out = torch.full((3, 2, 16), float("nan"), device=DEVICE)
    advance(torch.full((3,), -1, device=DEVICE), bench.cursors, bench.plan, window=3)
    x = bench.inputs.slice(0, 1)
    x = x.rows(torch.tensor([0, 1, 1]))
    bench.cache.step(on_device(x), bench.plan, bench.cursors, out)
    assert out.isnan().all() and bench.plan.counts.tolist() == [0, 0]


def test_programs_share_items_evenly() -> None:
    device = torch.device("cpu")
    assert programs(7, 2, device) == 4  # two multiprocessors of two: 4 at once, 2 rounds
    assert programs(3, 2, device) == 3
    assert programs(9, 2, device) == 3


def test_what_the_kernels_lack_is_refused() -> None:
    inputs = sample_inputs("gdn", dtype=torch.float32, **BASE)
    keys = {"slots": 2, "layer": 0, "seed": 0}
    with pytest.raises(ValueError, match="windows of up to 64"):
        LayerCache.empty(parse_policy("shared:fp8 L=65"), inputs, **keys)
    with pytest.raises(ValueError, match=r"do not have int6@row; they have .* int4@row"):
        LayerCache.empty(parse_policy("shared:int6@row"), inputs, **keys)
    with pytest.raises(ValueError, match="dk of 16, 32, 64 or 128"):
        odd = sample_inputs("gdn", dtype=torch.float32, heads=1, key_heads=1, dv=8, dk=48)
        LayerCache.empty(parse_policy("shared:fp8"), odd, **keys)
    with pytest.raises(UsageError, match="store all heads of a layer alike"):
        LayerCache.empty(parse_policy("shared:fp8 only=0.0"), inputs, **keys)
    with pytest.raises(ValueError, match="4096 rows"):
        Plan.empty(5000, DEVICE)
    cache = LayerCache.empty(parse_policy("shared:fp8"), inputs, **keys)
    with pytest.raises(ValueError, match="this cache takes v"):
        out = torch.empty(2, 2, 16)
        cache.step(inputs.slice(0, 2), Plan.empty(2, DEVICE), Cursors.empty(2, DEVICE), out)


def test_a_study_is_refused_before_its_model_is_loaded() -> None:
    policies = (parse_policy("shared:fp8 L=65"),)
    wanted = make_spec(device="cuda", engine="stepwise", model="no/such", policies=policies)
    with pytest.raises(UsageError, match="windows of up to 64"):
        Backend().load(wanted)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_one_graph_serves_all_positions() -> None:
    from quantlab_kernels.decode_smoke import check_graph

    row = check_graph()
    assert row["ok"], row
