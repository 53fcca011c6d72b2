"""A decoder's recurrent states in plain torch: one `RowwiseCache` a layer and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantlab.recurrence import OpInputs
from quantlab.replay import Policy
from quantlab.replay.rowwise import DIVERGED, RowwiseCache


class RowwiseStates:
    """States of every layer; see `quantlab.engine.decoder.RowStates`.

    Args:
        policies: that a row can have.
        examples: by layer; their device matters here.
        rows: how many.
        places: not limited here.
        seed: of policies that bring none.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        examples: Sequence[OpInputs],
        *,
        rows: int,
        places: Sequence[int],
        seed: int,
    ) -> None:
        del places
        self.rows = rows
        self._device = examples[0].v.device
        seeds = [seed if policy.seed is None else policy.seed for policy in policies]
        self._group = [sorted(set(seeds)).index(own) for own in seeds]
        # which caches a row's policy belongs to; −1: free
        self._of_row = torch.full((rows,), -1, dtype=torch.int64)
        self._layers = [
            [
                RowwiseCache(policies, rows, layer=layer, seed=own)
                for own in sorted(set(seeds))
            ]
            for layer in range(len(examples))
        ]  # fmt: skip

    def start(
        self,
        rows: Sequence[int],
        states: Sequence[Tensor],
        *,
        of: Sequence[int],
        policies: Sequence[int],
        streams: Sequence[int],
    ) -> None:
        """Store unrounded states, by layer [n, H, dv, dk], as flush 0 of these rows."""
        self.stop(rows)
        for row, i, policy, stream in zip(rows, of, policies, streams, strict=True):
            group = self._group[policy]
            self._of_row[row] = group
            for caches, state in zip(self._layers, states, strict=True):
                caches[group].start(row, state[i], policy=policy, stream=stream)

    def stop(self, rows: Sequence[int]) -> None:
        """Free rows."""
        for row in rows:
            self._of_row[row] = -1
            for caches in self._layers:
                for cache in caches:
                    cache.stop(row)

    def compile(self) -> None:
        """Nothing: there are no kernels."""

    def advance(self) -> None:
        """Begin a model step."""

    def step(self, layer: int, inputs: OpInputs) -> Tensor:
        """Take one token of every row in a layer: [rows, 1, H, dv]."""
        out: Tensor | None = None
        for group, cache in enumerate(self._layers[layer]):
            mine = self._of_row == group
            if not mine.any():
                continue
            found = cache(inputs)
            out = found if out is None else torch.where(_column(mine, found), found, out)
        if out is None:
            shape = (inputs.n_rows, 1, inputs.heads, inputs.dv)
            return inputs.v.new_zeros(shape, dtype=inputs.compute_dtype)
        return out

    @property
    def diverged_at(self) -> Tensor:
        """[rows] int64: tokens after the prompt at the first store that was not finite, or −1."""
        marks = [cache.counters[DIVERGED] for caches in self._layers for cache in caches]
        never = torch.iinfo(torch.int64).max
        first = torch.stack([torch.where(at < 0, never, at) for at in marks]).amin(0)
        return torch.where(first == never, -1, first).to(self._device)

    def state_dict(self) -> dict[str, Tensor]:
        """All that later steps depend on; copies."""
        named = {"groups": self._of_row.clone()}
        for layer, caches in enumerate(self._layers):
            for group, cache in enumerate(caches):
                for name, x in cache.state_dict().items():
                    named[f"{layer}.{group}.{name}"] = x
        return named

    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of states with the same arguments."""
        self._of_row = named["groups"].clone()
        for layer, caches in enumerate(self._layers):
            for group, cache in enumerate(caches):
                prefix = f"{layer}.{group}."
                own = {k.removeprefix(prefix): x for k, x in named.items() if k.startswith(prefix)}
                cache.load_state_dict(own, self._device)


def _column(mine: Tensor, like: Tensor) -> Tensor:
    return mine.to(like.device).view(-1, 1, 1, 1)
