"""One layer's decode cache in slots, and its step: the host side of the decode kernels.

A model step is `advance` (once), then `LayerCache.step` of each layer; all of it can be captured in
one CUDA graph per batch size. Rows of the batch name their slots; a negative slot is a padded row,
whose output is left as it is.

Records of a window of L tokens, L - 1 of them kept (the last is folded at once):

    keys      [slots, L - 1, Hk, dk]  after the L2 norm, in the activations' type
    values    [slots, L - 1, H, dv]   in the activations' type; delta rules that derive again
    written   [slots, L - 1, H, dv]   u, FP16 or FP32; without a delta rule x, as `values`
    logs      [slots, H, L - 1]       log decay, FP32; per key channel [slots, L - 1, H, dk]
    strengths [slots, H, L - 1]       FP32: beta where values are kept, dt of Mamba-2

BF16 records are kept as their bit patterns (int16).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from quantlab.formats import Format
from quantlab.recurrence import OpInputs
from quantlab.replay.policy import Policy
from quantlab.replay.records import RecordTypes
from quantlab_kernels.compiling import launch
from quantlab_kernels.decode_conventional import conventional_step_kernel
from quantlab_kernels.decode_flush import replay_flush_kernel
from quantlab_kernels.decode_flush_channels import replay_flush_channels_kernel
from quantlab_kernels.decode_flush_weights import VECTORS, flush_weights_kernel
from quantlab_kernels.decode_launch import (
    WEIGHTS_PER_SM,
    StepLaunch,
    TileLaunch,
    conventional_launch,
    flush_launch,
    programs,
    spanned_heads,
    step_launch,
)
from quantlab_kernels.decode_plan import Cursors, Plan
from quantlab_kernels.decode_steps import replay_step_kernel
from quantlab_kernels.decode_store import (
    KernelLimit,
    StateStore,
    format_name,
    lanes_width,
    row_width,
)
from quantlab_kernels.decode_weights import step_weights_kernel
from quantlab_kernels.stores import signed_seed

MAX_WINDOW = 64
_RECORD_STORAGE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.int16}
_RECORD_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def check_policy(policy: Policy) -> None:
    """Refuse what no layer could have.

    Raises:
        KernelLimit: its window or a format of it.
    """
    if policy.window > MAX_WINDOW:
        raise KernelLimit(f"{policy.short}: kernels have windows of up to {MAX_WINDOW}")
    for fmt in (policy.read, policy.recur):
        format_name(fmt)


@dataclass(slots=True, kw_only=True)
class LayerCache:
    """One recurrent layer's copies and records.

    Attributes:
        policy: when and how it stores.
        layer: ordinal of the recurrent layer, which keys random draws.
        seed: 64-bit seed.
        recur: recurrence or only copy.
        read: the copy that steps before the L-th read; `recur` with one copy.
        key_heads: key heads.
        delta: corrections exist.
        per_channel: decay per key channel.
        has_dt: Mamba-2.
        key_record: "fp32", "fp16" or "bf16", of keys and values.
        written_record: likewise, of what is written.
        keys, values, written, logs, strengths: records, as in the module's docstring.
        step_cut, flush_cut, whole_cut: launches; None takes the table's.
    """

    policy: Policy
    layer: int
    seed: int
    recur: StateStore
    read: StateStore
    key_heads: int
    delta: bool
    per_channel: bool
    has_dt: bool
    key_record: str
    written_record: str
    keys: Tensor
    values: Tensor
    written: Tensor
    logs: Tensor
    strengths: Tensor
    step_cut: StepLaunch | None = None
    flush_cut: TileLaunch | None = None
    whole_cut: TileLaunch | None = field(default=None)

    @classmethod
    def empty(
        cls, policy: Policy, inputs: OpInputs, *, slots: int, layer: int, seed: int
    ) -> "LayerCache":
        """Return a cache of unused slots for a layer whose steps look like `inputs`.

        Args:
            policy: L = 1 to 64.
            inputs: of any length; shapes, switches, dtypes and device are looked at.
            slots: number of sequences that it can hold.
            layer: ordinal of the recurrent layer.
            seed: 64-bit seed.

        Raises:
            KernelLimit: a window, a format, a width or a restriction that the kernels do not have.
        """
        policy, restricted = policy.at(layer, inputs.heads)
        if restricted is not None:
            raise KernelLimit(
                f"{policy.short} for some heads of recurrent layer {layer}: the decode kernels "
                "store all heads of a layer alike; name whole layers, or use the windowed engine"
            )
        check_policy(policy)
        device, heads, dv, dk = inputs.v.device, inputs.heads, inputs.dv, inputs.dk
        key_heads, kept = inputs.k.shape[2], policy.window - 1

        def copy_in(fmt: Format) -> StateStore:
            return StateStore.empty(fmt, slots=slots, heads=heads, dv=dv, dk=dk, device=device)

        recur = copy_in(policy.recur)
        key_record, written_record = record_names(policy, inputs)
        rederive = inputs.is_delta and policy.corrections == "rederive"

        def room(*shape: int, record: str = "fp32", wanted: bool = True) -> Tensor:
            shape = (slots, *shape) if wanted and kept else (0,)
            return torch.empty(shape, dtype=_RECORD_STORAGE[record], device=device)

        per_channel = inputs.per_channel
        return cls(
            policy=policy,
            layer=layer,
            seed=seed,
            recur=recur,
            read=copy_in(policy.read) if policy.kind == "separate" else recur,
            key_heads=key_heads,
            delta=inputs.is_delta,
            per_channel=per_channel,
            has_dt=inputs.dt is not None,
            key_record=key_record,
            written_record=written_record,
            keys=room(kept, key_heads, dk, record=key_record),
            values=room(kept, heads, dv, record=key_record, wanted=rederive),
            written=room(kept, heads, dv, record=written_record),
            logs=room(kept, heads, dk) if per_channel else room(heads, kept),
            strengths=room(heads, kept, wanted=rederive or inputs.dt is not None),
        )

    @property
    def rederives(self) -> bool:
        """Whether a flush derives corrections again."""
        return self.delta and self.policy.corrections == "rederive"

    def tensors(self) -> dict[str, Tensor]:
        """All that a later step reads, by name; the live ones."""
        stores = {"recur": self.recur}
        if self.policy.kind == "separate":
            stores["read"] = self.read
        named = {
            f"{copy}.{part}": getattr(store, part)
            for copy, store in stores.items()
            for part in ("codes", "scales", "state_scale")
        }
        named |= {n: getattr(self, n) for n in ("keys", "values", "written", "logs", "strengths")}
        return {name: x for name, x in named.items() if x.numel()}

    def start(self, states: Tensor, slots: Tensor, cursors: Cursors) -> None:
        """Store unrounded states [rows, H, dv, dk] after the prompt, in each copy."""
        keys = {"seed": self.seed, "layer": self.layer}
        if self.policy.kind == "separate":
            self.read.put(states, slots, cursors, copy=1, **keys)
        self.recur.put(states, slots, cursors, copy=0, **keys)

    def step(self, inputs: OpInputs, plan: Plan, cursors: Cursors, out: Tensor) -> None:
        """Take one token of every planned row.

        Args:
            inputs: T = 1, rows as planned; q, k, v and per-channel decays with unit stride along
                their last axis, any others.
            plan: of `advance` with this policy's window, launched before on the same stream.
            cursors: their streams.
            out: [rows, H, dv] FP32, unit stride along dv; rows without a slot are left as they are.

        Mutates:
            copies, records, out.

        Raises:
            ValueError: inputs that do not fit the cache, or memory that is not laid out as said.
        """
        self._check(inputs, plan, out)
        if self.policy.window == 1:
            self._conventional(inputs, plan, cursors, out)
        else:
            self.step_rows(inputs, plan, out)
            self.flush_rows(inputs, plan, cursors, out)

    def _check(self, inputs: OpInputs, plan: Plan, out: Tensor) -> None:
        recur = self.recur
        shape = (plan.capacity, 1, recur.heads, recur.dv)
        switches = (inputs.is_delta, inputs.per_channel, inputs.dt is not None)
        if (
            tuple(inputs.v.shape) != shape
            or inputs.k.shape[2:] != (self.key_heads, recur.dk)
            or switches != (self.delta, self.per_channel, self.has_dt)
            or inputs.compute_dtype != torch.float32
        ):
            raise ValueError(
                f"this cache takes v {shape} and k (.., {self.key_heads}, {recur.dk}) in FP32 or "
                f"less, got v {tuple(inputs.v.shape)}, k {tuple(inputs.k.shape)}, or other switches"
            )
        wide = [inputs.q, inputs.k, inputs.v, out]
        wide += [inputs.log_decay] if self.per_channel else []
        if any(x.stride(-1) != 1 for x in wide) or out.dtype != torch.float32:
            raise ValueError("q, k, v, per-channel decays and out (FP32) need unit last strides")
        if not inputs.v.is_cuda and isinstance(replay_step_kernel, JITFunction):
            raise ValueError(
                f"the decode kernels need a CUDA device, inputs are on {inputs.v.device} "
                "(TRITON_INTERPRET=1 runs them on the CPU, slowly)"
            )

    def _sources(self, inputs: OpInputs, out: Tensor) -> tuple[list[Tensor], list[int]]:
        """Tensors of the token and their strides along rows and heads."""
        strength = inputs.beta if inputs.beta is not None else inputs.dt
        strength = inputs.log_decay if strength is None else strength
        given = [inputs.q, inputs.k, inputs.v, inputs.log_decay, strength]
        strides = [s for x in given for s in (x.stride(0), x.stride(2))]
        return [*given, out], [*strides, out.stride(0), out.stride(1)]

    def step_rows(self, inputs: OpInputs, plan: Plan, out: Tensor) -> None:
        """Take the rows that do not flush; arguments as `step`."""
        read, window = self.read, self.policy.window
        group = read.heads // self.key_heads
        cut = self.step_cut or step_launch(
            read.name,
            rows=plan.capacity,
            heads=read.heads,
            key_heads=self.key_heads,
            dv=read.dv,
            dk=read.dk,
            per_channel=self.per_channel,
        )
        unit = 1 if self.per_channel else group
        rows, heads, columns = plan.capacity, read.heads, max(32, read.dk)
        block = max(16, triton.next_power_of_2(window))
        (q, k, v, log, strength, _), strides = self._sources(inputs, out)

        def room(*shape: int, record: str) -> Tensor:
            dtype = torch.float32 if record == "fp32" else torch.int16
            return torch.empty((rows, *shape), dtype=dtype, device=out.device)

        # what the heads of a row share is left by one kernel for the next
        wide = (2, columns) if read.name == "fp32" else (columns, 8)
        tall = (2, block) if self.written_record == "fp32" else (block, 8)
        shared = [
            room(heads // unit, *wide, record=read.name),
            room(heads, *tall, record=self.written_record),
            room(heads, 4, record="fp32"),
        ]
        switches = {
            "L": window,
            "BLOCK_L": block,
            "DK": read.dk,
            "COLUMNS": columns,
            "DELTA": self.delta,
            "PER_CHANNEL": self.per_channel,
            "HAS_DT": self.has_dt,
            "KEEP_V": self.rederives,
            "FORMAT": read.name,
            "KEY_RECORD": self.key_record,
            "WRITTEN_RECORD": self.written_record,
            "OVERLAP": cut.overlap and out.is_cuda,
        }
        launch(
            step_weights_kernel,
            (heads // unit, rows),
            q,
            k,
            log,
            strength,
            self.keys,
            self.logs,
            self.strengths,
            plan.lines,
            plan.counts,
            *shared,
            rows,
            heads,
            self.key_heads,
            *strides[:4],
            *strides[6:10],
            BLOCK_H=triton.next_power_of_2(unit),
            num_warps=1,
            **switches,
        )
        tiles = -(-unit * read.dv // cut.block_v)
        launch(
            replay_step_kernel,
            (tiles, heads // unit, rows),
            v,
            strength,
            out,
            read.words,
            read.scales,
            read.state_scale,
            self.values,
            self.written,
            plan.lines,
            plan.counts,
            *shared,
            rows,
            heads,
            self.key_heads,
            read.dv,
            read.slot_states,
            *strides[4:6],
            *strides[8:12],
            BLOCK_V=cut.block_v,
            WIDTH=min(cut.width, read.dk),
            SPAN=spanned_heads(cut.block_v, dv=read.dv, most=unit),
            WARPS=cut.warps,
            num_warps=cut.warps,
            maxnreg=cut.registers,
            launch_pdl=cut.overlap and out.is_cuda,
            **switches,
        )

    def flush_rows(self, inputs: OpInputs, plan: Plan, cursors: Cursors, out: Tensor) -> None:
        """Take the rows that flush; arguments as `step`."""
        recur, read, window = self.recur, self.read, self.policy.window
        cut = self.flush_cut or flush_launch(
            (recur.name, read.name),
            rows=plan.capacity,
            heads=recur.heads,
            dv=recur.dv,
            dk=recur.dk,
            per_channel=self.per_channel,
        )
        parts = -(-recur.dv // (cut.block_v * cut.tiles))
        grid = programs(plan.capacity * recur.heads * parts, cut.per_sm, inputs.v.device)
        # nothing is rounded where both copies are exact: only then may products fuse into sums
        exact = recur.fmt.is_exact and read.fmt.is_exact
        tensors, strides = self._sources(inputs, out)
        records = [self.keys, self.values, self.written]
        switches = {
            "L": window,
            "DK": recur.dk,
            "DELTA": self.delta,
            "HAS_DT": self.has_dt,
            "REDERIVE": self.rederives,
            "KEY_RECORD": self.key_record,
        }
        if self.per_channel:
            kernel, rest, width = replay_flush_channels_kernel, [], row_width(recur)
            records += [self.logs, self.strengths]
        else:
            switches["BLOCK_L"] = max(16, triton.next_power_of_2(window))
            rest = self._flush_weights(tensors, strides, plan, switches)
            kernel, width = replay_flush_kernel, lanes_width(recur)
            del tensors[3], strides[6:8]  # decays
            switches |= {"TILES": cut.tiles, "WARPS": cut.warps, "AHEAD": cut.ahead}
        launch(
            kernel,
            (grid,),
            *tensors,
            recur.codes,
            recur.scales,
            recur.state_scale,
            read.codes,
            read.scales,
            read.state_scale,
            *records,
            plan.lines,
            plan.counts,
            cursors.stream,
            cursors.diverged,
            *rest,
            signed_seed(self.seed),
            self.layer,
            plan.capacity,
            recur.heads,
            self.key_heads,
            recur.dv,
            recur.slot_states,
            read.slot_states,
            *strides,
            BLOCK_V=cut.block_v,
            WIDTH=width,
            SEPARATE=self.policy.kind == "separate",
            FORMAT=recur.name,
            SR=recur.fmt.needs_words,
            READ_FORMAT=read.name,
            READ_SR=read.fmt.needs_words,
            WRITTEN_RECORD=self.written_record,
            **switches,
            num_warps=cut.warps,
            maxnreg=cut.registers,
            enable_fp_fusion=exact,
        )

    def _flush_weights(
        self, tensors: list[Tensor], strides: list[int], plan: Plan, switches: dict[str, Any]
    ) -> list[Tensor]:
        """Form what a flush knows without the states; returns it, in rooms of its own."""
        q, k, _, log, strength, out = tensors
        items, block = plan.capacity * self.recur.heads, switches["BLOCK_L"]
        grid = programs(items, WEIGHTS_PER_SM, out.device)

        def room(*shape: int, wanted: bool = True) -> Tensor:
            return torch.empty(shape if wanted else 0, dtype=torch.float32, device=out.device)

        couples = room(grid, block, block, wanted=self.rederives)
        left = [room(items, VECTORS.value, block), room(items, block, block, wanted=self.rederives)]
        launch(
            flush_weights_kernel,
            (grid,),
            q,
            k,
            log,
            strength,
            self.keys,
            self.logs,
            self.strengths,
            plan.lines,
            plan.counts,
            couples,
            *left,
            plan.capacity,
            self.recur.heads,
            self.key_heads,
            *strides[:4],
            *strides[6:10],
            num_warps=1,
            **switches,
        )
        return left

    def _conventional(self, inputs: OpInputs, plan: Plan, cursors: Cursors, out: Tensor) -> None:
        recur = self.recur
        cut = self.whole_cut or conventional_launch(
            recur.name, rows=plan.capacity, heads=recur.heads, dv=recur.dv, dk=recur.dk
        )
        tensors, strides = self._sources(inputs, out)
        grid = (-(-recur.dv // cut.block_v), recur.heads, plan.capacity)
        exact = recur.fmt.is_exact
        launch(
            conventional_step_kernel,
            grid,
            *tensors,
            recur.codes,
            recur.scales,
            recur.state_scale,
            plan.lines,
            plan.counts,
            cursors.stream,
            cursors.diverged,
            signed_seed(self.seed),
            self.layer,
            plan.capacity,
            recur.heads,
            recur.heads // self.key_heads,
            recur.dv,
            recur.slot_states,
            *strides,
            BLOCK_V=cut.block_v,
            DK=recur.dk,
            WIDTH=row_width(recur),
            DELTA=self.delta,
            PER_CHANNEL=self.per_channel,
            HAS_DT=self.has_dt,
            FORMAT=recur.name,
            SR=recur.fmt.needs_words,
            num_warps=cut.warps,
            maxnreg=cut.registers,
            enable_fp_fusion=exact,
        )


def record_names(policy: Policy, inputs: OpInputs) -> tuple[str, str]:
    """Name the types of key (and value) records and of written ones."""
    types = RecordTypes.of(policy.records, inputs)
    kept = types.k or types.v
    if kept is None and policy.records == "auto":
        # values already of the activations' type are recorded in it, which rounds nothing
        kept = inputs.activation_dtype if inputs.v.dtype == inputs.activation_dtype else None
    key = _RECORD_NAMES[kept or torch.float32]
    if not inputs.is_delta:
        return key, key
    return key, _RECORD_NAMES[types.u or torch.float32]
