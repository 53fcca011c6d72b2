"""Decode kernels, one layer: conventional steps, and replay's steps, flushes and windows.

Shapes are those of the paper's Table 5, inputs BF16, states and records random, several sets of
states in turn so that the cache is cold, launches behind each other in one graph. A policy is
checked on the very memory it is timed on: two steps of a batch at mixed positions against
`quantlab.replay.stepwise`. The bytes are the traffic model's (`quantlab.analysis.traffic`); what is
reached is told as a fraction of a copy or a sum measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quantlab.analysis.traffic import (
    PAPER_SHAPES,
    LayerShape,
    conventional_bytes,
    flush_bytes,
    record_bytes,
    step_bytes,
    window_bytes,
)
from quantlab.bench.measure import Bench, Row
from quantlab.dispatch import compiling, decode_trial
from quantlab.replay import Policy, parse_policy

CONVENTIONAL = parse_policy("conventional:fp32")
FP32 = parse_policy("shared:fp32")
READS = tuple(parse_policy(f"{fmt} / fp16-sr") for fmt in ("fp16", "fp8", "nvfp4"))
POLICIES = (
    CONVENTIONAL,
    parse_policy("conventional:fp16-sr"),
    FP32,
    parse_policy("shared:fp32 corrections=fold"),
    *READS,
)
BATCHES = (1, 32, 256)
SWEPT_BATCHES = (2, 4, 8, 16, 64, 128, 512)
SWEPT_WINDOWS = (2, 4, 8, 32, 64)
SWEPT = (CONVENTIONAL, FP32, READS[-1])
CEILING_ELEMENTS = 1 << 29
MOST_LAUNCHES = 128
"""Of a graph."""
PEERS_US = {
    ("Nemotron-3-Nano-4B", 256): 525.6,
    ("Nemotron-3-Super-120B", 256): 558.3,
    ("Qwen3.5-4B", 256): 269.7,
    ("Qwen3.5-122B-A10B", 256): 530.3,
    ("Nemotron-3-Nano-4B", 32): 69.2,
    ("Qwen3.5-4B", 32): 41.8,
}
"""Conventional FP32 decode by vLLM's kernels at their best launch, by shape and batch, µs a layer.
Measured beforehand on one H200 (CUDA 13.0, torch 2.11, Triton 3.6), cold cache, as here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One policy at one shape and batch."""

    shape: LayerShape
    policy: Policy
    batch: int

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{self.shape.name} B={self.batch} {self.policy.short}"


def cases(
    shapes: Sequence[LayerShape] = PAPER_SHAPES,
    batches: Sequence[int] = BATCHES,
    *,
    sweeps: bool = True,
) -> list[Case]:
    """List what is measured, what the others are compared with first."""
    wanted = [
        Case(shape=shape, policy=policy, batch=batch)
        for batch in sorted(batches, reverse=True)
        for shape in shapes
        for policy in POLICIES
        if shape.delta or policy.corrections != "fold"
    ]
    if sweeps:
        by_name = {shape.name: shape for shape in shapes}
        swept = [by_name[n] for n in ("Qwen3.5-4B", "Nemotron-3-Nano-4B") if n in by_name]
        for shape in swept:
            wanted += [
                Case(shape=shape, policy=policy, batch=batch)
                for batch in SWEPT_BATCHES
                for policy in SWEPT
            ]
        for shape in swept[:1]:
            wanted += [
                Case(shape=shape, policy=parse_policy(f"{text} L={window}"), batch=max(batches))
                for window in SWEPT_WINDOWS
                for text in ("shared:fp32", "nvfp4 / fp16-sr")
            ]
    return list(dict.fromkeys(wanted))


def tiny_cases() -> list[Case]:
    """List cases that test the harness."""
    shapes = [
        LayerShape(name="gdn", heads=2, key_heads=1, dv=16, dk=32, delta=True, query_bytes=4),
        LayerShape(name="mamba2", heads=2, key_heads=1, dv=16, dk=32, delta=False),
    ]
    texts = ("conventional:fp32", "shared:fp32 L=3", "nvfp4 / fp16-sr L=3")
    return [
        Case(shape=shape, policy=parse_policy(text), batch=2) for shape in shapes for text in texts
    ]


def bench_decode(
    bench: Bench,
    wanted: Iterable[Case],
    *,
    jobs: int = 0,
    ceiling_elements: int = CEILING_ELEMENTS,
    trial: type[Any] | None = None,
) -> Iterator[Row]:
    """Measure cases, in order.

    Args:
        bench: where.
        wanted: what.
        jobs: kernels compiled at once before anything is timed; 0 leaves it to the first launch.
        ceiling_elements: FP32 elements that the ceilings are measured on.
        trial: instead of the kernels' own, to test the check.
    """
    wanted = list(wanted)
    if jobs:
        compile_ahead(wanted, jobs, bench.device)
    copy, read = bench.copy_rate(ceiling_elements), bench.read_rate(ceiling_elements)
    yield Row(name="ceiling", values={"copy_tb_per_s": copy / 1e12, "read_tb_per_s": read / 1e12})
    done: dict[str, Row] = {}
    for case in wanted:
        row = case_row(bench, case, copy=copy, read=read, done=done, trial=trial)
        done[row.name] = row
        yield row
        if bench.on_cuda:
            torch.cuda.empty_cache()


def case_row(
    bench: Bench,
    case: Case,
    *,
    copy: float,
    read: float,
    done: dict[str, Row],
    trial: type[Any] | None = None,
) -> Row:
    """Measure one case.

    Args:
        bench: where.
        case: what.
        copy: bytes a second of a copy.
        read: of a sum.
        done: rows before it, which it is compared with.
        trial: instead of the kernels' own.
    """
    try:
        settle = {} if bench.on_cuda else {"settle": 0.0}
        built = (trial or decode_trial())(
            case.shape, case.policy, case.batch, device=bench.device, **settle
        )
        fault = built.fault()
        if fault is not None:
            return Row(name=case.name, status="refused", reason=fault)
        if case.policy.window == 1:
            values = _conventional(bench, case, built, copy)
        else:
            values = _replay(bench, case, built, copy, read)
    except Exception as error:
        # one broken case must not hide the others
        return Row(
            name=case.name, status="refused", reason=f"{type(error).__name__}: {error}"[:300]
        )
    return Row(name=case.name, values=values | _compared(case, values, done))


def microseconds(bench: Bench, built: Any, kind: tuple[list[int], Any]) -> float:
    """Time launches at all positions of a kind, a set of states each: median, per launch."""
    counts, launch = kind
    rounds = max(1, -(-built.sets // len(counts)), 16 // len(counts)) if bench.on_cuda else 1
    rounds = max(1, min(rounds, MOST_LAUNCHES // len(counts)))
    plans = [built.plan(i, count) for i, count in enumerate(counts * rounds)]
    return bench.in_turn([partial(launch, plan) for plan in plans]).median * 1e6


def _conventional(bench: Bench, case: Case, built: Any, copy: float) -> dict[str, float]:
    us = microseconds(bench, built, built.window())
    moved = case.batch * float(conventional_bytes(case.shape, case.policy.recur).total)
    return {"window_us": us, "megabytes": moved / 1e6, "window_of_copy": moved / us * 1e6 / copy}


def _replay(bench: Bench, case: Case, built: Any, copy: float, read: float) -> dict[str, float]:
    shape, policy, batch, window = case.shape, case.policy, case.batch, case.policy.window
    kinds = (built.steps(), built.flush(), built.window())
    steps, flush, whole = (microseconds(bench, built, kind) for kind in kinds)
    record = record_bytes(shape, rederive=built.cache.rederives)
    other = policy.read if policy.kind == "separate" else None
    last = window - 1
    step_moved = batch * float(
        sum(step_bytes(shape, policy.read, record, count=h).total for h in range(last)) / last
    )
    flush_moved = batch * float(
        flush_bytes(shape, policy.recur, other, record, window=window).total
    )
    window_moved = batch * float(window_bytes(shape, policy.recur, other, record, window=window))
    conventional = batch * window * float(conventional_bytes(shape, CONVENTIONAL.recur).total)
    states = batch * float(shape.state_bytes(policy.read))
    return {
        "window_us": whole,
        "step_us": steps,
        "flush_us": flush,
        "step_megabytes": step_moved / 1e6,
        "flush_megabytes": flush_moved / 1e6,
        "states_of_read": states / steps * 1e6 / read,
        "step_of_read": step_moved / steps * 1e6 / read,
        "flush_of_copy": flush_moved / flush * 1e6 / copy,
        "window_of_copy": window_moved / window / whole * 1e6 / copy,
        "bound_over_conventional": conventional / window_moved,
    }


def _compared(case: Case, values: dict[str, float], done: dict[str, Row]) -> dict[str, float]:
    """Form ratios to rows that came before, where they have a speed."""
    found: dict[str, float] = {}
    peer = PEERS_US.get((case.shape.name, case.batch))
    if peer is not None:
        found["over_peer"] = peer / values["window_us"]

    def before(policy: Policy) -> dict[str, float] | None:
        name = Case(shape=case.shape, policy=policy, batch=case.batch).name
        row = done.get(name)
        return row.values if row is not None and row.status == "ok" else None

    conventional = before(CONVENTIONAL)
    if conventional is not None:
        found["over_conventional"] = conventional["window_us"] / values["window_us"]
        if "flush_us" in values:
            found["flush_over_conventional"] = values["flush_us"] / conventional["window_us"]
    plain = before(FP32)
    if plain is not None and "step_us" in values:
        found["step_over_fp32"] = plain["step_us"] / values["step_us"]
        found["window_over_fp32"] = plain["window_us"] / values["window_us"]
    return found


def compile_ahead(wanted: Sequence[Case], jobs: int, device: torch.device) -> None:
    """Compile the kernels of cases side by side, each launched as for its batch, by one row.

    What fails to compile fails again, and is told, where it is measured.
    """
    build = decode_trial()
    with compiling(jobs):
        for case in wanted:
            with suppress(Exception):
                keys = {"device": device, "settle": 0.0, "launches_for": case.batch}
                build(case.shape, case.policy, 1, **keys).compile()
