"""Self-check of the scan kernels on a CUDA device: `python -m quantlab_kernels.smoke`.

Part one compares, for each policy of suite `replayssm` and some beyond it, the kernels on the GPU
with the torch reference on the CPU on the same inputs and draws: outputs of the first window (both
start from the same stored state, so only the order of FP32 additions differs; relative to the
largest output), state elements that differ after it (boundary flips, counted), and outputs of the
whole run (which decorrelate after a flip). Part two times the suite and each policy, 40 rows of
T = 4,096 steps. A group that fails is reported and the next one runs. The last line is one JSON
document. Exit code 1 if a comparison fails. See `--help` for options.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from typing import Any

import torch
import triton

from quantlab.recurrence import OpInputs, exact_scan
from quantlab.replay.policy import SUITES, Policy, parse_policy
from quantlab.replay.scan import WindowedScan
from quantlab_kernels.triton_scan import TritonScan

FIRST_WINDOW_BOUND = 3e-6
"""Relative to the largest output: sums of 128 FP32 products in another order, measured at 4e-7."""
FLIP_BOUND = 2e-3
"""Share of state elements after one window that may differ: those within 1e-7 of a boundary."""

EXTRA = (
    "conventional",
    "conventional:fp8-sr",
    "conventional:nvfp4-sr",
    "shared:nvfp4",
    "shared:bf16-sr",
    "nvfp4 / fp16-sr corrections=fold",
    "nvfp4 / fp16-sr L=4",
    "shared:fp8-sr L=64",
    "shared:fp8-sr records=bf16",
    "nvfp4 / fp16-sr records=bf16",
)
SEED = 2**63 + 5
SHAPES = {
    "gdn": {"heads": 4, "key_heads": 2, "dv": 128, "dk": 128},
    "mamba2": {"heads": 8, "key_heads": 1, "dv": 64, "dk": 128},
    "kda": {"heads": 2, "key_heads": 2, "dv": 80, "dk": 128},
}


def make_inputs(
    family: str, rows: int, steps: int, *, device: str, seed: int, dtype: torch.dtype
) -> OpInputs:
    """Draw inputs of a layer with half-lives from one to thousands of steps."""
    shape = SHAPES[family]
    heads, key_heads, dv, dk = shape["heads"], shape["key_heads"], shape["dv"], shape["dk"]
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device)

    q, k = normal(rows, steps, key_heads, dk), normal(rows, steps, key_heads, dk)
    delta = family != "mamba2"
    if delta:
        q = torch.nn.functional.normalize(q, dim=-1) * dk**-0.5
        k = torch.nn.functional.normalize(k, dim=-1)
    else:
        q, k = q.to(dtype), (k * dk**-0.5).to(dtype)
    per = (rows, steps, heads, dk) if family == "kda" else (rows, steps, heads)
    return OpInputs(
        q=q,
        k=k,
        v=normal(rows, steps, heads, dv).to(dtype),
        log_decay=-torch.exp(2 * normal(*per) - 5),
        beta=torch.sigmoid(normal(rows, steps, heads)) if delta else None,
        dt=None if delta else torch.exp(normal(rows, steps, heads) - 2),
        activation_dtype=dtype,
    )


def to_device(inputs: OpInputs, device: str) -> OpInputs:
    """Move a layer's inputs."""
    return inputs._map(lambda x: x.to(device))


