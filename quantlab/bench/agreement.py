"""Whether the engine on a GPU agrees with the CPU, on the models that are shipped.

Three parts, for each model. The stores after the prompt, of the same FP32 states: bit for bit, so
also draw for draw. Windows of every recurrent layer on the op inputs of a real text, each restarted
from the copies that the reference on the CPU stored: codes equal but for those whose values lie at
a boundary, which are counted. Whole studies, whose rounding decorrelates after the first such flip:
every point of the GPU's KL curve within the bootstrap interval of the CPU's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantlab.bench.measure import Bench, Row
from quantlab.dispatch import scan_class
from quantlab.recurrence import OpInputs, exact_scan
from quantlab.replay import Policy, WindowedScan
from quantlab.replay.policy import suite

if TYPE_CHECKING:
    from quantlab.study.result import Result

MODELS = ("tiny-gdn", "tiny-mamba2")
SEED = 2**63 + 5
NOISE = 1e-5
"""Relative difference of stored values that is a code's: a scale in FP32 differs by 1e-7, a code by
1e-3 (FP16) and more."""
FLIPS = 2e-3
"""Share of codes that may be flipped: two orders of some 150 FP32 additions differ by 1e-7 of the
largest element, steps of FP16 are 5e-4 of an element, and small elements are nearer to boundaries.
A wrong draw flips a third, a wrong record 1e-2 and more."""


def bench_agreement(
    bench: Bench,
    *,
    models: Sequence[str] = MODELS,
    windows: int = 16,
    prompt: int = 64,
    tokens: int = 1024,
    streams: int = 4,
) -> Iterator[Row]:
    """Compare device and CPU.

    Args:
        bench: the device.
        models: names of the zoo.
        windows: that are compared.
        prompt: tokens before them.
        tokens: N of the studies.
        streams: of the studies.
    """
    policies = suite("replayssm")
    for name in models:
        for dtype in ("fp32", "bf16"):
            calls = op_inputs(name, dtype, prompt + 16 * windows)
            for policy in policies:
                yield windows_row(bench, f"{name} {dtype}", calls, policy, prompt)
        yield from curve_rows(bench, name, policies, tokens, streams)


def windows_row(
    bench: Bench,
    name: str,
    calls: Sequence[OpInputs],
    policy: Policy,
    prompt: int,
    scan: type[WindowedScan] | None = None,
) -> Row:
    """Compare stores and restarted windows of all layers; `scan` instead tests the comparison.

    Returns:
        Row `NAME POLICY windows`: codes compared, flipped, and the largest difference of outputs
        over the largest output. Refused where stores after the prompt differ at all, or more codes
        flip than boundaries explain.
    """
    scan = scan or scan_class(bench.device, "triton")
    name = f"{name} {policy.short} windows"
    codes = flips = 0
    worst = 0.0
    for layer, inputs in enumerate(calls):
        streams = torch.zeros(inputs.n_rows, dtype=torch.int64)
        first = inputs.slice(0, prompt)
        state = exact_scan(first)[1]
        reference = WindowedScan([policy], streams, layer=layer, seed=SEED)
        reference.start(state, first)
        ours = scan([policy], streams.to(bench.device), layer=layer, seed=SEED)
        ours.start(state.to(bench.device), _to(first, bench.device))
        differ = sum(
            int((a.cpu() != b).sum())
            for a, b in zip(ours.copies(), reference.copies(), strict=True)
        )
        if differ:
            reason = f"layer {layer}: {differ} values of the first store differ"
            return Row(name=name, status="refused", reason=reason)
        for start in range(prompt, inputs.steps - policy.window + 1, policy.window):
            piece = inputs.slice(start, start + policy.window)
            ours = _restarted(ours, reference, policy)
            got, want = ours(_to(piece, bench.device)).cpu(), reference(piece)
            worst = max(worst, float((got - want).abs().max() / want.abs().max()))
            pairs = list(zip(ours.copies(), reference.copies(), strict=True))
            for mine, theirs in pairs if policy.kind == "separate" else pairs[:1]:
                codes += theirs.numel()
                flips += _flipped(mine.cpu(), theirs)
    values = {"codes": float(codes), "flips": float(flips), "outputs": worst}
    share = flips / codes
    exact = policy.recur.is_exact and policy.read.is_exact
    if not exact and share > FLIPS:
        return Row(name=name, status="refused", reason=f"{share:.1e} of the codes differ")
    return Row(name=name, values=values | {"share": share})


def curve_rows(
    bench: Bench,
    name: str,
    policies: Sequence[Policy],
    tokens: int,
    streams: int,
    prompt: int = 64,
) -> Iterator[Row]:
    """Compare KL curves of a study on the device and on the CPU: a row a policy.

    A point of the GPU's is off where it lies outside the CPU's bootstrap interval.
    """
    from quantlab.study.run import run_kl
    from quantlab.study.spec import KlSpec

    def study(device: str, folder: Path) -> Result:
        return run_kl(
            KlSpec(
                model=name,
                policies=tuple(policies),
                tokens=tokens,
                streams=streams,
                prompt=prompt,
                device=device,
                dtype="fp32",
            ),
            folder,
        )

    with tempfile.TemporaryDirectory() as folder:
        here = study("cpu", Path(folder) / "cpu").summary.to_pylist()
        there = study(str(bench.device), Path(folder) / "device").summary.to_pylist()
    for policy in policies:
        mine = [row for row in there if row["policy"] == str(policy)]
        theirs = [row for row in here if row["policy"] == str(policy)]
        ratios = [a["kl"] / b["kl"] for a, b in zip(mine, theirs, strict=True)]
        outside = [
            str(a["n"])
            for a, b in zip(mine, theirs, strict=True)
            if not b["kl_low"] <= a["kl"] <= b["kl_high"]
        ]
        yield _curve_row(f"{name} {policy.short} curve", policy, ratios, outside)


def _curve_row(name: str, policy: Policy, ratios: Sequence[float], outside: Sequence[str]) -> Row:
    # a floor is the noise of additions itself, of another order on each device
    if outside and not (policy.kind == "shared" and policy.recur.is_exact):
        reason = f"outside of the interval at N = {', '.join(outside)}"
        return Row(name=name, status="refused", reason=reason)
    values = {"points": len(ratios), "outside": len(outside)}
    extremes = {"least_ratio": min(ratios), "largest_ratio": max(ratios)}
    return Row(name=name, values={k: float(v) for k, v in (values | extremes).items()})


def op_inputs(name: str, dtype: str, steps: int) -> list[OpInputs]:
    """Run a model over text on the CPU and keep what its recurrent layers were called with."""
    from quantlab.data import load_streams
    from quantlab.models import OpCall, load_model, replaced

    m = load_model(name, device="cpu", dtype=dtype)
    text = load_streams("books", tokenizer=m.tokenizer, streams=1, tokens=steps, prompt=1).tokens
    calls: list[OpInputs] = []

    def keep(call: OpCall) -> tuple[Tensor, Tensor | None]:
        calls.append(call.inputs)
        return exact_scan(call.inputs)[0], None

    with torch.inference_mode(), replaced(m, keep):
        m.model(text[:, :steps])
    return calls


def _restarted(ours: WindowedScan, reference: WindowedScan, policy: Policy) -> WindowedScan:
    """Give our scan the copies that the reference stored."""
    named = ours.state_dict()
    recur, read = reference.copies()
    named["0.recur"] = recur
    if policy.kind == "separate":
        named["0.read"] = read
    ours.load_state_dict(named)
    return ours


def _to(inputs: OpInputs, device: torch.device) -> OpInputs:
    return inputs._map(lambda x: x.to(device))


def _flipped(a: Tensor, b: Tensor) -> int:
    return int(((a - b).abs() > NOISE * torch.maximum(a.abs(), b.abs())).sum())
