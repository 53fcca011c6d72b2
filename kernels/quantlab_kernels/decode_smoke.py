"""Self-check and tuning of the decode kernels on a GPU: `python -m quantlab_kernels.decode_smoke`.

1. Codes: states stored by the kernels against `quantlab.formats.encode` on the CPU, bit for bit.
2. Steps: two windows with rows at different cursors against `quantlab.replay.StepwiseCache` on the
   CPU, each window from the values that the kernels stored; and one captured CUDA graph that serves
   all positions.
3. Times at the paper's shapes: the ceiling (a copy and a sum in this run), conventional steps, then
   steps without and with a flush and whole windows, with the bytes of `quantlab.analysis.traffic`
   as fractions of the ceiling. A sweep of launches at the largest batch picks what the rest uses.

A case that fails is reported and the next one runs. The last line is one JSON document; the exit
code is 1 if a comparison or a case failed. Under four minutes with 16 cores, mostly compilation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import triton

from quantlab.analysis.traffic import (
    PAPER_SHAPES,
    LayerShape,
    conventional_bytes,
    flush_bytes,
    record_bytes,
    step_bytes,
    window_bytes,
)
from quantlab.formats import encode, parse_format
from quantlab.formats.philox import sr_words
from quantlab.replay import Policy, StepwiseCache, parse_policy
from quantlab_kernels.decode import LayerCache
from quantlab_kernels.decode_launch import StepLaunch, TileLaunch, flush_launch, step_launch
from quantlab_kernels.decode_plan import Cursors, Plan, advance
from quantlab_kernels.decode_store import StateStore
from quantlab_kernels.decode_trial import Trial
from quantlab_kernels.smoke import make_inputs, to_device

Cut = StepLaunch | TileLaunch
SEED = 2**63 + 5
OUTPUT_BOUND = 3e-6
"""Relative to the largest output: sums of 144 FP32 products in another order."""
FLIP_BOUND = 5e-3
"""Share of stored elements that may differ by a code after a window."""
ROUNDED_BOUND = 1e-3
"""Of outputs where a record of u is FP16: one flipped record moves them by its last place."""
STEP_POLICIES = (
    "shared:fp32",
    "shared:fp32 corrections=fold",
    "shared:fp16-sr",
    "shared:fp8-sr",
    "shared:nvfp4-sr",
    "fp16 / fp16-sr",
    "fp8 / fp16-sr",
    "nvfp4 / fp16-sr",
    "bf16 / fp8-sr",
    "nvfp4 / fp32 L=5",
    "conventional",
    "conventional:fp16-sr",
    "conventional:fp8-sr",
    "conventional:nvfp4-sr",
    "int8@row / int8@row-sr",
    "int4@row / fp16-sr",
)
TIMED = (
    "shared:fp32 corrections=fold",
    "shared:fp32",
    "fp16 / fp16-sr",
    "fp8 / fp16-sr",
    "nvfp4 / fp16-sr",
)
BATCHES = (256, 32, 1)
SWEPT = (0, 1, 2)
"""Paper shapes whose launches are swept, one of each dv; others take what was best there."""


def check_codes(name: str, device: str) -> dict[str, Any]:
    """Compare stored codes and scales with the reference's."""
    fmt = parse_format(name)
    worst = 0
    for wide, (dv, dk) in ((False, (128, 128)), (True, (80, 128)), (True, (20, 64))):
        g = torch.Generator().manual_seed(1)
        x = torch.randn(2, 3, dv, dk, generator=g)
        if wide:
            x = x * torch.exp(6 * torch.randn(x.shape, generator=g))
        store = StateStore.empty(fmt, slots=4, heads=3, dv=dv, dk=dk, device=device)
        slots, streams = torch.tensor([3, 1]), torch.tensor([7, 2**31 + 1])
        cursors = Cursors.empty(4, device)
        cursors.start(slots.to(device), streams.to(device))
        store.put(x.to(device), slots.to(device), cursors, seed=SEED, layer=3, copy=1)
        words = sr_words(seed=SEED, layer=3, copy=1, stream=streams, flush=0, heads=3, dv=dv, dk=dk)
        theirs = encode(x, fmt, words if fmt.needs_words else None)
        ours = store.encoded(slots.to(device))
        worst += int((ours.codes.cpu().to(torch.int64) != theirs.codes.to(torch.int64)).sum())
        for a, b in ((ours.scales, theirs.scales), (ours.state_scale, theirs.state_scale)):
            if b is not None:
                worst += int((a.cpu() != b).sum())
    return {"ok": worst == 0, "differing": worst}


