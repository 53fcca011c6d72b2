"""A whole suite at the length of a study: total time, peak memory, and where the time goes.

The engine runs as a study runs it, split by stream as the planner says: forwards, scans, the head
at measured positions, metrics, and rows written as Parquet. On a GPU the profiler adds up the
device's time by what kernels are for; what the device waits for is the rest of the wall clock.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from quantlab.bench.measure import Bench, Row
from quantlab.engine.planner import plan
from quantlab.engine.teacher_forcing import Measurement, TeacherForcing
from quantlab.metrics.divergence import compare
from quantlab.metrics.positions import measured_positions

if TYPE_CHECKING:
    from quantlab.models import LoadedModel
    from quantlab.replay import Policy

KINDS = (
    ("scan", r"windowed_scan|conventional_scan|window_coefficients|store_copy_kernel"),
    ("attention", r"flash|fmha|attention"),
    ("matmul", r"gemm|nvjet|cutlass|xmma|cublas|splitK"),
    ("convolution", r"conv"),
    ("softmax", r"softmax"),
    ("reduction", r"reduce"),
    ("copy", r"copy|memcpy|cat|memset|index|gather"),
    ("elementwise", r"elementwise"),
)
"""What a kernel is for, by its name; the first that fits. Everything else is "other"."""


def kind_of(kernel: str) -> str:
    """Say what a device kernel is for."""
    return next((kind for kind, name in KINDS if re.search(name, kernel, re.I)), "other")


def suite_row(
    bench: Bench,
    m: LoadedModel,
    ids: Tensor,
    name: str,
    *,
    prompt: int,
    tokens: int,
    policies: Sequence[Policy],
    seed: int,
) -> Row:
    """Run the suite once over all streams.

    Args:
        bench: where.
        m: the model.
        ids: [streams, > prompt + tokens] tokens.
        name: of the row.
        prompt: tokens of the prompt.
        tokens: N.
        policies: without the reference.
        seed: of the draws.

    Returns:
        Row `… suite`: seconds, tokens per second (rows counted), peak memory; `S_share` is the
        share of the wall clock that the device spends in kernels for S, `metric_s` and `parquet_s`
        what the host spends on metrics and on writing.
    """
    streams = ids.shape[0]
    device = str(bench.device)
    chosen = plan(m, list(policies), streams=streams, tokens=tokens, prompt=prompt, device=device)
    spent = {"metric": 0.0, "parquet": 0.0}
    shares: dict[str, float] = {}

    def run(text: Tensor, batches: Sequence[Sequence[int]], last: int, folder: Path) -> None:
        for index, batch in enumerate(batches):
            forcing = TeacherForcing(
                m,
                text[list(batch)],
                policies=policies,
                stream_ids=list(batch),
                positions=[p for p in measured_positions(tokens) if p <= last],
                prompt=prompt,
                segment=min(chosen.segment, last),
                seed=seed,
            )
            for part, measured in enumerate(forcing.run()):
                begun = time.perf_counter()
                table = _table(measured)
                metric = time.perf_counter()
                pq.write_table(table, folder / f"{index}-{part}.parquet")
                spent["metric"] += metric - begun
                spent["parquet"] += time.perf_counter() - metric

    def check() -> str | None:
        # compiles what is timed; outputs are checked by the engine's own row
        with tempfile.TemporaryDirectory() as folder:
            run(ids[:1], [[0]], min(tokens, 128), Path(folder))
        return None

    def call() -> None:
        spent.update(metric=0.0, parquet=0.0)
        with tempfile.TemporaryDirectory() as folder, _profiled(bench) as profiler:
            run(ids, chosen.stream_batches, tokens, Path(folder))
            if bench.on_cuda:
                torch.cuda.synchronize()
        shares.update(_device_seconds(profiler))

    def values(timing: Any) -> dict[str, float]:
        seconds = timing.median
        rows = streams * (len(policies) + 1)
        peak = torch.cuda.max_memory_allocated() if bench.on_cuda else 0
        found = {
            "seconds": seconds,
            "tokens_per_s": rows * (prompt + tokens) / seconds,
            "rows": float(rows),
            "batches": float(len(chosen.stream_batches)),
            "segment": float(chosen.segment),
            "peak_gb": peak / 1e9,
            "metric_s": spent["metric"],
            "parquet_s": spent["parquet"],
        }
        return found | {f"{kind}_share": s / seconds for kind, s in sorted(shares.items())}

    if bench.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    once = Bench(device, repeats=1, warmup=0)
    return once.measured(f"{name} suite", call, check=check, values=values)


def _table(measured: Measurement) -> pa.Table:
    """Metrics of all policies, streams and positions."""
    found = compare(measured.logits, measured.targets)._asdict()
    columns = {k: x.flatten().cpu().numpy() for k, x in found.items() if isinstance(x, Tensor)}
    longest = max(len(x) for x in columns.values())
    return pa.table({k: x for k, x in columns.items() if len(x) == longest})


def _profiled(bench: Bench) -> Any:
    """Record the device's kernels, where there is a device."""
    if not bench.on_cuda:
        return nullcontext()
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def _device_seconds(profiler: Any) -> dict[str, float]:
    """Add up what the device spent, by kind."""
    total: dict[str, float] = {}
    for event in profiler.key_averages() if profiler is not None else ():
        kind = kind_of(event.key)
        total[kind] = total.get(kind, 0.0) + event.self_device_time_total / 1e6
    return total
