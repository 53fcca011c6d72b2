"""Conventional decode steps of other packages, where they are installed beside.

flash-linear-attention's recurrent kernels read a state and write another; vLLM's update states in
place, by slot. Each is given FP32 states and BF16 inputs of the same shape, several sets of states
in turn, and is checked against this tree's textbook step on the inputs that it is timed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantlab.analysis.traffic import LayerShape, conventional_bytes
from quantlab.bench.decode import CONVENTIONAL
from quantlab.bench.measure import Bench, Row, Timing
from quantlab.recurrence import OpInputs
from quantlab.recurrence.step import textbook

SETTLE_BYTES = 400e6
MOST_SETS = 64
BF16_OUTPUT = 2e-2
"""Bound on the RMS difference over the RMS: outputs and some inputs rounded to BF16, 4e-3 each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One call, and how to read its output.

    Attributes:
        call: takes a state [batch, H, dv, dk] in the package's layout, returns o [batch, H, dv].
        transposed: whether that layout is [batch, H, dk, dv].
    """

    call: Callable[[Tensor], Tensor]
    transposed: bool


def rival_rows(bench: Bench, shapes: Sequence[LayerShape], batch: int) -> Iterator[Row]:
    """Measure every package at every shape; a package that is not installed is absent."""
    for shape in shapes:
        for package, build in (("fla", _fla), ("vllm", _vllm)):
            yield _row(bench, shape, batch, f"rival {package}", build)


def _row(
    bench: Bench,
    shape: LayerShape,
    batch: int,
    name: str,
    build: Callable[[LayerShape, OpInputs], Rival],
) -> Row:
    name = f"{shape.name} B={batch} {name}"
    one = 4.0 * batch * shape.heads * shape.dv * shape.dk
    sets = max(1, min(MOST_SETS, int(SETTLE_BYTES // one))) if bench.on_cuda else 1
    try:
        inputs = _inputs(shape, batch, bench.device)
        rival = build(shape, inputs)
        generator = torch.Generator(bench.device).manual_seed(8)
        size = (sets, batch, shape.heads, shape.dv, shape.dk)
        states = torch.randn(size, generator=generator, device=bench.device)
        want, _ = textbook(inputs, states[0])
        given = states.mT.contiguous() if rival.transposed else states
        got = rival.call(given[0]).float()
        error = float((got - want[:, 0]).norm() / want.norm())
        if not error < BF16_OUTPUT:
            reason = f"outputs are off by {error:.1e} of their norm"
            return Row(name=name, status="refused", reason=reason)
        timing = bench.in_turn([partial(rival.call, state) for state in given])
    except ModuleNotFoundError as error:
        return Row(name=name, status="absent", reason=str(error))
    except Exception as error:
        return Row(name=name, status="refused", reason=f"{type(error).__name__}: {error}"[:300])
    return Row(name=name, values=_values(shape, batch, timing))


def _values(shape: LayerShape, batch: int, timing: Timing) -> dict[str, float]:
    moved = batch * float(conventional_bytes(shape, CONVENTIONAL.recur).total)
    return {"window_us": timing.median * 1e6, "tb_per_s": moved / timing.median / 1e12}


def _inputs(shape: LayerShape, batch: int, device: torch.device) -> OpInputs:
    """One token of every row, in BF16 but for decays and strengths."""
    generator = torch.Generator(device).manual_seed(7)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    keys = normal(2, batch, 1, shape.key_heads, shape.dk)
    if shape.delta:
        keys = torch.nn.functional.normalize(keys, dim=-1)
    keys = (keys * shape.dk**-0.5).to(torch.bfloat16)
    heads = (batch, 1, shape.heads)
    return OpInputs(
        q=keys[0],
        k=keys[1],
        v=normal(*heads, shape.dv).to(torch.bfloat16),
        log_decay=-torch.exp(2 * normal(*heads) - 5),
        beta=torch.sigmoid(normal(*heads)).to(torch.bfloat16).float() if shape.delta else None,
        dt=None if shape.delta else torch.exp(normal(*heads) - 2),
        activation_dtype=torch.bfloat16,
    )


def _fla(shape: LayerShape, x: OpInputs) -> Rival:
    if shape.delta:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        def delta(state: Tensor) -> Tensor:
            out: Tensor = fused_recurrent_gated_delta_rule(
                x.q, x.k, x.v, g=x.log_decay, beta=x.beta, scale=1.0, initial_state=state,
                output_final_state=True,
            )[0]  # fmt: skip
            return out[:, 0]

        return Rival(call=delta, transposed=True)
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    assert x.dt is not None
    group = shape.heads // shape.key_heads  # this one takes a key head for every value head
    q, k = (y.repeat_interleave(group, 2).contiguous() for y in (x.q, x.k))
    v = (x.dt[..., None] * x.v).to(torch.bfloat16)

    def plain(state: Tensor) -> Tensor:
        out: Tensor = fused_recurrent_simple_gla(
            q, k, v, g=x.log_decay, scale=1.0, initial_state=state, output_final_state=True
        )[0]
        return out[:, 0]

    return Rival(call=plain, transposed=True)


def _vllm(shape: LayerShape, x: OpInputs) -> Rival:
    batch = x.n_rows
    slots = torch.arange(batch, dtype=torch.int32, device=x.v.device)
    if shape.delta:
        from vllm.model_executor.layers.fla.ops import fused_recurrent_gated_delta_rule

        starts = torch.arange(batch + 1, dtype=torch.int64, device=x.v.device)
        q, k, v, g, beta = (
            y.transpose(0, 1).contiguous() for y in (x.q, x.k, x.v, x.log_decay, _given(x.beta))
        )

        def delta(state: Tensor) -> Tensor:
            out: Tensor = fused_recurrent_gated_delta_rule(
                q=q, k=k, v=v, g=g, beta=beta, scale=1.0, initial_state=state,
                inplace_final_state=True, cu_seqlens=starts, ssm_state_indices=slots,
            )[0]  # fmt: skip
            return out[0]

        return Rival(call=delta, transposed=True)
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

    # its kernel forms the decay as exp(A dt), with A and dt alike over a head
    dt = _given(x.dt)[:, 0]
    a = (x.log_decay[:, 0] / dt)[0]
    size = (shape.heads, shape.dv, shape.dk)
    decay = a[:, None, None].expand(size)
    x.log_decay.copy_((a * dt)[:, None])  # the same A for all rows
    steps = dt[..., None].expand(batch, shape.heads, shape.dv)
    out = torch.empty(batch, shape.heads, shape.dv, dtype=torch.bfloat16, device=x.v.device)

    def mamba(state: Tensor) -> Tensor:
        selective_state_update(
            state, x.v[:, 0], steps, decay, x.k[:, 0], x.q[:, 0], dt_softplus=False,
            state_batch_indices=slots, out=out,
        )  # fmt: skip
        return out

    return Rival(call=mamba, transposed=False)


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
