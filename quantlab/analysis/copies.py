"""Whether the recurrence copy knows what format the read copy is stored in.

Derived again at a flush, corrections come from the recurrence copy alone: on the same op inputs it
is the same bit for bit, whatever is read in between. Folded as they were cached, they carry the
read copy's error into it. Without a delta rule there are no corrections, and nothing to carry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from quantlab.formats import parse_format
from quantlab.recurrence import OpInputs
from quantlab.replay import Policy

COPIES_SCHEMA = pa.schema(
    [
        pa.field("inputs", pa.string()),
        pa.field("layer", pa.int32()),
        pa.field("heads", pa.int32()),
        pa.field("read", pa.string()),
        pa.field("against", pa.string()),
        pa.field("recur", pa.string()),
        pa.field("corrections", pa.string()),
        pa.field("window", pa.int32()),
        pa.field("windows", pa.int32()),
        pa.field("first_difference", pa.int32()),
        pa.field("differing", pa.int32()),
        pa.field("relative", pa.float64()),
    ]
)
"""One row a layer and policy that is compared with the policy that reads `against`. `inputs`:
"recorded", the same for all, or "model", each policy's own. `windows`: compared, after every one of
which whole copies are; `first_difference`: the first, from 1, after which a bit differed, −1 for
none; `differing`: after how many one did; `relative`: RMS difference over RMS state at the end."""


class ComparedScan:
    """A scan whose recurrence copies are compared after every window; methods are a scan's.

    Policies are compared with the first one of the same recurrence format and corrections.
    Nothing is waited for: the counts stay on the device.

    Args:
        policies: of one window, rows = policies × streams.
        streams: [n] ids.
        layer: ordinal.
        seed: of the draws.
        inner: constructor of the scan.
        skip: leading policies that are not compared (a reference).

    Attributes:
        first: [policies] int64 first window after which a row differed, −1 for none.
        count: [policies] int64 windows after which one did.
        windows: compared so far.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        streams: Tensor,
        *,
        layer: int,
        seed: int,
        inner: Callable[..., Any],
        skip: int = 0,
    ) -> None:
        self.policies, self.skip = tuple(policies), skip
        lengths = {p.window for p in self.policies[skip:]}
        if len(lengths) != 1:
            raise ValueError("policies of one window, at least one of them")
        self.window = lengths.pop()
        self.streams, self.layer = streams, layer
        self.scan = inner(policies, streams, layer=layer, seed=seed)
        self.partner = [self._partner(p) for p in range(len(self.policies))]
        device = streams.device
        self._partners = torch.tensor(self.partner, device=device)
        self.first = torch.full((len(self.policies),), -1, device=device)
        self.count = torch.zeros(len(self.policies), dtype=torch.int64, device=device)
        self.windows = self.position = 0

    def _partner(self, index: int) -> int:
        """Index of the policy that one is compared with."""
        if index < self.skip:
            return index
        same = [replace(p, read=p.recur) for p in self.policies]
        return same.index(same[index], self.skip)

    @property
    def diverged_at(self) -> Tensor:
        """As the scan's own."""
        at: Tensor = self.scan.diverged_at
        return at

    def prefill(self, inputs: OpInputs) -> Tensor:
        """Consume the prompt."""
        o: Tensor = self.scan.prefill(inputs)
        return o

    def start(self, state: Tensor, inputs: OpInputs) -> None:
        """Begin decoding from an unrounded state [rows, H, dv, dk]."""
        self.scan.start(state, inputs)

    @torch.inference_mode()
    def __call__(self, inputs: OpInputs) -> Tensor:
        """Consume T ≥ 1 tokens; outputs [rows, T, H, dv]."""
        outputs, begin = [], 0
        while begin < inputs.steps:
            left = self.window - self.position % self.window
            piece = inputs.slice(begin, min(inputs.steps, begin + left))
            outputs.append(self.scan(piece))
            begin += piece.steps
            self.position += piece.steps
            if self.position % self.window == 0:
                self._compare()
        return torch.cat(outputs, 1)

    def _compare(self) -> None:
        self.windows += 1
        mine = self._copies().view(torch.int32)
        differs = (mine != mine[self._partners]).flatten(1).any(1)
        self.count += differs
        self.first = torch.where(differs & (self.first < 0), self.windows, self.first)

    def _copies(self) -> Tensor:
        """Recurrence copies by policy: [policies, streams · H · dv · dk]."""
        recur, _ = self.scan.copies()
        by_policy: Tensor = recur.reshape(len(self.policies), -1)
        return by_policy

    def rows(self, inputs: str, heads: int) -> list[dict[str, Any]]:
        """Lay out what was found, see `COPIES_SCHEMA`."""
        copies = self._copies().double()
        size = copies.square().mean(1).sqrt()
        off = (copies - copies[self._partners]).square().mean(1).sqrt()
        found = zip(
            self.policies, self.partner, self.first.tolist(), self.count.tolist(),
            (off / size).tolist(), strict=True,
        )  # fmt: skip
        return [
            {
                "inputs": inputs,
                "layer": self.layer,
                "heads": heads,
                "read": str(policy.read),
                "against": str(self.policies[partner].read),
                "recur": str(policy.recur),
                "corrections": policy.corrections,
                "window": self.window,
                "windows": self.windows,
                "first_difference": first,
                "differing": count,
                "relative": relative,
            }
            for index, (policy, partner, first, count, relative) in enumerate(found)
            if partner != index and index >= self.skip
        ]


def compared_policies(
    reads: Sequence[str], recur: str, corrections: Sequence[str], window: int
) -> list[Policy]:
    """Pair every read format with one recurrence format, for every way to correct."""
    return [
        Policy(
            kind="separate", read=parse_format(read), recur=parse_format(recur), window=window,
            corrections=way,  # type: ignore[arg-type]
        )
        for way in corrections
        for read in reads
    ]  # fmt: skip