def compare(policy: Policy, family: str, *, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Run one policy on the device and by the reference on the CPU.

    Returns:
        `first`: largest difference in the first window's outputs over the largest output; `flips`
        and `share`: state elements that differ after it; `all`: as `first` over the whole run.
    """
    prompt, steps = 24, 3 * max(policy.window, 16) + 5
    inputs = make_inputs(family, 1, prompt + steps, device="cpu", seed=1, dtype=dtype)
    streams = torch.tensor([3])
    ours = TritonScan([policy], streams.to(device), layer=2, seed=SEED)
    reference = WindowedScan([policy], streams, layer=2, seed=SEED)
    reference.prefill(inputs.slice(0, prompt))
    _, state = exact_scan(inputs.slice(0, prompt))
    ours.start(state.to(device), to_device(inputs.slice(0, prompt), device))
    stored = _differing(ours.state().cpu(), reference.state())
    cut = prompt + policy.window
    a = ours(to_device(inputs.slice(prompt, cut), device)).cpu()
    b = reference(inputs.slice(prompt, cut))
    largest = float(b.abs().max())
    if not largest > 0:
        raise AssertionError("the reference gives only zeros: nothing is compared")
    flips = _differing(ours.state().cpu(), reference.state(), tolerance=1e-5)
    first = float((a - b).abs().max()) / largest
    a = ours(to_device(inputs.slice(cut, prompt + steps), device)).cpu()
    b = reference(inputs.slice(cut, prompt + steps))
    share = flips / state.numel()
    ok = stored == 0 and first < FIRST_WINDOW_BOUND and share < FLIP_BOUND
    if policy.records == "bf16" or dtype != torch.float32:
        # one flipped record of a correction moves later outputs by its last place
        ok = stored == 0 and first < 1e-3 and share < 0.05
    return {
        "ok": bool(ok and torch.isfinite(a).all()),
        "stored": stored,
        "first": first,
        "flips": flips,
        "share": share,
        "all": float((a - b).abs().max()) / largest,
    }


def _differing(a: torch.Tensor, b: torch.Tensor, tolerance: float = 0.0) -> int:
    return int(((a - b).abs() > tolerance * float(b.abs().max())).sum())


def time_scan(
    policies: list[Policy], family: str, *, streams: int, steps: int, repeats: int = 5
) -> dict[str, float]:
    """Time a batch of policies on the device.

    Returns:
        `ms` of one layer (median), its spread, `us_per_window` of 16 steps, `compile_s`.
    """
    ids = torch.arange(streams, device="cuda")
    scan = TritonScan(policies, ids, layer=0, seed=SEED)
    rows = len(policies) * streams
    inputs = make_inputs(family, rows, steps, device="cuda", seed=2, dtype=torch.float32)
    started = time.perf_counter()
    scan.prefill(inputs.slice(0, 64))
    scan(inputs)
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - started
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        scan(inputs)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    median = statistics.median(times)
    return {
        "ms": median,
        "spread": (max(times) - min(times)) / median,
        "us_per_window": median * 1e3 / (steps / 16),
        "compile_s": compile_s,
    }


def compare_case(case: tuple[str, str, str, str]) -> tuple[str, dict[str, Any]]:
    """Run `compare` for (policy, family, dtype, device) in a worker; errors become a row."""
    text, family, dtype, device = case
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    policy = parse_policy(text)
    name = f"{family} {policy.short} {dtype}"
    try:
        return name, compare(policy, family, device=device, dtype=getattr(torch, dtype))
    except Exception as error:
        # one broken group must not hide the others
        traceback.print_exc(limit=4, file=sys.stderr)
        return name, {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}


def timed_case(policies: list[Policy], family: str, streams: int, steps: int) -> dict[str, Any]:
    """Run `time_scan`; errors become a row."""
    try:
        return {"ok": True, **time_scan(policies, family, streams=streams, steps=steps)}
    except Exception as error:
        traceback.print_exc(limit=4, file=sys.stderr)
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}


def report(name: str, row: dict[str, Any], results: dict[str, Any]) -> None:
    """Print one row and keep it."""
    results[name] = row
    text = " ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    sys.stdout.write(f"{name:46s} {text}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run the self-check."""
    parser = argparse.ArgumentParser(description="Self-check of the scan kernels.")
    parser.add_argument("--quick", action="store_true", help="correctness only")
    parser.add_argument("--steps", type=int, default=4096, help="tokens of a timed segment")
    parser.add_argument("--streams", type=int, default=4, help="streams of a timed batch")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile and compare")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="run what has this text in its name")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"triton": triton.__version__, "torch": torch.__version__}
    suite = SUITES["replayssm"]
    narrow = [str(p) for p in (suite[2], suite[3], suite[7])]
    cases = [(str(p), family, "float32") for family in ("gdn", "mamba2") for p in suite]
    cases += [(p, "gdn", "float32") for p in EXTRA]
    cases += [(p, "kda", "float32") for p in narrow]
    cases += [(p, family, "bfloat16") for family in ("gdn", "mamba2") for p in narrow]
    jobs = [(*case, options.device) for case in cases if options.only in " ".join(case)]
    if options.jobs > 1:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            for name, row in pool.imap(compare_case, jobs, chunksize=1):
                report(name, row, results)
    else:
        for job in jobs:
            report(*compare_case(job), results)
    if not options.quick:
        results["gpu"] = torch.cuda.get_device_name()
        reference = parse_policy("conventional")
        for family in ("gdn", "mamba2"):
            batches = {"suite + reference": [reference, *suite]}
            batches |= {p.short: [p] * 10 for p in suite}
            batches |= {p: [parse_policy(p)] * 10 for p in EXTRA[:3]}
            for label, policies in batches.items():
                if options.only not in f"{family} {label}":
                    continue
                row = timed_case(policies, family, options.streams, options.steps)
                report(f"time {family} {label}", row, results)
    rows = [row for row in results.values() if isinstance(row, dict)]
    results["failed"] = sum(not row["ok"] for row in rows)
    sys.stdout.write(json.dumps(results) + "\n")
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