def check_steps(text: str, family: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Run rows at different cursors and compare outputs and stored values with the cache."""
    policy = parse_policy(text)
    lag, steps = min(3, policy.window), 2 * policy.window + 4
    inputs = make_inputs(family, 2, steps, device="cpu", seed=3, dtype=dtype)
    slots, streams = (2, 0), (5, 9)
    cache = LayerCache.empty(policy, to_device(inputs, device), slots=4, layer=1, seed=SEED)
    for x in (cache.keys, cache.values, cache.written, cache.logs, cache.strengths):
        if x.is_floating_point():
            x.fill_(float("nan"))  # a record read before it was written would be seen
    cursors, plan = Cursors.empty(4, device), Plan.empty(3, device)
    references = []
    g = torch.Generator().manual_seed(4)
    for i in range(2):
        state = torch.randn(1, inputs.heads, inputs.dv, inputs.dk, generator=g)
        reference = StepwiseCache([policy], torch.tensor([streams[i]]), layer=1, seed=SEED)
        reference.start(state)
        references.append(reference.caches[0])
        slot = torch.tensor([slots[i]], device=device)
        cursors.start(slot, torch.tensor([streams[i]], device=device))
        cache.start(state.to(device), slot, cursors)
        references[i] = reference
    worst = share = 0.0
    padded = True
    for t in range(steps):
        at = [t, t - lag]
        rows = [
            inputs.rows(slice(i, i + 1)).slice(max(a, 0), max(a, 0) + 1) for i, a in enumerate(at)
        ]
        fields = {
            n: torch.cat([getattr(rows[i], n) for i in (0, 0, 1)])
            for n in ("q", "k", "v", "log_decay", "beta", "dt")
            if getattr(inputs, n) is not None
        }
        where = [slots[0], -1, slots[1] if at[1] >= 0 else -1]
        out = torch.full((3, inputs.heads, inputs.dv), float("nan"), device=device)
        advance(torch.tensor(where, device=device), cursors, plan, window=policy.window)
        cache.step(to_device(replace(rows[0], **fields), device), plan, cursors, out)
        out = out.cpu()
        padded &= bool(out[1].isnan().all())
        for i in range(2):
            if at[i] < 0:
                continue
            expected = references[i](rows[i])[0, 0]
            error = float((out[2 * i] - expected).abs().max() / expected.abs().max())
            worst = max(worst, error if error == error else float("inf"))
            held = references[i].caches[0]
            if held.buffer:
                continue
            for name in ("recur", "read") if policy.kind == "separate" else ("recur",):
                slot = torch.tensor([slots[i]], device=device)
                ours, theirs = getattr(cache, name).values(slot).cpu(), getattr(held, name)
                off = (ours - theirs).abs() > 1e-5 * torch.maximum(ours.abs(), theirs.abs())
                if getattr(policy, name).is_exact:
                    off = (ours - theirs).abs() > OUTPUT_BOUND * theirs.abs().max()
                share = max(share, float(off.float().mean()))
                setattr(held, name, ours)
    bound = OUTPUT_BOUND if cache.written_record == "fp32" or not cache.delta else ROUNDED_BOUND
    flips = FLIP_BOUND if bound == OUTPUT_BOUND else 10 * FLIP_BOUND
    return {
        "ok": worst < bound and share < flips and padded,
        "worst": worst,
        "share": share,
        "padded": padded,
    }


def check_graph() -> dict[str, Any]:
    """Replay one captured step over two windows, rows at different positions, against no graph."""
    policy = parse_policy("nvfp4 / fp16-sr L=4")
    inputs = make_inputs("gdn", 3, 1, device="cuda", seed=5, dtype=torch.bfloat16)
    state = torch.randn(3, inputs.heads, inputs.dv, inputs.dk, device="cuda")
    slots = torch.tensor([1, -1, 2], device="cuda", dtype=torch.int32)
    results = []
    for captured in (False, True):
        cache = LayerCache.empty(policy, inputs, slots=3, layer=0, seed=SEED)
        cursors, plan = Cursors.empty(3, "cuda"), Plan.empty(3, "cuda")
        live = torch.tensor([1, 2], device="cuda")
        cursors.start(live, live)
        cache.start(state[:2].contiguous(), live, cursors)
        out = torch.full((3, inputs.heads, inputs.dv), float("nan"), device="cuda")

        def step(cache=cache, cursors=cursors, plan=plan, out=out) -> None:
            advance(slots, cursors, plan, window=4)
            cache.step(inputs, plan, cursors, out)

        graph = torch.cuda.CUDAGraph()
        if captured:  # the kernels are compiled by now, and capturing runs nothing
            with torch.cuda.graph(graph):
                step()
        cursors.count[1] = 0
        outputs = []
        for t in range(9):
            slots[2] = 2 if t >= 1 else -1  # the third row starts a step later
            if captured:
                graph.replay()
            else:
                step()
            outputs.append(out.clone())
        results.append((torch.stack(outputs[1:]), cache.recur.values(live)))
    (a, sa), (b, sb) = results
    same = torch.equal(a[:, [0, 2]], b[:, [0, 2]]) and torch.equal(sa, sb)
    return {"ok": bool(same and a[:, [0, 2]].isfinite().all() and a[:, 1].isnan().all())}


class Timing(Trial):
    """A layer at a paper shape and batch, and the times of its launches."""

    def microseconds(self, counts: list[int], launch: Callable[[Plan], None]) -> float:
        """Time launches in one graph, a set of slots each; median over replays, per launch."""
        rounds = max(1, -(-self.sets // len(counts)), 16 // len(counts))
        rounds = min(rounds, 8)
        plans = [self.plan(i, c) for i, c in enumerate(counts * rounds)]
        launch(plans[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for plan in plans:
                launch(plan)
        times = []
        for _ in range(9):
            start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / len(plans))
        return statistics.median(times[2:])


def launches(shape: LayerShape, fmt: str, batch: int) -> list[StepLaunch]:
    """List launches of a step to try, the table's first."""
    first = step_launch(
        fmt,
        rows=batch,
        heads=shape.heads,
        key_heads=shape.key_heads,
        dv=shape.dv,
        dk=shape.dk,
        per_channel=shape.per_channel,
    )
    if fmt == "fp32":
        tries = [
            first,
            replace(first, block_v=64, warps=4, registers=None),
            replace(first, block_v=32, warps=2, registers=128),
            replace(first, block_v=32, warps=4, registers=80),
            replace(first, block_v=32, warps=4, registers=64),
            replace(first, block_v=128, warps=8, registers=128),
            replace(first, overlap=not first.overlap),
        ]
    else:
        tries = [
            first,
            replace(first, block_v=128, warps=4, registers=128),
            replace(first, block_v=128, warps=4, registers=96),
            replace(first, block_v=128, warps=4, registers=80),
            replace(first, block_v=64, warps=4),
            replace(first, block_v=64, warps=2),
            replace(first, overlap=not first.overlap),
            replace(first, block_v=128, warps=8),
        ]
    return [c for i, c in enumerate(tries) if c not in tries[:i]]


def flushes(shape: LayerShape, formats: tuple[str, str], batch: int) -> list[TileLaunch]:
    """List launches of a flush to try, the table's first."""
    first = flush_launch(
        formats,
        rows=batch,
        heads=shape.heads,
        dv=shape.dv,
        dk=shape.dk,
        per_channel=shape.per_channel,
    )
    if "nvfp4" in formats:
        tries = [
            first,
            replace(first, per_sm=2, registers=128),
            replace(first, ahead=not first.ahead),
        ]
    else:
        tries = [
            first,
            replace(first, per_sm=3, registers=168),
            replace(first, per_sm=6, registers=168),
            replace(first, per_sm=2, registers=None),
            replace(first, per_sm=4, registers=128),
            replace(first, tiles=1),
            replace(first, ahead=not first.ahead),
            replace(first, block_v=min(64, max(16, shape.dv)), tiles=1, warps=4, per_sm=2),
        ]
    return [c for i, c in enumerate(tries) if c not in tries[:i]]


def all_launches(shape: LayerShape, policy: Policy, batch: int) -> list[Cut]:
    """List launches of both kinds."""
    read, recur = (f.short.removesuffix("-sr") for f in (policy.read, policy.recur))
    return [*launches(shape, read, batch), *flushes(shape, (recur, read), batch)]


def swept(
    cuts: Sequence[Cut], use: Callable[[Cut], None], measure: Callable[[], float]
) -> dict[Cut, float]:
    """Time launches; one that does not run is said and left out."""
    tried = {}
    for cut in cuts:
        try:
            use(cut)
            tried[cut] = measure()
        except Exception as error:
            sys.stderr.write(f"{cut}: {type(error).__name__}: {str(error)[:200]}\n")
    return tried


def ceiling() -> dict[str, float]:
    """Measure a device copy (bytes read and written) and a sum (read), TB/s."""
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    rates = {}
    for name, run, moved in (("copy", lambda: y.copy_(x), 2), ("read", lambda: x.sum(), 1)):
        times = []
        for _ in range(12):
            start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        rates[name] = moved * 4 * x.numel() / statistics.median(times[2:]) / 1e9
    return rates


def guarded(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run one case; an error becomes its row, so that it hides no other."""
    try:
        return work(*arguments)
    except Exception as error:
        traceback.print_exc(limit=4, file=sys.stderr)
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}


def checked_case(case: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Run one comparison in a worker."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    kind, *rest = case
    if kind == "codes":
        return f"codes {rest[0]}", guarded(check_codes, rest[0], rest[1])
    text, family, dtype, device = rest
    row = guarded(check_steps, text, family, getattr(torch, dtype), device)
    return f"steps {family} {parse_policy(text).short} {dtype}", row


def compiled_case(case: tuple[int, str, Cut]) -> None:
    """Compile one launch in a worker: a batch of one row runs it, Triton's cache keeps it."""
    index, text, cut = case
    try:
        timing = Timing(PAPER_SHAPES[index], parse_policy(text), 1, settle=0)
        if isinstance(cut, StepLaunch):
            timing.cache.step_cut = cut
        else:
            timing.cache.flush_cut = cut
        timing.compile()
        torch.cuda.synchronize()
    except Exception:
        traceback.print_exc(limit=2, file=sys.stderr)  # timed again, and reported, in its place


def timed(
    shape: LayerShape,
    text: str,
    batch: int,
    rates: dict[str, float],
    cuts: dict[str, Cut],
    sweep: bool,
) -> dict[str, Any]:
    """Time one policy at one shape and batch; a sweep first, if asked for."""
    timing = Timing(shape, parse_policy(text), batch)
    policy, cache = timing.policy, timing.cache
    record = record_bytes(shape, rederive=cache.rederives)
    if policy.window == 1:
        us = timing.microseconds(*timing.window())
        moved = batch * float(conventional_bytes(shape, policy.recur).total)
        return {"ok": True, "us": us, "of_copy": moved / us / 1e6 / rates["copy"]}
    row: dict[str, Any] = {"ok": True}
    key = f"{shape.delta} {shape.dv} {policy.short} {cache.rederives}"
    if sweep:
        kinds = {
            "step": (launches(shape, cache.read.name, batch), timing.steps()),
            "flush": (
                flushes(shape, (cache.recur.name, cache.read.name), batch),
                timing.flush(),
            ),
        }
        row["tried"] = []
        for kind, (tries, work) in kinds.items():
            tried = swept(
                tries,
                lambda cut, kind=kind: setattr(cache, f"{kind}_cut", cut),
                lambda work=work: timing.microseconds(*work),
            )
            cuts[f"{kind} {key}"] = min(tried, key=lambda c: tried[c])
            row["tried"] += [[round(us, 2), {kind: asdict(cut)}] for cut, us in tried.items()]
    if batch >= 256 and f"step {key}" in cuts:
        cache.step_cut, cache.flush_cut = cuts[f"step {key}"], cuts[f"flush {key}"]
    kinds = (timing.steps(), timing.flush(), timing.window())
    steps, flush, window = (timing.microseconds(*kind) for kind in kinds)
    read = policy.read if policy.kind == "separate" else None
    last = policy.window - 1
    middle = sum(float(step_bytes(shape, policy.read, record, count=h).total) for h in range(last))
    flushed = float(flush_bytes(shape, policy.recur, read, record, window=policy.window).total)
    whole = float(window_bytes(shape, policy.recur, read, record, window=policy.window))
    states = float(shape.state_bytes(policy.read))
    row |= {
        "steps_us": steps,
        "flush_us": flush,
        "window_us": window,
        "states_of_read": batch * states / steps / 1e6 / rates["read"],
        "steps_of_read": batch * middle / last / steps / 1e6 / rates["read"],
        "flush_of_copy": batch * flushed / flush / 1e6 / rates["copy"],
        "window_of_copy": batch * whole / policy.window / window / 1e6 / rates["copy"],
    }
    return row


def report(name: str, row: dict[str, Any], results: dict[str, Any]) -> None:
    """Print one row and keep it."""
    results[name] = row
    shown = {k: v for k, v in row.items() if k != "tried"}
    text = " ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()
    )
    sys.stdout.write(f"{name:58s} {text}\n")
    for us, cut in sorted(row.get("tried", []), key=lambda x: x[0]):
        sys.stdout.write(f"    {us:8.2f} us {cut}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, then the times."""
    parser = argparse.ArgumentParser(description="Self-check and tuning of the decode kernels.")
    parser.add_argument("--quick", action="store_true", help="comparisons only")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile and compare")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="run what has this text in its name")
    parser.add_argument("--seconds", type=float, default=220, help="start no case after this long")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    results: dict[str, Any] = {"triton": triton.__version__, "torch": torch.__version__}
    names = ("fp32", "fp16", "fp16-sr", "bf16", "bf16-sr", "fp8", "fp8-sr", "nvfp4", "nvfp4-sr")
    names += ("int8@row-sr", "int4@row-sr")
    cases = [("codes", name, options.device) for name in names]
    for family in ("gdn", "mamba2", "kda"):
        few = STEP_POLICIES if family != "kda" else STEP_POLICIES[3:8]
        cases += [("steps", text, family, "float32", options.device) for text in few]
        cases += [
            ("steps", text, family, "bfloat16", options.device) for text in STEP_POLICIES[5:8]
        ]
    cases = [case for case in cases if options.only in " ".join(case)]
    sweeps = [(shape, i) for i, shape in enumerate(PAPER_SHAPES) if i in SWEPT]
    compiled = [
        (i, text, cut)
        for shape, i in sweeps
        for text in TIMED
        if options.only in text
        for cut in all_launches(shape, parse_policy(text), BATCHES[0])
    ]
    if options.jobs > 1:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            pending = None
            if not options.quick:
                pending = pool.map_async(compiled_case, compiled, chunksize=2)
            for name, row in pool.imap(checked_case, cases, chunksize=1):
                report(name, row, results)
            if pending is not None:
                pending.wait(max(1.0, options.seconds * 0.6 - (time.perf_counter() - began)))
    else:
        for case in cases:
            report(*checked_case(case), results)
    if options.device == "cuda":
        report("one graph, all positions", guarded(check_graph), results)
    if not options.quick:
        results["gpu"] = torch.cuda.get_device_name()
        rates = ceiling()
        report("ceiling TB/s", {"ok": True, **rates}, results)
        cuts: dict[str, Cut] = {}
        order = (2, 1, 3, 0)
        for batch in BATCHES:
            for index in order:
                shape = PAPER_SHAPES[index]
                for text in ("conventional", "conventional:fp16-sr", *TIMED):
                    name = f"{shape.name} B={batch} {text}"
                    fold_alone = "fold" in text and not shape.delta
                    if options.only not in name or fold_alone:
                        continue
                    if time.perf_counter() - began > options.seconds:
                        report(name, {"ok": True, "skipped": "out of time"}, results)
                        continue
                    sweep = batch == BATCHES[0] and index in SWEPT
                    report(name, guarded(timed, shape, text, batch, rates, cuts, sweep), results)
                    torch.cuda.empty_cache()
    rows = [row for row in results.values() if isinstance(row, dict)]
    results["failed"] = sum(not row["ok"] for row in rows)
    results["seconds"] = time.perf_counter() - began
    sys.stdout.write(json.dumps(results) + "\n")
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
