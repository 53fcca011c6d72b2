"""The engine on a model with the shape of Qwen3.5-4B, against the model's own prefill and decode.

Weights are random: speed does not depend on them. The engine is checked before it is timed: with
the FP32 reference alone, its logits over a short run against the model's own forward.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantlab.bench.measure import Bench, Row, new_event
from quantlab.bench.suite import suite_row
from quantlab.engine.planner import plan
from quantlab.engine.teacher_forcing import TeacherForcing, scan_class
from quantlab.models import LoadedModel, forward_hidden, head, new_cache
from quantlab.models.loaded import adapt
from quantlab.replay import Policy
from quantlab.replay.policy import suite

PROMPT = 512
SEED = 11
CONTROL = 8.0
"""How much further from the model's own forward the engine's reference logits may be than the
model's own forward in two pieces is (prompt, then the rest through its cache): the same sums in
another order of additions, twice over (the recurrence of every token, not of a chunk, is in FP32).
How far that is depends on dtype, depth and weights, so it is measured on the same tokens."""
FLOOR, CEILING = 1e-4, 0.1
"""Bounds on that bound: two orders may agree exactly, and a control far off excuses nothing.
Unrelated logits are 1.4 apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model decides its speed.

    Attributes:
        name: row names start with it.
        config: arguments of transformers' Qwen3_5TextConfig.
        dtype: of weights and activations.
    """

    name: str
    config: dict[str, Any]
    dtype: torch.dtype


def _layers(count: int) -> list[str]:
    return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]


QWEN = ModelShape(
    name="qwen3.5-4b",
    config={
        "vocab_size": 248_320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "layer_types": _layers(32),
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262_144,
    },
    dtype=torch.bfloat16,
)
# Source: config.json of Qwen/Qwen3.5-4B (text model).
TINY = ModelShape(
    name="tiny",
    config={
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "layer_types": _layers(4),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 4096,
    },
    dtype=torch.float32,
)


def build_model(shape: ModelShape, device: torch.device) -> LoadedModel:
    """Make the model with random weights, on the device and in its dtype from the start."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    extra = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    before = torch.get_default_dtype()
    torch.manual_seed(SEED)
    try:
        torch.set_default_dtype(shape.dtype)
        with torch.device(device):
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape.config, **extra))
    finally:
        torch.set_default_dtype(before)
    return adapt(model)


class ScanClock:
    """Scans of the engine's own class whose calls are timed on the device.

    Args:
        bench: decides the clock.
        scan: class of the scans.
    """

    def __init__(self, bench: Bench, scan: type[Any]) -> None:
        self.bench = bench
        self.spans: list[tuple[Any, Any]] = []
        clock = self

        class Timed(scan):  # type: ignore[misc]
            def __call__(self, inputs: Any) -> Tensor:
                start = clock.mark()
                out: Tensor = super().__call__(inputs)
                clock.spans.append((start, clock.mark()))
                return out

        Timed.__name__ = scan.__name__
        self.scan = Timed

    def mark(self) -> Any:
        """Read the clock, or place an event."""
        if not self.bench.on_cuda:
            return time.perf_counter()
        event = new_event()
        event.record()
        return event

    def seconds(self) -> float:
        """Add up what was spent in scans; the device must be idle."""
        if not self.bench.on_cuda:
            return float(sum(stop - start for start, stop in self.spans))
        return float(sum(start.elapsed_time(stop) for start, stop in self.spans)) / 1e3


def bench_engine(
    bench: Bench,
    *,
    shape: ModelShape,
    streams: int,
    tokens: int,
    decode_steps: int = 8,
    policies: Sequence[Policy] | None = None,
    part: str = "all",
) -> Iterator[Row]:
    """Measure the engine, then the model's own prefill and decode over as many rows.

    `part` "suite" measures the whole suite alone, with where its time goes (suite.py).
    """
    policies = suite("replayssm") if policies is None else policies
    m = build_model(shape, bench.device)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, m.vocab_size, (streams, PROMPT + tokens + 1), generator=generator)
    rows = streams * (len(policies) + 1)
    if part == "suite":
        yield suite_row(
            bench, m, ids, shape.name, prompt=PROMPT, tokens=tokens, policies=policies, seed=SEED
        )
        return
    measured = engine_row(bench, m, ids, shape.name, tokens, policies)
    yield measured
    prefill = prefill_row(bench, m, ids, shape.name, rows)
    yield prefill
    decode = decode_row(bench, m, ids, shape.name, rows, decode_steps)
    yield decode
    if measured.status == prefill.status == decode.status == "ok":
        rate = measured.values["tokens_per_s"]
        yield Row(
            name=f"{shape.name} engine against the rest",
            values={
                "of_prefill": rate / prefill.values["tokens_per_s"],
                "of_decode": rate / decode.values["tokens_per_s"],
            },
        )


