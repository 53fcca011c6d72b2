"""Free-running generation: arms × questions × repetitions as rows, a finished row replaced.

Every generation is a function of its question, repetition, policy and seeds alone:

* a prompt is consumed once, in full precision and by itself; the policy begins with the store
  after it, so the first token is the same under every policy;
* sampling noise and rounding draws are keyed by question, repetition, step and element;
* every forward has the same number of rows, free ones included, because the order of additions in
  a matrix product depends on it.

On a CPU the answers are therefore the same whatever the number of busy rows, their order, and
wherever a run is cut. On a GPU products of one shape may still differ between rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quantlab.engine.attention import lower_right
from quantlab.engine.sampling import Sampling, choose, gumbel, scores, stream_id
from quantlab.engine.slots import Slots
from quantlab.engine.teacher_forcing import require_parts
from quantlab.models.precision import full_fp32
from quantlab.recurrence import exact_scan
from quantlab.replay import Policy
from quantlab.replay.rowwise import DIVERGED, RowwiseCache

if TYPE_CHECKING:
    from quantlab.models import LoadedModel, OpCall

STOP, BUDGET, BROKEN = "stop", "budget", "diverged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to answer all questions.

    Attributes:
        policy: how the state is stored.
        seed: 64-bit seed of the sampling noise; arms that share it share the noise.
    """

    policy: Policy
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt.

    Attributes:
        id: keys its noise and draws, in [0, 2^20).
        tokens: [T] int64 ids, T ≥ 1.
    """

    id: int
    tokens: Tensor


class Job(NamedTuple):
    """One generation to make: indices of arm and question, and the repetition."""

    arm: int
    question: int
    repetition: int


@dataclass(slots=True, kw_only=True)
class Generation:
    """One generation.

    Attributes:
        job: which.
        tokens: output without the stop token.
        margins: nats by which each chosen token, the stop token included, beat the runner-up
            after filters and noise; inf where the filters left one token.
        finish: "stop", "budget" (cut at the output budget), or "diverged" (logits not finite).
        stop_id: the id that ended it, None unless "stop".
        diverged_at: first output position whose stored state was not finite, −1 for none.
    """

    job: Job
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish: str = ""
    stop_id: int | None = None
    diverged_at: int = -1

    @property
    def length(self) -> int:
        """Output tokens, the stop token included."""
        return len(self.tokens) + (self.stop_id is not None)


@dataclass(slots=True, kw_only=True)
class _Prefilled:
    """A prompt consumed: its cache, states [H, dv, dk] by layer, and logits [1, V] after it."""

    cache: Any
    states: list[Tensor]
    logits: Tensor


class GenerationRun:
    """All generations of a batch of questions.

    Args:
        m: the loaded model.
        arms: policies with their sampling seeds.
        questions: the prompts.
        repetitions: generations of each question by each arm.
        sampling: how tokens are chosen.
        budget: output tokens at which a generation is cut.
        stop_ids: ids that end one.
        seed: 64-bit seed of the stochastic rounding.
        rows: rows of every forward; decides the order of additions, so it is part of a study.
        busy: most rows in use at once; all of them if None. Changes no answer on a CPU.
        skip: jobs that need not be made (already on disk).

    Raises:
        ValueError: a size below 1, no arm, no question, an empty prompt, or equal question ids.
    """

    def __init__(
        self,
        m: LoadedModel,
        *,
        arms: Sequence[Arm],
        questions: Sequence[Question],
        sampling: Sampling,
        budget: int,
        stop_ids: Sequence[int],
        seed: int,
        rows: int,
        repetitions: int = 1,
        busy: int | None = None,
        skip: Sequence[Job] = (),
    ) -> None:
        busy = rows if busy is None else busy
        for name, value in (("rows", rows), ("busy", busy), ("budget", budget)):
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        if not arms or not questions or repetitions < 1 or busy > rows:
            raise ValueError("generation needs arms, questions, repetitions and busy ≤ rows")
        if len({q.id for q in questions}) < len(questions):
            raise ValueError("two questions have the same id")
        if min(len(q.tokens) for q in questions) < 1:
            raise ValueError("a prompt has at least one token")
        self.m = m
        self.arms, self.questions = tuple(arms), tuple(questions)
        self.sampling, self.budget, self.stop_ids = sampling, budget, frozenset(stop_ids)
        self.rows, self.busy = rows, busy
        made = frozenset(skip)
        # question by question, so that a prompt is consumed once and its cache can go
        self.jobs = [
            job
            for q in range(len(questions))
            for r in range(repetitions)
            for a in range(len(arms))
            if (job := Job(a, q, r)) not in made
        ]
        self.next_job = 0
        self.steps = 0
        policies = list({str(arm.policy): arm.policy for arm in arms}.values())
        require_parts(m, policies)
        self._policy = [policies.index(arm.policy) for arm in arms]
        self._layers = [
            RowwiseCache(policies, rows, layer=layer, seed=seed) for layer in range(m.layers)
        ]
        self._going: dict[int, Generation] = {}
        self._pending = torch.zeros(rows, dtype=torch.int64)
        self._seen = torch.zeros((rows, m.vocab_size), dtype=torch.bool, device=m.device)
        self._prefilled: dict[int, _Prefilled] = {}
        with self._ready():
            longest = max(len(q.tokens) for q in questions)
            self._slots = Slots(m, rows, longest + budget)

    def run(self, on_step: Callable[[], None] | None = None) -> Iterator[Generation]:
        """Yield generations as they finish.

        Args:
            on_step: called between steps, once the step's generations have been consumed: the
                state can be saved there.
        """
        while self._going or self.next_job < len(self.jobs):
            with self._ready():
                ended = self._fill()
                if self._going:
                    ended += self._step()
            yield from ended
            if on_step is not None:
                on_step()

    @property
    def under_way(self) -> float:
        """What the rows in use have done, in generations of full budget."""
        return sum(len(going.tokens) for going in self._going.values()) / self.budget

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that later steps depend on, between two steps (see `run`)."""
        rows = sorted(self._going)
        named = {
            "next_job": torch.tensor(self.next_job),
            "steps": torch.tensor(self.steps),
            "pending": self._pending.clone(),
            "going.rows": torch.tensor(rows, dtype=torch.int64),
        }
        for row in rows:
            going = self._going[row]
            named[f"going.{row}.job"] = torch.tensor(going.job)
            named[f"going.{row}.tokens"] = torch.tensor(going.tokens, dtype=torch.int64)
            named[f"going.{row}.margins"] = torch.tensor(going.margins, dtype=torch.float64)
        parts = {"slots": self._slots.state_dict()}
        parts |= {f"layer.{i}": layer.state_dict() for i, layer in enumerate(self._layers)}
        for part, tensors in parts.items():
            named |= {f"{part}.{name}": x for name, x in tensors.items()}
        return named

    @torch.inference_mode()
    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of a run with the same arguments."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): x for k, x in named.items() if k.startswith(prefix)}

        self.next_job, self.steps = int(named["next_job"]), int(named["steps"])
        self._pending = named["pending"].clone()
        self._going, self._prefilled = {}, {}
        self._seen.zero_()
        for row in named["going.rows"].tolist():
            going = Generation(job=Job(*named[f"going.{row}.job"].tolist()))
            going.tokens = named[f"going.{row}.tokens"].tolist()
            going.margins = named[f"going.{row}.margins"].tolist()
            self._going[row] = going
            self._seen[row, going.tokens] = True
        self._slots.load_state_dict(under("slots."))
        for index, layer in enumerate(self._layers):
            layer.load_state_dict(under(f"layer.{index}."), self.m.device)

    def _ready(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        stack.enter_context(full_fp32())
        return stack

    def _fill(self) -> list[Generation]:
        """Give free rows the next jobs; return those that end with their very first token."""
        ended = []
        while len(self._going) < self.busy and self.next_job < len(self.jobs):
            job = self.jobs[self.next_job]
            self.next_job += 1
            row = next(r for r in range(self.rows) if r not in self._going)
            going = Generation(job=job)
            prompt = self._prefill(job.question)
            self._seen[row] = False
            tokens, margins = self._choose(prompt.logits, [row], [going])
            finite = bool(torch.isfinite(prompt.logits).all())
            if self._take(going, row, int(tokens), float(margins), finite=finite):
                ended.append(going)
                continue
            self._going[row] = going
            question = self.questions[job.question]
            stream = stream_id(question.id, job.repetition)
            self._slots.fill(row, prompt.cache, len(question.tokens))
            for layer, state in zip(self._layers, prompt.states, strict=True):
                layer.start(row, state, policy=self._policy[job.arm], stream=stream)
        return ended

    def _step(self) -> list[Generation]:
        """Feed every row its pending token and choose the next; return what ends."""
        from quantlab.models import forward_hidden, head, replaced

        slots = self._slots
        with slots.attending(), replaced(self.m, self._decode):
            hidden = forward_hidden(
                self.m,
                self._pending[:, None].to(self.m.device),
                cache=slots.cache,
                position_ids=slots.lengths[:, None].to(self.m.device),
            )
        rows = sorted(self._going)
        slots.lengths[rows] += 1
        self.steps += 1
        logits = head(self.m, hidden)[rows, 0]
        tokens, margins = self._choose(logits, rows, [self._going[row] for row in rows])
        finite = torch.isfinite(logits).all(-1)
        ended = []
        for row, token, margin, fine in zip(
            rows, tokens.tolist(), margins.tolist(), finite.tolist(), strict=True
        ):
            going = self._going[row]
            going.diverged_at = self._diverged(row)
            if self._take(going, row, token, margin, finite=fine):
                ended.append(self._free(row))
        return ended

    def _take(
        self, going: Generation, row: int, token: int, margin: float, *, finite: bool
    ) -> bool:
        """Append a token; True if that ends the generation."""
        if not finite:
            going.finish = BROKEN
            return True
        going.margins.append(margin)
        if token in self.stop_ids:
            going.finish, going.stop_id = STOP, token
            return True
        going.tokens.append(token)
        self._pending[row] = token
        self._seen[row, token] = True
        if len(going.tokens) == self.budget:
            going.finish = BUDGET
            return True
        return False

    def _free(self, row: int) -> Generation:
        self._pending[row] = 0
        self._slots.clear(row)
        for layer in self._layers:
            layer.stop(row)
        return self._going.pop(row)

    def _choose(
        self, logits: Tensor, rows: Sequence[int], going: Sequence[Generation]
    ) -> tuple[Tensor, Tensor]:
        """Tokens and margins [n] of rows with logits [n, V]."""
        logits = torch.nan_to_num(logits, nan=0.0)  # a broken row ends before its token counts
        kept = scores(logits, self.sampling, seen=self._seen[list(rows)])
        if self.sampling.temperature == 0:
            return choose(kept, None)
        noise = torch.empty_like(kept)
        seeds = [self.arms[g.job.arm].seed for g in going]
        for seed in dict.fromkeys(seeds):
            inside = [i for i, s in enumerate(seeds) if s == seed]
            jobs = [going[i].job for i in inside]

            def column(values: list[int]) -> Tensor:
                return torch.tensor(values, device=logits.device)

            noise[inside] = gumbel(
                seed=seed,
                question=column([self.questions[job.question].id for job in jobs]),
                repetition=column([job.repetition for job in jobs]),
                step=column([len(going[i].tokens) for i in inside]),
                vocabulary=logits.shape[1],
            )
        return choose(kept, noise)

    def _prefill(self, index: int) -> _Prefilled:
        """Consume a prompt by itself, in full precision."""
        from quantlab.models import forward_hidden, head, new_cache, replaced

        if index in self._prefilled:
            return self._prefilled[index]
        states: list[Tensor] = []

        def keep(call: OpCall) -> tuple[Tensor, None]:
            o, state = exact_scan(call.inputs)
            states.append(state[0])
            return o, None

        cache = new_cache(self.m)
        ids = self.questions[index].tokens[None].to(self.m.device)
        with lower_right(self.m.model), replaced(self.m, keep):
            hidden = forward_hidden(self.m, ids, cache=cache, start=0)
        found = _Prefilled(cache=cache, states=states, logits=head(self.m, hidden[:, -1:])[:, 0])
        self._prefilled = {index: found}  # jobs come question by question
        return found

    def _decode(self, call: OpCall) -> tuple[Tensor, Tensor | None]:
        return self._layers[call.layer](call.inputs), None

    def _diverged(self, row: int) -> int:
        at = [int(layer.counters[DIVERGED, row]) for layer in self._layers]
        return min((a for a in at if a >= 0), default=-1)


def first_divergence(reference: Generation, other: Generation) -> tuple[int, float] | None:
    """Where a generation leaves its counterpart, and how near a tie the counterpart was there.

    Args:
        reference: of the FP32 arm that shares the other's noise.
        other: of the same question and repetition.

    Returns:
        (index of the first token that differs, ends included; the counterpart's margin there in
        nats), or None for equal outputs.
    """
    one, two = (
        [*g.tokens, *([] if g.stop_id is None else [g.stop_id])] for g in (reference, other)
    )
    for step, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return step, reference.margins[step]
    if len(one) == len(two):
        return None
    step = min(len(one), len(two))
    return step, reference.margins[step] if step < len(reference.margins) else float("nan")
