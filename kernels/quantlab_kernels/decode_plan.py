"""Where every sequence stands in its window, and what one model step does with each row.

All layers of a model advance together, so this is done once a step, by one small program: rows of
the batch are sorted into those that take an output-only step and those that flush, padded rows
(slot < 0) into neither, and the cursors of the slots move on. The kernels of every layer read the
sorted list; nothing of it is known on the host, so one captured CUDA graph per batch size serves
rows at any positions, and a batch in which a few rows flush is as balanced as one without.

Bytes: 40 a row. Rounding points: none.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantlab_kernels.compiling import launch

MAX_ROWS = 4096
ROW, SLOT, COUNT, FLUSH = (tl.constexpr(i) for i in range(4))
"""Lines of the plan: row of the batch, slot, records before this step, number of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursors:
    """Per slot, shared by all layers.

    Attributes:
        count: int32 [slots] records in the open window, h.
        flush: int32 [slots] number of the next store; 0 is the store after the prompt.
        stream: int64 [slots] global stream id, which keys random draws.
        diverged: int32 [slots] number of the first store, in any layer, that left something not
            finite; -1 for none.
    """

    count: Tensor
    flush: Tensor
    stream: Tensor
    diverged: Tensor

    @classmethod
    def empty(cls, slots: int, device: torch.device | str) -> "Cursors":
        """Return cursors of unused slots, each its own stream."""
        return cls(
            count=torch.zeros(slots, dtype=torch.int32, device=device),
            flush=torch.zeros(slots, dtype=torch.int32, device=device),
            stream=torch.arange(slots, dtype=torch.int64, device=device),
            diverged=torch.full((slots,), -1, dtype=torch.int32, device=device),
        )

    def part(self, first: int, slots: int) -> "Cursors":
        """Return those of some slots, which stay parts of these."""
        inside = slice(first, first + slots)
        return Cursors(
            count=self.count[inside],
            flush=self.flush[inside],
            stream=self.stream[inside],
            diverged=self.diverged[inside],
        )

    def start(self, slots: Tensor, streams: Tensor) -> None:
        """Begin sequences; their states after the prompt are stored next (as flush 0)."""
        index = slots.to(torch.int64)
        self.diverged[index] = -1
        self.count[index] = 0
        self.flush[index] = 1
        self.stream[index] = streams.to(torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step's rows, sorted: first the `counts[0]` that step, then the `counts[1]` that flush.

    Attributes:
        lines: int32 [4, capacity], see ROW, SLOT, COUNT, FLUSH.
        counts: int32 [2].
    """

    lines: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> "Plan":
        """Return room for the plan of a batch of `rows`.

        Raises:
            ValueError: a batch beyond MAX_ROWS.
        """
        if not 1 <= rows <= MAX_ROWS:
            raise ValueError(f"a plan takes 1 to {MAX_ROWS} rows, got {rows}")
        return cls(
            lines=torch.zeros((4, rows), dtype=torch.int32, device=device),
            counts=torch.zeros(2, dtype=torch.int32, device=device),
        )

    @property
    def capacity(self) -> int:
        """Rows of the batch."""
        return self.lines.shape[1]


@triton.jit
def advance_kernel(
    slots_ptr,
    count_ptr,
    flush_ptr,
    lines_ptr,
    counts_ptr,
    rows,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program."""
    row = tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots_ptr + row, mask=inside, other=-1).to(tl.int64)
    live = slot >= 0
    count = tl.load(count_ptr + slot, mask=live, other=0)
    flush = tl.load(flush_ptr + slot, mask=live, other=0)
    fills = live & (count >= L - 1)
    steps = live & (count < L - 1)
    n_steps = tl.sum(steps.to(tl.int32), axis=0)
    behind = tl.cumsum(fills.to(tl.int32), axis=0) - 1 + n_steps
    place = tl.where(fills, behind, tl.cumsum(steps.to(tl.int32), axis=0) - 1)
    tl.store(lines_ptr + ROW * rows + place, row, mask=live)
    tl.store(lines_ptr + SLOT * rows + place, slot.to(tl.int32), mask=live)
    tl.store(lines_ptr + COUNT * rows + place, count, mask=live)
    tl.store(lines_ptr + FLUSH * rows + place, flush, mask=live)
    tl.store(counts_ptr, n_steps)
    tl.store(counts_ptr + 1, tl.sum(fills.to(tl.int32), axis=0))
    tl.store(count_ptr + slot, tl.where(fills, 0, count + 1), mask=live)
    tl.store(flush_ptr + slot, flush + fills.to(tl.int32), mask=live)


def advance(slots: Tensor, cursors: Cursors, plan: Plan, *, window: int) -> None:
    """Plan one step of a batch and commit its records to the cursors.

    Launch it before the layers of the step, on the same stream.

    Args:
        slots: int32 or int64 [rows] slot of each row, each once; negative for a padded row.
        cursors: of the slots.
        plan: room for as many rows.
        window: L; 1 plans conventional decoding, where every row stores.

    Mutates:
        plan, cursors.

    Raises:
        ValueError: another number of rows than the plan has room for.
    """
    if slots.shape != (plan.capacity,) or slots.stride(0) != 1:
        raise ValueError(
            f"the plan is for {plan.capacity} rows, got slots {tuple(slots.shape)}, "
            f"strides {slots.stride()}"
        )
    launch(
        advance_kernel,
        (1,),
        slots,
        cursors.count,
        cursors.flush,
        plan.lines,
        plan.counts,
        plan.capacity,
        L=window,
        BLOCK=triton.next_power_of_2(plan.capacity),
        num_warps=4,
    )
