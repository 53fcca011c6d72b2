"""A transformers cache whose rows are sequences of different lengths, replaced one by one.

Keys and values lie in buffers [rows, heads, capacity, width]; a step writes each row at its own
length, and attention reads each row to its own length. Convolution states are the cache's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantlab.engine.attention import attention, lower_right
from quantlab.engine.teacher_forcing import _conv_states

if TYPE_CHECKING:
    from quantlab.models import LoadedModel, OpCall

NAME = "quantlab_slots"
# Rows are attended to over this multiple of tokens, by their own length alone: a result must not
# depend on how long the batch's longest row is.
BLOCK = 128
# Two tokens, so that transformers takes the first forward for a prefill.
BLANK = 2


class Slots:
    """Cache of a fixed number of rows.

    Args:
        m: the loaded model.
        rows: how many; every forward has this many, busy or not.
        capacity: most tokens of a row, prompt included.
    """

    def __init__(self, m: LoadedModel, rows: int, capacity: int) -> None:
        from quantlab.models import forward_hidden, new_cache, replaced

        self.m = m
        self.rows = rows
        self.capacity = -(-capacity // BLOCK) * BLOCK
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self.cache = new_cache(m)
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}
        blank = torch.zeros((rows, BLANK), dtype=torch.int64, device=m.device)
        # one blank forward has the installed version build its cache in its own shapes
        with lower_right(m.model), replaced(m, _zeros):
            forward_hidden(m, blank, cache=self.cache, start=0)
        for index, layer in enumerate(self.cache.layers):
            keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
            if isinstance(keys, Tensor) and isinstance(values, Tensor):
                self.buffers[index] = (self._buffer(keys), self._buffer(values))
                layer.update = self._updater(index)
            for _, conv in _conv_states(layer):
                conv.zero_()

    def attending(self) -> AbstractContextManager[None]:
        """Have the model attend over these rows inside the block."""
        return attention(self.m.model, NAME, self._attend)

    def fill(self, row: int, cache: Any, length: int) -> None:
        """Copy a prefilled sequence into a row.

        Args:
            row: which.
            cache: transformers cache of a forward over that sequence alone.
            length: its tokens.
        """
        self.lengths[row] = length
        for index, (keys, values) in self.buffers.items():
            layer = cache.layers[index]
            keys[row, :, :length] = layer.keys[0]
            values[row, :, :length] = layer.values[0]
        for own, given in zip(self.cache.layers, cache.layers, strict=True):
            for (_, into), (_, conv) in zip(_conv_states(own), _conv_states(given), strict=True):
                into[row] = conv[0]

    def clear(self, row: int) -> None:
        """Free a row; it is carried along at length 0."""
        self.lengths[row] = 0
        for layer in self.cache.layers:
            for _, conv in _conv_states(layer):
                conv[row] = 0

    def state_dict(self) -> dict[str, Tensor]:
        """All that later steps depend on; buffers to the longest row."""
        used = int(self.lengths.max())
        named = {"lengths": self.lengths.clone()}
        for index, (keys, values) in self.buffers.items():
            named[f"{index}.keys"] = keys[:, :, :used].clone()
            named[f"{index}.values"] = values[:, :, :used].clone()
        for index, layer in enumerate(self.cache.layers):
            for slot, conv in _conv_states(layer):
                named[f"{index}.conv.{slot}"] = conv.clone()
        return named

    def load_state_dict(self, named: dict[str, Tensor]) -> None:
        """Continue from `state_dict` of slots with the same arguments."""
        self.lengths = named["lengths"].clone()
        for index, buffers in self.buffers.items():
            for name, buffer in zip(("keys", "values"), buffers, strict=True):
                saved = named[f"{index}.{name}"]
                buffer[:, :, : saved.shape[2]] = saved.to(buffer.device)
        for index, layer in enumerate(self.cache.layers):
            for slot, conv in _conv_states(layer):
                conv.copy_(named[f"{index}.conv.{slot}"])

    def _buffer(self, like: Tensor) -> Tensor:
        shape = (self.rows, like.shape[1], self.capacity, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _updater(self, index: int) -> Callable[..., tuple[Tensor, Tensor]]:
        keys, values = self.buffers[index]

        def update(key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            # one token of every row, at the row's own length
            rows = torch.arange(self.rows, device=key.device)
            at = self.lengths.to(key.device)
            keys[rows, :, at] = key[:, :, 0]
            values[rows, :, at] = value[:, :, 0]
            return keys, values

        return update

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """One query of every row over the row's own tokens, the newest among them.

        Args:
            module: unused, as `attention_mask` and the rest: part of transformers' interface.
            query: [rows, heads, 1, d].
            key: [rows, key heads, capacity, d], from `update`.
            value: [rows, key heads, capacity, dv].
            attention_mask: None.
            scaling: factor on the scores; d**-0.5 when None.

        Returns:
            (output [rows, 1, heads, dv], None).
        """
        rows, heads = query.shape[:2]
        # heads that share keys become queries of one head: nothing is repeated
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], query.shape[3])
        out = grouped.new_empty((*grouped.shape[:3], value.shape[3]))
        blocks = self.lengths // BLOCK + 1
        for count in sorted(set(blocks.tolist())):
            inside = (blocks == count).nonzero()[:, 0]
            span = count * BLOCK
            mask = torch.arange(span) <= self.lengths[inside, None]
            inside, mask = inside.to(query.device), mask.to(query.device)
            out[inside] = torch.nn.functional.scaled_dot_product_attention(
                grouped[inside],
                key[inside, :, :span],
                value[inside, :, :span],
                attn_mask=mask[:, None, None],
                scale=scaling,
            )
        return out.reshape(rows, 1, heads, value.shape[3]), None


def _zeros(call: OpCall) -> tuple[Tensor, None]:
    x = call.inputs
    return x.v.new_zeros((x.n_rows, x.steps, x.heads, x.dv), dtype=x.compute_dtype), None
