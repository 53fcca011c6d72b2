"""Slots of one copy of a layer's states, and what the decode kernels can hold in them.

The layout is that of `decode_formats`.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quantlab.errors import UsageError
from quantlab.formats import Encoded, Format, decode
from quantlab.formats.cast import CastCounts
from quantlab.formats.codes import unpack_nibbles
from quantlab_kernels.compiling import launch
from quantlab_kernels.decode_formats import put_states_kernel
from quantlab_kernels.decode_plan import Cursors
from quantlab_kernels.draws import COPY_STRIDE
from quantlab_kernels.stores import signed_seed, store_kind

FORMATS = ("fp32", "fp16", "bf16", "fp8", "nvfp4", "int8", "int4")
"""Kernels' names of the formats that the decode kernels have; integers have a scale per row."""
PACKED = ("nvfp4", "int4")
"""Those with two codes to a byte."""


class KernelLimit(UsageError, ValueError):
    """A policy or a layer that the decode kernels do not have; the message says what they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStore:
    """Slots of one copy of a layer's states; see `decode_formats` for the layout.

    Attributes:
        fmt: its format.
        heads: value heads.
        dv: value width.
        dk: key width.
        codes: [slots, H, dv, width].
        scales: [slots, H, dv], [slots, H, dv, dk / 16] or empty.
        state_scale: [slots, H] or empty.
    """

    fmt: Format
    heads: int
    dv: int
    dk: int
    codes: Tensor
    scales: Tensor
    state_scale: Tensor

    @classmethod
    def empty(
        cls, fmt: Format, *, slots: int, heads: int, dv: int, dk: int, device: torch.device | str
    ) -> "StateStore":
        """Return slots with nothing in them.

        Raises:
            KernelLimit: a format or a key width that the kernels do not have.
        """
        name = format_name(fmt)
        if dk not in (16, 32, 64, 128):
            raise KernelLimit(f"the decode kernels take dk of 16, 32, 64 or 128, got {dk}")
        types = {
            "fp32": torch.float32,
            "fp16": torch.float16,
            "bf16": torch.int16,
        }

        def room(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((slots, heads, *shape), dtype=dtype, device=device)

        width = dk // 2 if name in PACKED else dk
        none = torch.empty(0, dtype=torch.float32, device=device)
        scales = none
        if name in ("fp8", "int8", "int4"):
            scales = room(dv, dtype=torch.float32)
        elif name == "nvfp4":
            scales = room(dv, dk // 16, dtype=torch.uint8)
        return cls(
            fmt=fmt,
            heads=heads,
            dv=dv,
            dk=dk,
            codes=room(dv, width, dtype=types.get(name, torch.uint8)),
            scales=scales,
            state_scale=room(dtype=torch.float32) if name == "nvfp4" else none,
        )

    @property
    def name(self) -> str:
        """Kernels' name of the format."""
        return format_name(self.fmt)

    @property
    def words(self) -> Tensor:
        """Codes as the step kernel takes them: int32 words where several share one."""
        return self.codes if self.name == "fp32" else self.codes.view(torch.int32)

    @property
    def slot_states(self) -> int:
        """States from one slot to the next; all tensors agree, or this raises ValueError."""
        inner = self.codes[0]
        states, rest = divmod(self.codes.stride(0), inner[0].numel())
        parts = [x for x in (self.scales, self.state_scale) if x.numel()]
        even = all(x.stride(0) == states * x[0, 0].numel() and x[0].is_contiguous() for x in parts)
        if rest or not inner.is_contiguous() or not even:
            raise ValueError(
                "a slot's states are contiguous and slots a whole number of states apart, the same "
                f"for codes and scales; got strides {self.codes.stride()} for "
                f"{tuple(self.codes.shape)}"
            )
        return states

    def put(
        self, states: Tensor, slots: Tensor, cursors: Cursors, *, seed: int, layer: int, copy: int
    ) -> None:
        """Store states after the prompt (flush 0) in slots; rows of negative slots are skipped.

        Args:
            states: [rows, H, dv, dk] FP32, contiguous.
            slots: integer [rows].
            cursors: whose streams key the draws.
            seed: 64-bit seed.
            layer: ordinal of the recurrent layer.
            copy: 0 recurrence or shared, 1 read.
        """
        launch(
            put_states_kernel,
            (self.heads, states.shape[0]),
            states,
            slots,
            cursors.stream,
            cursors.diverged,
            self.codes,
            self.scales,
            self.state_scale,
            signed_seed(seed),
            layer + copy * COPY_STRIDE.value,
            0,
            self.heads,
            self.dv,
            self.slot_states,
            FORMAT=self.name,
            SR=self.fmt.needs_words,
            BLOCK_V=max(16, triton.next_power_of_2(self.dv)),
            DK=self.dk,
            num_warps=8,
            enable_fp_fusion=False,
        )

    def encoded(self, slots: Tensor) -> Encoded:
        """Take slots out as `quantlab.formats` holds a stored state; for inspection, not fast."""
        index = slots.to(torch.int64)
        codes = self.codes[index]
        views = {"fp32": torch.uint32, "fp16": torch.uint16, "bf16": torch.uint16}
        codes = codes.view(views[self.name]) if self.name in views else codes
        scales = state_scale = None
        if self.name in PACKED:
            codes = unpack_nibbles(codes, self.dk)
        if self.name == "nvfp4":
            scales, state_scale = self.scales[index], self.state_scale[index][..., None, None]
        elif self.scales.numel():
            scales = self.scales[index][..., None]
        if self.name == "int8":
            codes = codes.view(torch.int8)
        elif self.name == "int4":
            codes = (codes.to(torch.int8) ^ 8) - 8  # two's complement of four bits
        none = torch.zeros((), dtype=torch.int64, device=codes.device)
        counts = CastCounts(nonfinite=none, clipped=none, zeroed=none, flushed=none)
        return Encoded(
            fmt=self.fmt, codes=codes, scales=scales, state_scale=state_scale, counts=counts
        )

    def values(self, slots: Tensor) -> Tensor:
        """Decode slots: [rows, H, dv, dk] FP32; for inspection, not fast."""
        return decode(self.encoded(slots))


def format_name(fmt: Format) -> str:
    """Find the decode kernels' name of a format.

    Raises:
        KernelLimit: they do not have it.
    """
    name = store_kind(fmt).name
    if name not in FORMATS:
        known = ", ".join(f"{n}@row" if n.startswith("int") else n for n in FORMATS)
        raise KernelLimit(
            f"the decode kernels do not have {fmt.short}; they have {known} (and -sr)"
        )
    return name


def lanes_width(store: StateStore) -> int:
    """Choose how many elements of a row four lanes fetch at once: 16 bytes each."""
    return store.dk if store.name in PACKED else min(store.dk, 64 // store.codes.element_size())


def row_width(store: StateStore) -> int:
    """Choose how many elements of a row lie side by side in a warp: 128 bytes of them."""
    bytes_each = store.codes.element_size()
    return store.dk if bytes_each == 1 else min(store.dk, 128 // bytes_each)
