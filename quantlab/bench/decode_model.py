"""A whole model step: embedding to logits of every row, one captured graph, by policy and batch.

All rows start behind one prompt and decode two windows of fixed tokens after the first; the time is
the mean of a step over whole windows, so that flushes count as often as they come. The conventional
FP32 policy's logits are checked against the model's own forward before anything is timed, every
other policy's against those.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quantlab.bench.decode import CONVENTIONAL, FP32, READS
from quantlab.bench.engine import QWEN, TINY, build_model
from quantlab.bench.measure import Bench, Row, new_event
from quantlab.engine.decoder import Decoder, Prompt, prefill
from quantlab.models import LoadedModel, forward_hidden, head, load_model
from quantlab.replay import Policy, parse_policy

BATCHES = (1, 32, 256)
POLICIES = (CONVENTIONAL, FP32, *READS)
PROMPT = 32
CHECKED = 4
"""Steps that are checked; no policy stores before the end of its window but conventional ones."""
WINDOWS = 2
SEED = 11
LOGITS = 0.1
"""Bound on the RMS difference from the model's own logits over their RMS: two BF16 forwards in
other orders, as in the engine's benchmark."""
ROUNDED_LOGITS = 0.5
"""The same from the FP32 policy's logits where states are stored in 4 to 16 bits; the outputs of a
wrong recurrence are off by their own size and more."""


def models(bench: Bench, *, quick: bool) -> Iterator[tuple[str, LoadedModel, dict[str, Any]]]:
    """Load or make the models that are measured, one at a time, with the sizes to measure."""
    if quick:
        policies = [parse_policy(p) for p in ("conventional:fp32", "nvfp4 / fp16-sr L=3")]
        yield "tiny", build_model(TINY, bench.device), {"batches": [2], "policies": policies}
        return
    yield "tiny-gdn", load_model("tiny-gdn", device=str(bench.device), dtype=torch.bfloat16), {}
    yield QWEN.name, build_model(QWEN, bench.device), {}


def bench_model(
    bench: Bench,
    m: LoadedModel,
    name: str,
    *,
    batches: Sequence[int] = BATCHES,
    policies: Sequence[Policy] = POLICIES,
    implementation: Any = "triton",
    build: Callable[..., Decoder] = Decoder,
) -> Iterator[Row]:
    """Measure the model at several batches under several policies.

    Args:
        bench: where.
        m: the model.
        name: of the model; row names start with it.
        batches: numbers of rows.
        policies: the conventional FP32 one first.
        implementation: of the states.
        build: instead of the decoder, to test the check.
    """
    generator = torch.Generator().manual_seed(SEED)
    most = max(policy.window for policy in policies)
    ids = torch.randint(3, m.vocab_size, (1, PROMPT + CHECKED), generator=generator).to(m.device)
    prompt = prefill(m, ids[:, :PROMPT])
    with torch.inference_mode():
        own = head(m, forward_hidden(m, ids)[:, PROMPT:])[0]
    weights = float(sum(p.numel() * p.element_size() for p in m.model.parameters()))
    for batch in batches:
        first: dict[str, float] = {}
        reference = own
        for policy in policies:
            row_name = f"{name} model B={batch} {policy.short}"
            try:
                decoder = build(
                    m,
                    [policy],
                    rows=batch,
                    capacity=PROMPT + CHECKED + (WINDOWS + 2) * most,
                    seed=SEED,
                    implementation=implementation,
                )
                logits = _checked_steps(decoder, prompt, ids)
                bound = LOGITS if policy.recur.is_exact and policy.read.is_exact else ROUNDED_LOGITS
                error = float((logits - reference).norm() / reference.norm())
                if not error < bound:
                    reason = f"logits are off by {error:.1e} of their norm"
                    yield Row(name=row_name, status="refused", reason=reason)
                    continue
                seconds = _window_seconds(bench, decoder, most)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:300]
                yield Row(name=row_name, status="refused", reason=reason)
                continue
            if policy == CONVENTIONAL:
                reference = logits
            values = {
                "ms": seconds * 1e3,
                "tokens_per_s": batch / seconds,
                "weights_gb_per_s": weights / seconds / 1e9,
                "logits_apart": error,
            }
            first = first or values
            if first is not values:
                values["over_conventional"] = first["ms"] / values["ms"]
            yield Row(name=row_name, values=values)
            del decoder
            if bench.on_cuda:
                torch.cuda.empty_cache()


def _checked_steps(decoder: Decoder, prompt: Prompt, ids: Tensor) -> Tensor:
    """Start all rows and take the first steps: logits [CHECKED, V] of the last row."""
    rows = decoder.rows
    decoder.start(
        range(rows), prompt, of=[0] * rows, policies=[0] * rows, streams=list(range(rows))
    )
    found = []
    for t in range(CHECKED):
        found.append(decoder.step(ids[0, PROMPT + t].expand(rows))[-1].clone())
    return torch.stack(found)


def _window_seconds(bench: Bench, decoder: Decoder, window: int) -> float:
    """Time a step: mean over a window's steps, median of windows, after one that is not counted."""
    tokens = torch.full((decoder.rows,), 5, dtype=torch.int64, device=decoder.m.device)
    times = []
    for _ in range(1 + WINDOWS if bench.on_cuda else 1):
        if bench.on_cuda:
            torch.cuda.synchronize()
            start, stop = new_event(), new_event()
            start.record()
        began = time.perf_counter()
        for _ in range(window):
            decoder.step(tokens)
        if bench.on_cuda:
            stop.record()
            stop.synchronize()
            times.append(float(start.elapsed_time(stop)) / 1e3 / window)
        else:
            times.append((time.perf_counter() - began) / window)
    return statistics.median(times[1:] or times)
