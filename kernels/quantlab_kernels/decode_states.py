"""A decoder's recurrent states on the decode kernels: every layer's cache of every policy.

Policies share the rows of a batch. Each has its own pool of slots, cursors and plan; the plan of a
policy sorts that policy's rows, and for all others they are padded rows, which cost nothing. Which
slot a row has is a table on the device, so one captured graph outlives any change of rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.recurrence import OpInputs
from quantlab.replay import Policy
from quantlab_kernels.decode import LayerCache
from quantlab_kernels.decode_plan import Cursors, Plan, advance


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One policy's slots.

    Attributes:
        policy: it.
        layers: its cache of every layer.
        cursors: of its slots, shared by all layers.
        plan: of one step of the batch.
        slot_of: int32 [rows] on the device; −1: the row has another policy, or none.
        free: slots that no row has, the next to be taken last.
        taken: slot by row.
    """

    policy: Policy
    layers: list[LayerCache]
    cursors: Cursors
    plan: Plan
    slot_of: Tensor
    free: list[int]
    taken: dict[int, int]

    def tensors(self) -> dict[str, Tensor]:
        """All that later steps depend on, by name; the live ones."""
        named = {
            "slot_of": self.slot_of,
            "count": self.cursors.count,
            "flush": self.cursors.flush,
            "stream": self.cursors.stream,
            "diverged": self.cursors.diverged,
        }
        for layer, cache in enumerate(self.layers):
            named |= {f"{layer}.{name}": x for name, x in cache.tensors().items()}
        return named


class KernelStates:
    """States of every layer; see `quantlab.engine.decoder.RowStates`.

    Args:
        policies: that a row can have.
        examples: by layer, inputs that look like its steps'.
        rows: of every step.
        places: by policy, its slots.
        seed: of policies that bring none.

    Raises:
        ValueError: a window, a format or a width that the kernels do not have.
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
        self.rows = rows
        device = examples[0].v.device
        self._pools = [
            Pool(
                policy=policy,
                layers=[
                    LayerCache.empty(
                        policy,
                        x,
                        slots=slots,
                        layer=layer,
                        seed=seed if policy.seed is None else policy.seed,
                    )
                    for layer, x in enumerate(examples)
                ],
                cursors=Cursors.empty(slots, device),
                plan=Plan.empty(rows, device),
                slot_of=torch.full((rows,), -1, dtype=torch.int32, device=device),
                free=list(reversed(range(slots))),
                taken={},
            )
            for policy, slots in zip(policies, places, strict=True)
        ]
        shapes = {(x.heads, x.dv) for x in examples}
        # layers run one after the other: those of one shape share their outputs' memory
        self._out = {shape: torch.zeros((rows, *shape), device=device) for shape in shapes}

    def start(
        self,
        rows: Sequence[int],
        states: Sequence[Tensor],
        *,
        policies: Sequence[int],
        streams: Sequence[int],
    ) -> None:
        """Store unrounded states, by layer [n, H, dv, dk], as flush 0 of these rows.

        Raises:
            ValueError: more rows of a policy than it has places.
        """
        self.stop(rows)
        for index, pool in enumerate(self._pools):
            inside = [i for i, p in enumerate(policies) if p == index]
            if not inside:
                continue
            if len(inside) > len(pool.free):
                raise ValueError(
                    f"{pool.policy.short}: {len(inside)} rows more, {len(pool.free)} places left "
                    f"of {len(pool.free) + len(pool.taken)}"
                )
            taken = [pool.free.pop() for _ in inside]
            where = [rows[i] for i in inside]
            pool.taken.update(zip(where, taken, strict=True))
            slots = self._index(taken)
            pool.slot_of[self._index(where)] = slots.to(torch.int32)
            pool.cursors.start(slots, self._index([streams[i] for i in inside]))
            picked = self._index(inside)
            for cache, state in zip(pool.layers, states, strict=True):
                cache.start(state[picked].float().contiguous(), slots, pool.cursors)

    def compile(self) -> None:
        """Launch what `start` launches, for compilation ahead (`compiling`)."""
        for pool in self._pools:
            slots = pool.cursors.stream[:1]
            for cache in pool.layers:
                recur = cache.recur
                states = torch.empty(1, recur.heads, recur.dv, recur.dk, device=slots.device)
                cache.start(states, slots, pool.cursors)

    def stop(self, rows: Sequence[int]) -> None:
        """Free rows; their outputs read zero from then on."""
        for pool in self._pools:
            held = [row for row in rows if row in pool.taken]
            if held:
                pool.free.extend(pool.taken.pop(row) for row in held)
                pool.slot_of[self._index(held)] = -1
        for out in self._out.values():
            out[self._index(rows)] = 0

    def advance(self) -> None:
        """Begin a model step: sort every policy's rows, and move their cursors on."""
        for pool in self._pools:
            advance(pool.slot_of, pool.cursors, pool.plan, window=pool.policy.window)

    def step(self, layer: int, inputs: OpInputs) -> Tensor:
        """Take one token of every row in a layer: [rows, 1, H, dv]."""
        given = inputs._map(_dense)
        out = self._out[inputs.heads, inputs.dv]
        for pool in self._pools:
            pool.layers[layer].step(given, pool.plan, pool.cursors, out)
        return out.unsqueeze(1)

    @property
    def diverged_at(self) -> Tensor:
        """[rows] int64: tokens after the prompt at the first store that was not finite, or −1."""
        at = torch.full((self.rows,), -1, dtype=torch.int64, device=self._pools[0].slot_of.device)
        for pool in self._pools:
            # store number n is made by token n · L
            slots = pool.slot_of.clamp(min=0).to(torch.int64)
            number = pool.cursors.diverged[slots].to(torch.int64)
            here = torch.where(number < 0, -1, number * pool.policy.window)
            at = torch.where(pool.slot_of >= 0, here, at)
        return at

    def state_dict(self) -> dict[str, Tensor]:
        """All that later steps depend on; copies."""
        return {
            f"{index}.{name}": x.clone()
            for index, pool in enumerate(self._pools)
            for name, x in pool.tensors().items()
        }

    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of states with the same arguments."""
        for index, pool in enumerate(self._pools):
            for name, x in pool.tensors().items():
                x.copy_(named[f"{index}.{name}"])
            slots = pool.slot_of.tolist()
            pool.taken.clear()
            pool.taken.update({row: slot for row, slot in enumerate(slots) if slot >= 0})
            places = pool.cursors.count.numel()
            pool.free[:] = sorted(set(range(places)) - set(slots), reverse=True)

    def _index(self, values: Sequence[int]) -> Tensor:
        device = self._pools[0].slot_of.device
        return torch.tensor(list(values), dtype=torch.int64, device=device)


def _dense(x: Tensor) -> Tensor:
    """Give the last axis the unit stride that the kernels ask for; most inputs have it."""
    return x if x.stride(-1) == 1 else x.contiguous()
