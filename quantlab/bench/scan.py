"""The scan of one recurrent layer, against flash-linear-attention's kernels.

Shapes are those of real models. The scan is checked on the inputs it is timed on: its first window
against the torch reference from the same stored state, and its last outputs for being finite.
flash-linear-attention computes in BF16 with an FP32 state and rounds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantlab.bench.measure import Bench, Row, Timing
from quantlab.dispatch import scan_class, scan_launch
from quantlab.recurrence import OpInputs, exact_scan
from quantlab.replay import Policy, WindowedScan, parse_policy

POLICIES = ("shared nvfp4-sr", "nvfp4 / fp16-sr", "conventional fp8-sr")
PROMPT = 64
SEED = 2**63 + 5
FIRST_WINDOW = 1e-3
"""Largest difference of the first window's outputs over the largest output. Order of additions
gives 4e-7, one flipped FP16 record of a correction up to 5e-4, a wrong copy 1e-2 and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A recurrent layer of a real model.

    Attributes:
        name: the model.
        delta: Gated DeltaNet, else Mamba-2.
        heads: value heads.
        key_heads: key heads, or groups.
        dv: value rows of a state.
        dk: key channels of a state.
    """

    name: str
    delta: bool
    heads: int
    key_heads: int
    dv: int
    dk: int


SHAPES = (
    LayerShape(name="qwen3.5-4b", delta=True, heads=32, key_heads=16, dv=128, dk=128),
    LayerShape(name="nemotron-3-nano-4b", delta=False, heads=96, key_heads=8, dv=80, dk=128),
)
# Sources: config.json of Qwen/Qwen3.5-4B; table 5 of arXiv 2610.13778.
TINY = LayerShape(name="tiny", delta=True, heads=2, key_heads=1, dv=16, dk=32)


def bench_scan(
    bench: Bench,
    *,
    rows: int,
    tokens: int,
    slice_rows: int,
    shapes: tuple[LayerShape, ...] = SHAPES,
    policies: tuple[str, ...] = POLICIES,
    sweep: bool = False,
) -> Iterator[Row]:
    """Measure the policies on each shape: `rows` rows in slices of `slice_rows`, times summed.

    Windowed policies are compared with flash-linear-attention's chunk forward, L = 1 also with its
    kernel that takes one token at a time.
    """
    for shape in shapes:
        inputs = [
            layer_inputs(shape, min(slice_rows, rows - start), tokens, bench.device, seed=start)
            # two sets are enough for no slice to find the last one's inputs in the cache
            for start in range(0, min(rows, 2 * slice_rows), slice_rows)
        ]
        slices = -(-rows // slice_rows)
        rival = fla_row(bench, shape, inputs, slices)
        yield rival
        stepwise = fla_row(bench, shape, inputs, slices, one_token=True)
        yield stepwise
        for text in policies:
            policy = parse_policy(_spelled(text))
            row = _beside(scan_row(bench, shape, inputs, slices, policy), "of_fla", rival)
            yield row if policy.window > 1 else _beside(row, "of_fla_one_token", stepwise)
            if sweep and policy.window > 1:
                yield from sweep_rows(bench, shape, inputs, slices, policy)
        del inputs
        if bench.on_cuda:
            torch.cuda.empty_cache()


def _beside(row: Row, name: str, rival: Row) -> Row:
    """Add the time of a row over that of a rival, where both have one."""
    if row.status != "ok" or rival.status != "ok":
        return row
    return Row(name=row.name, values=row.values | {name: row.values["ms"] / rival.values["ms"]})


def sweep_rows(
    bench: Bench, shape: LayerShape, inputs: list[OpInputs], slices: int, policy: Policy
) -> Iterator[Row]:
    """Measure other launches of a windowed policy."""
    launch_of = scan_launch()
    for warps, registers, cuts in ((8, None, 1), (8, 128, 1), (8, None, 2), (16, 128, 2)):

        class Cut(scan_class(bench.device, "triton")):  # type: ignore[misc]
            launch = launch_of(warps=warps, registers=registers, cuts=cuts)

        row = scan_row(bench, shape, inputs, slices, policy, Cut)
        cut = f"{row.name} {warps}/{registers or 'any'}/{cuts}"
        yield Row(name=cut, status=row.status, reason=row.reason, values=row.values)


def scan_row(
    bench: Bench,
    shape: LayerShape,
    inputs: list[OpInputs],
    slices: int,
    policy: Policy,
    scan: type[WindowedScan] | None = None,
) -> Row:
    """Measure one policy on one shape; `scan` instead of the dispatched one tests the check."""
    scan = scan or scan_class(bench.device, "triton")
    tokens, n_rows = inputs[0].steps - PROMPT, inputs[0].n_rows

    def started(x: OpInputs) -> WindowedScan:
        made = scan([policy], torch.arange(x.n_rows, device=bench.device), layer=1, seed=SEED)
        prompt = x.slice(0, PROMPT)
        made.start(exact_scan(prompt)[1], prompt)
        return made

    scans = [started(x) for x in inputs]
    decoded = [x.slice(PROMPT, x.steps) for x in inputs]
    turn = [0]

    def one_slice() -> Tensor:
        turn[0] = (turn[0] + 1) % len(scans)
        return scans[turn[0]](decoded[turn[0]])

    def check() -> str | None:
        return first_window_fault(started(inputs[0]), inputs[0], policy) or (
            None
            if bool(one_slice()[:, -policy.window :].isfinite().all())
            else "outputs not finite"
        )

    def values(timing: Timing) -> dict[str, float]:
        seconds = timing.median * slices
        return {
            "ms": seconds * 1e3,
            "us_per_window": timing.median * 1e6 / max(1, tokens // policy.window),
            "tokens_per_s": slices * n_rows * tokens / seconds,
        }

    return bench.measured(f"{shape.name} {_said(policy)}", one_slice, check=check, values=values)


def first_window_fault(scan: WindowedScan, inputs: OpInputs, policy: Policy) -> str | None:
    """Compare a scan's first window with the reference's on the CPU, from the same stored state."""
    n = min(inputs.n_rows, 2)
    few = inputs.rows(torch.arange(n, device=inputs.v.device))
    few = few.slice(0, PROMPT + policy.window)._map(lambda x: x.cpu())
    reference = WindowedScan([policy], torch.arange(n), layer=1, seed=SEED)
    # the same unrounded state, so that both store the same codes
    state = exact_scan(inputs.slice(0, PROMPT))[1][:n].cpu()
    reference.start(state, few.slice(0, PROMPT))
    stored = int((scan.state()[:n].cpu() != reference.state()).sum())
    if stored:
        return f"{stored} elements of the first store differ from the reference"
    want = reference(few.slice(PROMPT, PROMPT + policy.window))
    got = scan(inputs.slice(PROMPT, PROMPT + policy.window))[:n].cpu()
    error = float((got - want).abs().max() / want.abs().max())
    return None if error < FIRST_WINDOW else f"first window off by {error:.1e} of the largest"


def fla_row(
    bench: Bench,
    shape: LayerShape,
    inputs: list[OpInputs],
    slices: int,
    *,
    one_token: bool = False,
) -> Row:
    """Measure flash-linear-attention's chunk forward, or its one-token kernel, on the same slices.

    The latter takes so long at the bench's lengths that it runs few times.
    """
    name = f"{shape.name} fla {'one token at a time' if one_token else 'chunk forward'}"
    try:
        call = _fla_call(shape, inputs[0], one_token)
    except ModuleNotFoundError as error:
        return Row(name=name, status="absent", reason=f"not installed: {error.name}")
    except Exception as error:
        # its import looks for a GPU and dies without one
        return Row(name=name, status="absent", reason=f"{type(error).__name__}: {error}"[:300])

    def check() -> str | None:
        return None if bool(call()[:, -1].isfinite().all()) else "outputs not finite"

    return bench.measured(
        name,
        call,
        check=check,
        values=lambda timing: {"ms": timing.median * slices * 1e3},
        repeats=min(bench.repeats, 3) if one_token else None,
    )


def _fla_call(shape: LayerShape, inputs: OpInputs, one_token: bool) -> Callable[[], Tensor]:
    x = inputs.slice(PROMPT, inputs.steps)
    group = shape.heads // shape.key_heads

    def expanded(t: Tensor) -> Tensor:
        return t.to(torch.bfloat16).repeat_interleave(group, dim=2).contiguous()

    q, k, v = expanded(x.q), expanded(x.k), x.v.to(torch.bfloat16).contiguous()
    keys: dict[str, Any] = {"g": x.log_decay, "scale": 1.0, "output_final_state": True}
    if shape.delta:
        from fla.ops.gated_delta_rule import (
            chunk_gated_delta_rule,
            fused_recurrent_gated_delta_rule,
        )

        assert x.beta is not None
        keys["beta"] = x.beta.to(torch.bfloat16)
        op = fused_recurrent_gated_delta_rule if one_token else chunk_gated_delta_rule
    else:
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

        op = fused_recurrent_simple_gla if one_token else chunk_simple_gla
    return lambda: _first(op(q, k, v, **keys))


def _first(outputs: Any) -> Tensor:
    first: Tensor = outputs[0]
    return first


def layer_inputs(
    shape: LayerShape, rows: int, tokens: int, device: torch.device, *, seed: int
) -> OpInputs:
    """Draw a layer's inputs with half-lives from one to thousands of tokens, BF16 activations."""
    generator = torch.Generator(device).manual_seed(seed)
    steps = PROMPT + tokens

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    def activation(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)

    q = activation(normal(rows, steps, shape.key_heads, shape.dk))
    k = activation(normal(rows, steps, shape.key_heads, shape.dk))
    if shape.delta:
        q = torch.nn.functional.normalize(q.float(), dim=-1) * shape.dk**-0.5
        k = torch.nn.functional.normalize(k.float(), dim=-1)
    else:
        k = activation(k.float() * shape.dk**-0.5)
    v = activation(normal(rows, steps, shape.heads, shape.dv))
    rate = -torch.exp(2 * normal(rows, steps, shape.heads) - 5)
    return OpInputs(
        q=q,
        k=k,
        v=v,
        log_decay=rate,
        beta=torch.sigmoid(normal(rows, steps, shape.heads)) if shape.delta else None,
        dt=None if shape.delta else torch.exp(normal(rows, steps, shape.heads) - 2),
        activation_dtype=torch.bfloat16,
    )


def _spelled(text: str) -> str:
    kind, _, rest = text.partition(" ")
    return f"{kind}:{rest}" if kind in ("shared", "conventional") else text


def _said(policy: Policy) -> str:
    return policy.short
