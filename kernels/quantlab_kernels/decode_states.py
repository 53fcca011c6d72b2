"""A decoder's recurrent states on the decode kernels: every layer's cache of every policy.

Policies share the rows of a batch. Each has its own pool of slots, cursors and plan; the plan of a
policy sorts that policy's rows, and for all others they are padded rows, which cost nothing. Which
slot a row has is a table on the device, so one captured graph outlives any change of rows. The host
has the same table and sends it over as a whole: rows that begin together cost a copy a layer, a
store a layer and policy, and no wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.engine.transfer import on_device
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
        first: its first slot among all policies'.
        cursors: of its slots, shared by all layers.
        plan: of one step of the batch.
        slot_of: int32 [rows] on the device; −1: the row has another policy, or none.
        free: slots that no row has, the next to be taken last.
        taken: slot by row.
    """

    policy: Policy
    layers: list[LayerCache]
    first: int
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
        self._device = device = examples[0].v.device
        # every policy begins at an aligned address, for which kernels are compiled once
        firsts = [0]
        for slots in places:
            firsts.append(firsts[-1] + _aligned(slots))
        self._cursors = Cursors.empty(firsts[-1], device)
        self._slots = torch.full((len(policies), _aligned(rows)), -1, dtype=torch.int32)
        self._slot_of = on_device(self._slots, device)
        # by row, its slot among all policies', and its policy's window
        self._places = torch.full((2, rows), -1, dtype=torch.int64)
        self._place_of = on_device(self._places, device)
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
                first=first,
                cursors=self._cursors.part(first, slots),
                plan=Plan.empty(rows, device),
                slot_of=slot_of[:rows],
                free=list(reversed(range(slots))),
                taken={},
            )
            for policy, slots, first, slot_of in zip(
                policies, places, firsts[:-1], self._slot_of, strict=True
            )
        ]
        shapes = {(x.heads, x.dv) for x in examples}
        # layers run one after the other: those of one shape share their outputs' memory
        self._out = {shape: torch.zeros((rows, *shape), device=device) for shape in shapes}

    def start(
        self,
        rows: Sequence[int],
        states: Sequence[Tensor],
        *,
        of: Sequence[int],
        policies: Sequence[int],
        streams: Sequence[int],
    ) -> None:
        """Store unrounded states, by layer [n, H, dv, dk], as flush 0 of these rows.

        Raises:
            ValueError: more rows of a policy than it has places.
        """
        self._release(rows)
        # policy by policy, so that the states of one lie side by side
        order = sorted(range(len(rows)), key=lambda i: policies[i])
        starts: list[tuple[int, list[int]]] = []
        for index, pool in enumerate(self._pools):
            inside = [i for i in order if policies[i] == index]
            if len(inside) > len(pool.free):
                self._upload()
                raise ValueError(
                    f"{pool.policy.short}: {len(inside)} rows more, {len(pool.free)} places left "
                    f"of {len(pool.free) + len(pool.taken)}"
                )
            if inside:
                starts.append((index, inside))
        taken = [self._take(index, [rows[i] for i in inside]) for index, inside in starts]
        self._upload()
        width = _aligned(max(map(len, taken)))
        slots = on_device([own + [-1] * (width - len(own)) for own in taken], self._device)
        firsts = [self._pools[index].first for index, _ in starts]
        places = [a + slot for a, own in zip(firsts, taken, strict=True) for slot in own]
        where, stream, picked = on_device(
            [places, [streams[i] for i in order], [of[i] for i in order]], self._device
        )
        self._cursors.start(where, stream)
        for layer, state in enumerate(states):
            mine = state[picked].float().contiguous()
            begin = 0
            for (index, inside), own in zip(starts, slots, strict=True):
                pool, end = self._pools[index], begin + len(inside)
                pool.layers[layer].start(mine[begin:end], own[: len(inside)], pool.cursors)
                begin = end

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
        self._release(rows)
        self._upload()
        at = on_device(list(rows), self._device)
        for out in self._out.values():
            out[at] = 0

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
        place, window = self._place_of
        # store number n is made by token n · L
        number = self._cursors.diverged[place.clamp(min=0)].to(torch.int64)
        return torch.where((place < 0) | (number < 0), -1, number * window)

    def state_dict(self) -> dict[str, Tensor]:
        """All that later steps depend on; copies."""
        return {
            f"{index}.{name}": x.clone()
            for index, pool in enumerate(self._pools)
            for name, x in pool.tensors().items()
        }

    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of states with the same arguments."""
        self._release(range(self.rows))
        for index, pool in enumerate(self._pools):
            for name, x in pool.tensors().items():
                x.copy_(named[f"{index}.{name}"])
            slots = pool.slot_of.tolist()
            pool.taken.clear()
            pool.taken.update({row: slot for row, slot in enumerate(slots) if slot >= 0})
            places = pool.cursors.count.numel()
            pool.free[:] = sorted(set(range(places)) - set(slots), reverse=True)
            self._note(index)
        self._upload()

    def _take(self, index: int, rows: Sequence[int]) -> list[int]:
        """Give rows places of a policy: its slots."""
        pool = self._pools[index]
        taken = [pool.free.pop() for _ in rows]
        pool.taken.update(zip(rows, taken, strict=True))
        self._note(index)
        return taken

    def _note(self, index: int) -> None:
        """Write a policy's rows into the host's tables."""
        pool = self._pools[index]
        at, slots = torch.tensor([list(pool.taken), list(pool.taken.values())], dtype=torch.int64)
        self._slots[index, at] = slots.to(torch.int32)
        self._places[0, at] = pool.first + slots
        self._places[1, at] = pool.policy.window

    def _release(self, rows: Sequence[int]) -> None:
        """Take rows' places back."""
        at = torch.tensor(list(rows), dtype=torch.int64)
        self._slots[:, at] = -1
        self._places[:, at] = -1
        for pool in self._pools:
            pool.free.extend(pool.taken.pop(row) for row in rows if row in pool.taken)

    def _upload(self) -> None:
        """Set the device's tables to the host's."""
        self._slot_of.copy_(on_device(self._slots, self._device))
        self._place_of.copy_(on_device(self._places, self._device))


def _aligned(n: int) -> int:
    """Round up to 16 bytes' worth of 32-bit numbers."""
    return -(-n // 4) * 4


def _dense(x: Tensor) -> Tensor:
    """Give the last axis the unit stride that the kernels ask for; most inputs have it."""
    return x if x.stride(-1) == 1 else x.contiguous()
