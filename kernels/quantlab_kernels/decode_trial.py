"""One layer's decode cache filled with numbers: what is timed, swept and compared.

States lie in several sets of slots, so that launches which walk them in turn find none of theirs in
the second-level cache. All rows of a set stand behind the same number of records, or, for a
comparison, each behind its own.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quantlab.analysis.traffic import LayerShape
from quantlab.recurrence import OpInputs
from quantlab.recurrence.step import token
from quantlab.replay import Policy
from quantlab.replay.draws import Draws
from quantlab.replay.records import RecordTypes
from quantlab.replay.stepwise import PolicyCache, Record
from quantlab_kernels.decode import LayerCache
from quantlab_kernels.decode_launch import conventional_launch, flush_launch, step_launch
from quantlab_kernels.decode_plan import COUNT, FLUSH, ROW, SLOT, Cursors, Plan, advance

SETTLE_BYTES = 400e6
"""States that timed launches walk through before they meet one again: several times the L2."""
MOST_SETS = 128
SEED = 2**63 + 5
# Outputs over the largest of a row: sums of 144 FP32 products in another order. Measured 5e-7.
OUTPUT = 3e-6
# Share of stored elements that may be another code: a rounding boundary lies between two sums.
FLIPS = 5e-3


class Trial:
    """A layer of some shape, a policy and a batch.

    Args:
        shape: of the layer.
        policy: L = 1 to 64.
        batch: rows.
        device: where.
        settle: bytes of states to walk through.
        launches_for: choose launches as for this many rows (to compile them with few).
    """

    def __init__(
        self,
        shape: LayerShape,
        policy: Policy,
        batch: int,
        *,
        device: torch.device | str = "cuda",
        settle: float = SETTLE_BYTES,
        launches_for: int | None = None,
    ) -> None:
        self.shape, self.batch, self.policy = shape, batch, policy
        self.device = torch.device(device)
        one = float(shape.state_bytes(policy.read)) * batch
        self.sets = max(1, min(MOST_SETS, int(settle // one)))
        g = torch.Generator(self.device).manual_seed(6)
        heads, key_heads, dv, dk = shape.heads, shape.key_heads, shape.dv, shape.dk
        half = torch.bfloat16

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=g, device=self.device)

        keys = normal(2, batch, 1, key_heads, dk) * dk**-0.5
        decays = (batch, 1, heads, dk) if shape.per_channel else (batch, 1, heads)
        self.inputs = OpInputs(
            q=keys[0] if shape.delta else keys[0].to(half),
            k=keys[1] if shape.delta else keys[1].to(half),
            v=normal(batch, 1, heads, dv).to(half),
            log_decay=-torch.exp(2 * normal(*decays) - 5),
            beta=torch.sigmoid(normal(batch, 1, heads)) if shape.delta else None,
            dt=None if shape.delta else torch.exp(normal(batch, 1, heads) - 2),
            activation_dtype=half,
        )
        slots = self.sets * batch
        self.cache = LayerCache.empty(policy, self.inputs, slots=slots, layer=0, seed=SEED)
        if launches_for is not None:
            self._choose_launches(launches_for)
        self.cursors = Cursors.empty(slots, self.device)
        self.cursors.flush.fill_(1)
        for first in range(0, slots, 64):
            part = torch.arange(first, min(first + 64, slots), device=self.device)
            self.cache.start(normal(part.numel(), heads, dv, dk), part, self.cursors)
        self._fill_records(g)
        self.out = torch.full((batch, heads, dv), float("nan"), device=self.device)

    def plan(self, index: int, count: int) -> Plan:
        """Plan all rows of set `index` behind `count` records; cursors stay as they are."""
        plan, row = Plan.empty(self.batch, self.device), torch.arange(self.batch)
        plan.lines[ROW.value] = row.to(self.device)
        plan.lines[SLOT.value] = (row + (index % self.sets) * self.batch).to(self.device)
        plan.lines[COUNT.value] = count
        plan.lines[FLUSH.value] = 1
        plan.counts[int(count == self.policy.window - 1)] = self.batch
        return plan

    def steps(self) -> tuple[list[int], Callable[[Plan], None]]:
        """Give the counts of a window's steps without a flush, and their launch."""
        counts = list(range(self.policy.window - 1))
        return counts, lambda plan: self.cache.step_rows(self.inputs, plan, self.out)

    def flush(self) -> tuple[list[int], Callable[[Plan], None]]:
        """Give the same of a step that flushes."""
        return [self.policy.window - 1], lambda plan: self.cache.flush_rows(
            self.inputs, plan, self.cursors, self.out
        )

    def window(self) -> tuple[list[int], Callable[[Plan], None]]:
        """Give the same of a whole window, all kernels launched at each step (L = 1: one step)."""
        return list(range(self.policy.window)), lambda plan: self.cache.step(
            self.inputs, plan, self.cursors, self.out
        )

    def compile(self) -> None:
        """Launch everything once."""
        for counts, launch in (self.steps(), self.flush()) if self.policy.window > 1 else ():
            launch(self.plan(0, counts[-1]))
        if self.policy.window == 1:
            self.window()[1](self.plan(0, 0))

    def fault(self) -> str | None:
        """Say what two steps of a batch at mixed positions get wrong, or None.

        The kernels' outputs, records and stored values of three rows at most, against one step of
        `quantlab.replay.stepwise` from the very copies and records that the kernels start from. One
        row steps and then flushes; the next, if there are as many, flushes and then steps. A code
        that flips at a boundary is counted at the step that stores it and read by both at the next.
        """
        window = self.policy.window
        rows = sorted({0, min(1, self.batch - 1), self.batch - 1})
        slots = torch.arange(self.batch, device=self.device)
        self.cursors.count[: self.batch] = (slots + max(0, window - 2)) % window
        self.cursors.flush[: self.batch] = 1
        plan = Plan.empty(self.batch, self.device)
        for step in range(2):
            references = [self._reference(row) for row in rows]
            self.out.fill_(float("nan"))
            advance(slots, self.cursors, plan, window=window)
            self.cache.step(self.inputs, plan, self.cursors, self.out)
            for row, reference in zip(rows, references, strict=True):
                found = self._row_fault(row, reference)
                if found is not None:
                    return f"step {step + 1}, row {row}: {found}"
        return None

    def _row_fault(self, row: int, reference: PolicyCache) -> str | None:
        x = self.inputs.rows(slice(row, row + 1))
        types = RecordTypes.of(self.policy.records, x)
        expected, stored = reference.take(token(x, 0), types)
        error = _apart(self.out[row], expected[0])
        if not error < OUTPUT:
            return f"outputs are off by {error:.1e} of the largest"
        if stored is None:
            return self._record_fault(row, reference.buffer[-1], types)
        reference.store(stored, self._draws(row, reference.flush))
        slot = torch.tensor([row], device=self.device)
        copies = ("recur", "read") if self.policy.kind == "separate" else ("recur",)
        for name in copies:
            ours, theirs = getattr(self.cache, name).values(slot), getattr(reference, name)
            if getattr(self.policy, name).is_exact:
                error = _apart(ours, theirs)
                if not error < OUTPUT:
                    return f"the {name} copy is off by {error:.1e} of the largest"
                continue
            most = 1e-5 * torch.maximum(ours.abs(), theirs.abs())
            share = float(((ours - theirs).abs() <= most).logical_not().float().mean())
            if not share < FLIPS:
                return f"{share:.1e} of the {name} copy's values differ"
        return None

    def _record_fault(self, row: int, expected: Record, types: RecordTypes) -> str | None:
        """Compare the record just written: inputs bit for bit, corrections to one last place."""
        written = self._record(row, int(self.cursors.count[row]) - 1)
        last_place = 0.0 if types.u is None else torch.finfo(types.u).eps
        most = last_place * torch.maximum(written.u.abs(), expected.u.abs())
        if self.shape.delta:
            most = most + OUTPUT * expected.u.abs().max()
        if not bool(((written.u - expected.u).abs() <= most).all()):
            return f"the recorded correction is off by {_apart(written.u, expected.u):.1e}"
        inputs = ["k", "log_decay"]
        if self.shape.delta and self.cache.rederives:
            inputs += ["v", "beta"]
        for name in inputs:
            if not torch.equal(getattr(written, name), getattr(expected, name)):
                return f"the recorded {name} differs"
        return None

    def _reference(self, row: int) -> PolicyCache:
        """Build the stepwise cache of one row from what its slot holds."""
        cache = self.cache
        slot = torch.tensor([row], device=self.device)
        flush = int(self.cursors.flush[row])
        held = PolicyCache(policy=self.policy, recur=cache.recur.values(slot), flush=flush)
        if self.policy.kind == "separate":
            held.read = cache.read.values(slot)
        held.buffer += [self._record(row, j) for j in range(int(self.cursors.count[row]))]
        return held

    def _record(self, row: int, j: int) -> Record:
        """Read what a slot holds of its `j`-th token."""
        cache, shape = self.cache, self.shape
        k = _widened(cache.keys[row, j]).repeat_interleave(shape.heads // shape.key_heads, 0)
        u = _widened(cache.written[row, j])
        v = _widened(cache.values[row, j]) if cache.rederives else u
        logs = cache.logs[row, j] if shape.per_channel else cache.logs[row, :, j]
        beta = None
        if shape.delta:
            beta = cache.strengths[row, :, j] if cache.rederives else torch.ones_like(logs)
        else:
            u = v = cache.strengths[row, :, j, None] * u
        return Record(
            k=k[None],
            v=v[None],
            u=u[None],
            log_decay=logs[None],
            beta=None if beta is None else beta[None],
        )

    def _draws(self, row: int, flush: int) -> Draws:
        shape = self.shape
        return Draws(
            seed=SEED,
            layer=0,
            streams=self.cursors.stream[row : row + 1],
            flush=flush,
            state_shape=(shape.heads, shape.dv, shape.dk),
            device=self.device,
        )

    def _choose_launches(self, rows: int) -> None:
        recur, read = self.cache.recur, self.cache.read
        sizes = {"rows": rows, "heads": recur.heads, "dv": recur.dv, "dk": recur.dk}
        self.cache.whole_cut = conventional_launch(recur.name, **sizes)
        self.cache.flush_cut = flush_launch(
            (recur.name, read.name),
            per_channel=self.cache.per_channel,
            solves=self.cache.rederives,
            **sizes,
        )
        self.cache.step_cut = step_launch(
            read.name,
            key_heads=self.cache.key_heads,
            per_channel=self.cache.per_channel,
            **sizes,
        )

    def _fill_records(self, g: torch.Generator) -> None:
        cache = self.cache
        for x in (cache.keys, cache.values, cache.written):
            if x.numel():
                real = x.view(torch.bfloat16) if x.dtype == torch.int16 else x
                real.normal_(generator=g)
        if cache.keys.numel():
            keys = cache.keys
            real = keys.view(torch.bfloat16) if keys.dtype == torch.int16 else keys
            real.mul_(self.shape.dk**-0.5)
        for x in (cache.logs, cache.strengths):
            if x.numel():
                x.uniform_(-0.01, -0.001, generator=g)
        if cache.strengths.numel():
            cache.strengths.abs_()


def _widened(records: Tensor) -> Tensor:
    """FP32 values of records; bf16 ones are kept as bit patterns."""
    return (records.view(torch.bfloat16) if records.dtype == torch.int16 else records).float()


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value; NaN where ours is not finite."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
