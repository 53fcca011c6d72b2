"""A transformers cache at fixed addresses, its rows sequences of different lengths.

Keys and values lie in buffers [rows, heads, capacity, width]; a step writes each row at its own
length, which is kept on the device, and attention reads each row to its own length. Convolution
states are the cache's own, which it updates in place. Recurrent states are not here: the cache's
own slots for them are views of one zero, and storing to them does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantlab import dispatch
from quantlab.engine.attention import attention, lower_right
from quantlab.engine.prompt import Prompt
from quantlab.engine.teacher_forcing import conv_states
from quantlab.engine.transfer import on_device
from quantlab.recurrence import OpInputs

if TYPE_CHECKING:
    from quantlab.models import LoadedModel, OpCall

NAME = "quantlab_fixed_cache"
# Off CUDA rows are attended to over this multiple of tokens, by their own length alone: a result
# must not depend on how long the batch's longest row is.
BLOCK = 128
# Two tokens, so that transformers takes the first forward for a prefill.
BLANK = 2


class FixedCache:
    """Cache of a fixed number of rows.

    Args:
        m: the loaded model.
        rows: how many; every forward has this many, busy or not.
        capacity: most tokens of a row, prompt included.

    Attributes:
        cache: the transformers cache to run the model with.
        examples: by recurrent layer, inputs of its op: shapes, dtypes and switches mean something.
        lengths: [rows] int64 on the device, tokens of each row.
        host_lengths: the same on the host, kept by counting.
    """

    def __init__(self, m: LoadedModel, rows: int, capacity: int) -> None:
        from quantlab.models import forward_hidden, new_cache, replaced

        self.rows = rows
        self.capacity = -(-capacity // BLOCK) * BLOCK
        self.most = capacity
        self._model = m.model
        self._device = m.device
        self._attend = (
            dispatch.decode_attention()(rows, self.capacity, m.device)
            if m.device.type == "cuda"
            else None
        )
        self._counts = torch.zeros((2, rows), dtype=torch.int64, device=m.device)
        self.lengths, self._live = self._counts
        self._row = torch.arange(rows, device=m.device)
        self.host_lengths = torch.zeros(rows, dtype=torch.int64)
        self._host_live = torch.zeros(rows, dtype=torch.int64)
        self.cache = new_cache(m)
        self.examples: list[OpInputs] = []
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}

        def look(call: OpCall) -> tuple[Tensor, None]:
            x = call.inputs
            self.examples.append(x.slice(0, 1)._map(torch.clone))
            shape = (x.n_rows, x.steps, x.heads, x.dv)
            return x.v.new_zeros(shape, dtype=x.compute_dtype), None

        # one blank forward has the installed version build its cache in its own shapes
        blank = torch.zeros((rows, BLANK), dtype=torch.int64, device=m.device)
        with lower_right(m.model), replaced(m, look):
            forward_hidden(m, blank, cache=self.cache, start=0)
        for index, layer in enumerate(self.cache.layers):
            keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
            if isinstance(keys, Tensor) and isinstance(values, Tensor):
                self.buffers[index] = (self._buffer(keys), self._buffer(values))
                layer.update = self._updater(index)
            for _, conv in conv_states(layer):
                conv.zero_()
            states = getattr(layer, "recurrent_states", None)
            if states is not None and isinstance(states[0], Tensor):
                states[0] = states[0].new_zeros(()).expand(states[0].shape)
                layer.update_recurrent_state = _kept

    def attending(self) -> AbstractContextManager[None]:
        """Have the model attend over these rows inside the block."""
        return attention(self._model, NAME, self._attended)

    def check_room(self) -> None:
        """Refuse a step that a busy row has no room for.

        Raises:
            ValueError: naming the rows.
        """
        full = ((self.host_lengths >= self.most) & (self._host_live > 0)).nonzero()[:, 0]
        if len(full):
            raise ValueError(f"rows {full.tolist()} are full: they hold {self.most} tokens")

    def advance(self) -> None:
        """Count a token of every busy row, on the device."""
        self.lengths.add_(self._live)

    def count(self) -> None:
        """Count it on the host."""
        self.host_lengths += self._host_live

    def fill(self, rows: Sequence[int], prompt: Prompt, *, of: Sequence[int]) -> None:
        """Copy prefilled sequences into rows.

        Args:
            rows: which.
            prompt: the sequences.
            of: by row, which of them.

        Raises:
            ValueError: one is longer than a row can be.
        """
        lengths = [prompt.lengths[i] for i in of]
        longest = max(lengths)
        if longest > self.most:
            raise ValueError(f"a row holds {self.most} tokens, the prompt has {longest}")
        into, which = on_device([list(rows), list(of)], self._device)
        for index, buffers in self.buffers.items():
            for buffer, given in zip(buffers, prompt.attended[index], strict=True):
                buffer[into, :, :longest] = given[which, :, :longest]
                if self._attend is None:
                    # blocks are met whole, and no weight of 0 keeps a NaN out: a broken row's go
                    buffer[into, :, longest:] = 0
        for layer, convolved in zip(self.cache.layers, prompt.convolved, strict=True):
            for (_, conv), given in zip(conv_states(layer), convolved, strict=True):
                conv[into] = given[which]
        self._set(rows, lengths, 1)

    def clear(self, rows: Sequence[int]) -> None:
        """Free rows; they are carried along at length 0."""
        into = on_device(list(rows), self._device)
        self._set(rows, [0] * len(rows), 0)
        for layer in self.cache.layers:
            for _, conv in conv_states(layer):
                conv[into] = 0

    def state_dict(self) -> dict[str, Tensor]:
        """All that later steps depend on, buffers to the longest row; copies."""
        used = int(self.host_lengths.max())
        named = {"lengths": self.host_lengths.clone(), "live": self._host_live.clone()}
        for index, (keys, values) in self.buffers.items():
            named[f"{index}.keys"] = keys[:, :, :used].clone()
            named[f"{index}.values"] = values[:, :, :used].clone()
        for index, layer in enumerate(self.cache.layers):
            for slot, conv in conv_states(layer):
                named[f"{index}.conv.{slot}"] = conv.clone()
        return named

    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of a cache with the same arguments."""
        self.host_lengths.copy_(named["lengths"])
        self._host_live.copy_(named["live"])
        self._upload()
        for index, buffers in self.buffers.items():
            for name, buffer in zip(("keys", "values"), buffers, strict=True):
                saved = named[f"{index}.{name}"]
                buffer[:, :, : saved.shape[2]] = saved.to(buffer.device)
        for index, layer in enumerate(self.cache.layers):
            for slot, conv in conv_states(layer):
                conv.copy_(named[f"{index}.conv.{slot}"])

    def _set(self, rows: Sequence[int], lengths: Sequence[int], live: int) -> None:
        at = torch.tensor(list(rows), dtype=torch.int64)
        self.host_lengths[at] = torch.tensor(list(lengths), dtype=torch.int64)
        self._host_live[at] = live
        self._upload()

    def _upload(self) -> None:
        """Set the device's counts to the host's, which has counted all steps started so far."""
        counts = torch.stack([self.host_lengths, self._host_live])
        self._counts.copy_(on_device(counts, self._device))

    def _buffer(self, like: Tensor) -> Tensor:
        shape = (self.rows, like.shape[1], self.capacity, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _updater(self, index: int) -> Callable[..., tuple[Tensor, Tensor]]:
        keys, values = self.buffers[index]

        def update(key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            # one token of every row, at the row's own length
            keys[self._row, :, self.lengths] = key[:, :, 0]
            values[self._row, :, self.lengths] = value[:, :, 0]
            return keys, values

        return update

    def _attended(
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
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self._attend is not None:
            return self._attend(query[:, :, 0], key, value, self.lengths, scale)[:, None], None
        rows, heads = query.shape[:2]
        # heads that share keys become queries of one head: nothing is repeated
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], query.shape[3])
        out = grouped.new_empty((*grouped.shape[:3], value.shape[3]))
        blocks = self.host_lengths // BLOCK + 1
        for count in sorted(set(blocks.tolist())):
            inside = (blocks == count).nonzero()[:, 0]
            span = count * BLOCK
            mask = torch.arange(span) <= self.host_lengths[inside, None]
            out[inside] = torch.nn.functional.scaled_dot_product_attention(
                grouped[inside],
                key[inside, :, :span],
                value[inside, :, :span],
                attn_mask=mask[:, None, None],
                scale=scale,
            )
        return out.reshape(rows, 1, heads, value.shape[3]), None


def _kept(recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return recurrent_states
