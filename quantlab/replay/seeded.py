"""Policies with seeds of their own: one scan per seed, the rows side by side.

A draw is keyed by a scan's seed, so repetitions of a policy with other seeds are scanned by other
scans. Each gives what it would give in a study with that seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantlab.recurrence import OpInputs
from quantlab.replay.policy import Policy


def by_seed(scan: type[Any]) -> Callable[..., Any]:
    """Make a constructor like a scan's that obeys the seeds of policies.

    Args:
        scan: `WindowedScan`, a subclass, or `StepwiseCache`.

    Returns:
        A function of the scan's arguments and of its name. It returns a plain scan where no two
        seeds are asked for, else a `SeededScan`.
    """

    @functools.wraps(scan, updated=())
    def build(policies: Sequence[Policy], streams: Tensor, *, layer: int, seed: int) -> Any:
        seeds = {_seed(policy, seed) for policy in policies if policy.is_stochastic}
        if len(seeds) > 1:
            return SeededScan(policies, streams, layer=layer, seed=seed, scan=scan)
        return scan(policies, streams, layer=layer, seed=seeds.pop() if seeds else seed)

    return build


class SeededScan:
    """One recurrent layer's scans, one a seed; methods and rows are those of `WindowedScan`.

    Args:
        policies: row = policy · n_streams + stream, as for any scan.
        streams: [n_streams] global stream ids.
        layer: ordinal of the recurrent layer.
        seed: of the policies that have none of their own.
        scan: class of the scans.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        streams: Tensor,
        *,
        layer: int,
        seed: int,
        scan: type[Any],
    ) -> None:
        members: dict[int, list[int]] = {}
        for index, policy in enumerate(policies):
            members.setdefault(_seed(policy, seed), []).append(index)
        self.policies = tuple(policies)
        self._scans: list[tuple[Tensor | slice, Any]] = []
        for own, indices in members.items():
            part = scan([policies[i] for i in indices], streams, layer=layer, seed=own)
            self._scans.append((_rows(indices, streams), part))

    @property
    def diverged_at(self) -> Tensor:
        """[rows] int64, as of any scan."""
        return self._gather([scan.diverged_at for _, scan in self._scans])

    def prefill(self, inputs: OpInputs) -> Tensor:
        """Consume the prompt exactly, then store; outputs [rows, T, H, dv]."""
        return self._gather([scan.prefill(inputs.rows(rows)) for rows, scan in self._scans])

    def start(self, state: Tensor, inputs: OpInputs) -> None:
        """Begin decoding from an unrounded state [rows, H, dv, dk]."""
        for rows, scan in self._scans:
            scan.start(state[rows], inputs.rows(rows))

    def __call__(self, inputs: OpInputs) -> Tensor:
        """Consume the next T ≥ 1 tokens; outputs [rows, T, H, dv]."""
        return self._gather([scan(inputs.rows(rows)) for rows, scan in self._scans])

    def state(self) -> Tensor:
        """Return the current state per row [rows, H, dv, dk]."""
        return self._gather([scan.state() for _, scan in self._scans])

    def copies(self) -> tuple[Tensor, Tensor]:
        """Return what each row last stored, as of any scan."""
        recur, read = zip(*(scan.copies() for _, scan in self._scans), strict=True)
        return self._gather(recur), self._gather(read)

    def state_dict(self) -> dict[str, Tensor]:
        """All that later segments depend on."""
        return {
            f"seed.{index}.{name}": x
            for index, (_, scan) in enumerate(self._scans)
            for name, x in scan.state_dict().items()
        }

    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of a scan with the same arguments."""
        for index, (_, scan) in enumerate(self._scans):
            prefix = f"seed.{index}."
            scan.load_state_dict(
                {k.removeprefix(prefix): x for k, x in named.items() if k.startswith(prefix)}
            )

    @torch.inference_mode()
    def _gather(self, parts: Sequence[Tensor]) -> Tensor:
        rows = sum(part.shape[0] for part in parts)
        out = parts[0].new_empty((rows, *parts[0].shape[1:]))
        for (where, _), part in zip(self._scans, parts, strict=True):
            out[where] = part
        return out


def _seed(policy: Policy, otherwise: int) -> int:
    return otherwise if policy.seed is None else policy.seed


def _rows(indices: Sequence[int], streams: Tensor) -> Tensor | slice:
    """Rows of some policies; a slice, which takes views, where they are neighbours."""
    n, first, count = streams.numel(), indices[0], len(indices)
    if list(indices) == list(range(first, first + count)):
        return slice(first * n, (first + count) * n)
    starts = torch.tensor(indices, device=streams.device) * n
    return (starts.unsqueeze(1) + torch.arange(n, device=streams.device)).flatten()