def engine_row(
    bench: Bench,
    m: LoadedModel,
    ids: Tensor,
    name: str,
    tokens: int,
    policies: Sequence[Policy],
    scan: type[Any] | None = None,
) -> Row:
    """Measure the whole suite once; `scan` instead of the dispatched class tests the check."""
    scan = scan or scan_class("windowed", bench.device)
    device = str(bench.device)
    streams = ids.shape[0]
    rows = streams * (len(policies) + 1)
    chosen = plan(m, list(policies), streams=streams, tokens=tokens, prompt=PROMPT, device=device)
    clock = ScanClock(bench, scan)
    errors: dict[str, float] = {}

    def study(text: Tensor, last: int, which: Sequence[Policy], build: Any) -> Tensor:
        logits = []
        for batch in chosen.stream_batches if text.shape[0] > 1 else [range(1)]:
            run = TeacherForcing(
                m,
                text[list(batch)],
                policies=which,
                stream_ids=list(batch),
                positions=[last],
                prompt=PROMPT,
                segment=min(chosen.segment, last),
                seed=SEED,
                scan=lambda p, s, *, layer, seed: build(p, s, layer=layer, seed=seed),
            )
            logits += [measurement.logits[0] for measurement in run.run()]
        return torch.cat(logits)

    def check() -> str | None:
        last = min(tokens, 128)
        got = study(ids[:1], last, [], scan)[0, -1]
        own = ids[:1, : PROMPT + last].to(bench.device)
        with torch.inference_mode():
            want = head(m, forward_hidden(m, own)[:, -1:])[0, -1]
            cache = new_cache(m)
            forward_hidden(m, own[:, :PROMPT], cache=cache)
            rest = forward_hidden(m, own[:, PROMPT:], cache=cache, start=PROMPT)
            control = head(m, rest[:, -1:])[0, -1]
        # compiles what the suite runs, which is not to be timed
        study(ids[:1], min(tokens, 64), policies, scan)
        errors["control_error"] = float((control - want).norm() / want.norm())
        error = errors["reference_error"] = float((got - want).norm() / want.norm())
        bound = min(CEILING, max(FLOOR, CONTROL * errors["control_error"]))
        if error < bound:
            return None
        return f"reference logits off by {error:.1e} of their norm, {bound:.1e} allowed"

    def call() -> None:
        clock.spans.clear()
        study(ids, tokens, policies, clock.scan)

    if bench.on_cuda:
        torch.cuda.reset_peak_memory_stats()

    def values(timing: Any) -> dict[str, float]:
        peak = torch.cuda.max_memory_allocated() if bench.on_cuda else 0
        inside = clock.seconds()
        return {
            "tokens_per_s": rows * (PROMPT + tokens) / timing.median,
            "rows": float(rows),
            "batches": float(len(chosen.stream_batches)),
            "segment": float(chosen.segment),
            "scan_s": inside,
            "rest_s": timing.median - inside,
            "peak_gb": peak / 1e9,
            **errors,
        }

    once = Bench(device, repeats=1, warmup=0)
    return once.measured(f"{name} engine", call, check=check, values=values)


def prefill_row(bench: Bench, m: LoadedModel, ids: Tensor, name: str, rows: int) -> Row:
    """Measure the model's own forward over the engine's rows and tokens, a stream at a time."""
    text = ids[:, :-1].to(bench.device)

    def call() -> None:
        with torch.inference_mode():
            for row in range(rows):
                forward_hidden(m, text[row % len(text)][None])

    def check() -> str | None:
        with torch.inference_mode():
            # as long as what is timed, so that kernels are tuned for its length before
            finite = bool(forward_hidden(m, text[:1]).isfinite().all())
        return None if finite else "hidden states not finite"

    once = Bench(str(bench.device), repeats=1, warmup=0)
    return once.measured(
        f"{name} prefill",
        call,
        check=check,
        values=lambda timing: {"tokens_per_s": rows * text.shape[1] / timing.median},
    )


def decode_row(bench: Bench, m: LoadedModel, ids: Tensor, name: str, rows: int, steps: int) -> Row:
    """Measure transformers' own one-token decode at as many rows, from a short context."""
    text = ids[:, : PROMPT + steps].to(bench.device).repeat(-(-rows // len(ids)), 1)[:rows]
    cache = new_cache(m)

    def prepare() -> str | None:
        with torch.inference_mode():
            forward_hidden(m, text[:, :PROMPT], cache=cache)
        return None

    position = [PROMPT]

    def step() -> None:
        at = position[0]
        with torch.inference_mode():
            hidden = forward_hidden(m, text[:, at - 1 : at], cache=cache, start=at)
            m.model.get_output_embeddings()(hidden)
        position[0] = at + 1

    calls = max(1, steps - 2)
    few = Bench(str(bench.device), repeats=calls, warmup=min(2, steps - 1))
    return few.measured(
        f"{name} eager decode",
        step,
        check=prepare,
        values=lambda timing: {"tokens_per_s": rows / timing.median},
    )
