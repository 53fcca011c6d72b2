"""Free-running generation: arms × questions × repetitions as rows, a finished row replaced.

Every generation is a function of its question, repetition, policy and seeds alone:

* a prompt is consumed once, in full precision; the policy begins with the store after it, so the
  first token is the same under every policy;
* sampling noise and rounding draws are keyed by question, repetition, step and element;
* every forward has the same number of rows, free ones included, because the order of additions in
  a matrix product depends on it.

On a CPU the answers are therefore the same whatever the number of busy rows, their order, and
wherever a run is cut. On CUDA a step and the choice of its tokens are captured graphs; products of
one shape may still differ between rows there.

The device never waits for the host but between two bouts of steps (`Pace`). While one is under way
the host consumes the next prompts, which queues behind it, and reads and hands over what the rows
that ended before have written. In between it replaces, together, the rows that have ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from quantlab.engine import row_sampler
from quantlab.engine.decoder import Decoder
from quantlab.engine.prompt import Prompt, gathered, prefill
from quantlab.engine.row_sampler import FREE, GOING, RowSampler, Written
from quantlab.engine.sampling import Sampling, stream_id
from quantlab.engine.teacher_forcing import require_parts
from quantlab.engine.transfer import Reading, on_device
from quantlab.replay import Policy

if TYPE_CHECKING:
    from quantlab.models import LoadedModel

_T = TypeVar("_T")

STOP, BUDGET, BROKEN = "stop", "budget", "diverged"
_FINISH = {row_sampler.STOPPED: STOP, row_sampler.CUT: BUDGET, row_sampler.BROKEN: BROKEN}

STARTED_TOGETHER = 16
"""Most questions whose prompts are laid side by side to start rows behind them."""
MEMORY_SHARE = 0.5
"""Most of the free memory of a CUDA device that states may take."""
STATE_COPIES = 2.5
"""FP32 states that a place of a policy takes at most, records included."""


class Pace(NamedTuple):
    """When the host does what, beside the steps; of it a step costs time, never what rows write.

    Attributes:
        steps: of a bout, between two looks at which rows have ended. One that has ended stays idle
            for half of them.
        together: most prompts of one length that are consumed in one forward; it decides the order
            of additions, so on a CPU it is 1.
        ahead: whether prompts are consumed before a row is free for them.
    """

    steps: int
    together: int
    ahead: bool


CPU = Pace(steps=1, together=1, ahead=False)
CUDA = Pace(steps=64, together=32, ahead=True)


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


def question_order(lengths: Sequence[int]) -> list[int]:
    """Order in which questions with prompts of these lengths are asked: the longest first."""
    return sorted(range(len(lengths)), key=lambda q: -lengths[q])


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
        pace: of the host; by device if None.

    Attributes:
        steps: taken so far.
        seconds: of the host, by what it did. On CUDA `prompts`, `reads` and `caller` go on beside
            the device's steps, and `steps` is what is left of these: queueing them and waiting.
            prompts     consuming prompts (on CUDA: queueing that)
            starts      taking rows that have ended out and starting others; the device waits
            steps       steps and the choice of their tokens
            reads       making lists of what rows have written
            caller      whoever consumes the generations

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
        pace: Pace | None = None,
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
        self.budget, self.rows, self.busy = budget, rows, busy
        self.steps = 0
        self.pace = (CUDA if m.device.type == "cuda" else CPU) if pace is None else pace
        made = frozenset(skip)
        # Question by question, so that a prompt is consumed once and its cache can go; the longest
        # first, since the last generations to begin are waited for by idle rows.
        self._order = question_order([len(question.tokens) for question in questions])
        self._turn_of = {q: turn for turn, q in enumerate(self._order)}
        # by question, those that are consumed with it: the same ones whatever is skipped
        self._near = {
            q: near
            for _, alike in groupby(self._order, key=lambda q: len(questions[q].tokens))
            for near in _cut(list(alike), self.pace.together)
            for q in near
        }
        self.jobs = [
            job
            for q in self._order
            for r in range(repetitions)
            for a in range(len(arms))
            if (job := Job(a, q, r)) not in made
        ]
        self._queue = deque(self.jobs)
        policies = list({str(arm.policy): arm.policy for arm in arms}.values())
        require_parts(m, policies)
        self._policy = [policies.index(arm.policy) for arm in arms]
        self._places = _places(m, len(policies), rows)
        longest = max(len(q.tokens) for q in questions)
        self._decoder = Decoder(
            m,
            policies,
            rows=rows,
            # rows go on until the next look
            capacity=longest + budget + self.pace.steps,
            seed=seed,
            places=[self._places] * len(policies),
        )
        self._sampler = RowSampler(
            rows,
            m.vocab_size,
            sampling=sampling,
            budget=budget,
            stop_ids=stop_ids,
            device=m.device,
        )
        self._going: dict[int, Job] = {}
        self._prompts: dict[int, tuple[Prompt, int]] = {}
        self._tokens: dict[int, int] = {}
        self._look: Reading | None = None
        self._begun = 0
        self.seconds = dict.fromkeys(("prompts", "starts", "steps", "reads", "caller"), 0.0)

    def run(self, on_step: Callable[[], None] | None = None) -> Iterator[Generation]:
        """Yield generations as they finish.

        Args:
            on_step: called after every bout of steps was started (on a CPU: every step), once the
                generations that ended before it have been consumed: the state can be saved there.
        """
        while self._going or self._queue:
            with self._clock("steps"):
                progress, diverged = self._looked()
            with self._clock("starts", less="prompts"):
                ended = self._collect(progress)
                self._fill([row for row, _ in ended.jobs])
            with self._clock("steps"):
                self._take_steps()
            self._consume_ahead()
            with self._clock("reads"):
                found = ended.generations(diverged)
            with self._clock("caller"):
                yield from found
                if on_step is not None:
                    on_step()

    @property
    def under_way(self) -> list[tuple[Job, int]]:
        """Jobs in the rows and their tokens so far, at the last look."""
        return [(job, self._tokens.get(row, 0)) for row, job in self._going.items()]

    @contextmanager
    def _clock(self, part: str, *, less: str = "") -> Iterator[None]:
        """Count the host's seconds of a part, those of another inside it left out."""
        inner, begun = self.seconds.get(less, 0.0), time.monotonic()
        yield
        inside = self.seconds.get(less, 0.0) - inner
        self.seconds[part] += time.monotonic() - begun - inside

    @property
    def worth_saving(self) -> bool:
        """Whether a saved state spares more than it costs.

        On CUDA it would be gigabytes for seconds of work, and a run from a saved state not the
        unbroken one to the last bit: what was under way is made again instead.
        """
        return self.m.device.type != "cuda"

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that later steps depend on, between two steps (see `run`)."""
        rows = sorted(self._going)
        named = {
            "waiting": torch.tensor(len(self._queue)),
            "steps": torch.tensor(self.steps),
            "rows": torch.tensor(rows, dtype=torch.int64),
            "jobs": torch.tensor([self._going[row] for row in rows]).view(-1, 3),
        }
        for part, holder in (("decoder", self._decoder), ("sampler", self._sampler)):
            named |= {f"{part}.{name}": x for name, x in holder.state_dict().items()}
        return named

    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of a run with the same arguments."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): x for k, x in named.items() if k.startswith(prefix)}

        begun = len(self.jobs) - int(named["waiting"])
        self._queue, self._prompts = deque(self.jobs[begun:]), {}
        self.steps = int(named["steps"])
        rows, jobs = named["rows"].tolist(), named["jobs"].tolist()
        self._going = {row: Job(*job) for row, job in zip(rows, jobs, strict=True)}
        self._look = None
        self._decoder.load_state_dict(under("decoder."))
        self._sampler.load_state_dict(under("sampler."))

    def _looked(self) -> tuple[Tensor, Tensor]:
        """Progress of the rows and where they diverged, after the last bout; waits for it."""
        look = self._look or self._start_looking()
        progress, diverged = look.get()
        return progress, diverged

    def _start_looking(self) -> Reading:
        return Reading(self._sampler.progress, self._decoder.diverged_at)

    def _take_steps(self) -> None:
        """Start a bout of steps, and a look at the rows behind it."""
        if not self._going:
            return
        for _ in range(self.pace.steps):
            self._sampler.choose(self._decoder.step(self._sampler.pending))
            self.steps += 1
        self._look = self._start_looking()

    def _collect(self, progress: Tensor) -> _Ended:
        """Take the rows that have ended out; what they wrote is on its way."""
        status, counts, _ = progress.tolist()
        ended = [row for row in sorted(self._going) if status[row] not in (FREE, GOING)]
        jobs = [(row, self._going.pop(row)) for row in ended]
        self._tokens = {row: counts[row] for row in self._going}
        return _Ended(jobs, self._sampler.written(ended, progress) if ended else list)

    def _fill(self, ended: Sequence[int]) -> None:
        """Give free rows the next jobs; let those that ended go where there are none."""
        begun = self._next_jobs()
        by_question = groupby(begun.items(), key=lambda taken: taken[1].question)
        for some in _cut([list(taken) for _, taken in by_question], STARTED_TOGETHER):
            self._begin([taken for question in some for taken in question])
        self._going |= begun
        self._begun = len(begun)
        idle = [row for row in ended if row not in begun]
        if idle:
            self._sampler.free(idle)
            self._decoder.stop(idle)

    def _next_jobs(self) -> dict[int, Job]:
        """Free rows with the jobs that they take; a job whose policy has no place left waits."""
        taken = [0] * len(self._decoder.policies)
        for job in self._going.values():
            taken[self._policy[job.arm]] += 1
        rows = (row for row in range(self.rows) if row not in self._going)
        begun: dict[int, Job] = {}
        waiting: list[Job] = []
        while self._queue and len(self._going) + len(begun) < self.busy:
            job = self._queue.popleft()
            policy = self._policy[job.arm]
            if taken[policy] == self._places:
                waiting.append(job)
                if len(waiting) == self.rows:
                    break
                continue
            taken[policy] += 1
            begun[next(rows)] = job
        self._queue.extendleft(reversed(waiting))
        return begun

    def _begin(self, begun: Sequence[tuple[int, Job]]) -> None:
        """Start rows behind their prompts and choose their first tokens."""
        rows, jobs = [row for row, _ in begun], [job for _, job in begun]
        asked = list(dict.fromkeys(job.question for job in jobs))
        prompt = gathered([self._prompt(question) for question in asked])
        of = [asked.index(job.question) for job in jobs]
        ids = [self.questions[job.question].id for job in jobs]
        self._decoder.start(
            rows,
            prompt,
            of=of,
            policies=[self._policy[job.arm] for job in jobs],
            streams=[stream_id(q, job.repetition) for q, job in zip(ids, jobs, strict=True)],
        )
        self._sampler.begin(
            rows,
            seeds=[self.arms[job.arm].seed for job in jobs],
            questions=ids,
            repetitions=[job.repetition for job in jobs],
        )
        with torch.inference_mode():
            logits = prompt.logits.new_zeros((self.rows, prompt.logits.shape[1]))
            into, which = on_device([rows, of], self.m.device)
            logits[into] = prompt.logits[which]
        self._sampler.choose(logits, rows)

    def _prompt(self, index: int) -> tuple[Prompt, int]:
        """Consume a question's prompt: it, and its place among those consumed with it."""
        if index not in self._prompts:
            near = self._near[index]
            with self._clock("prompts"):
                prompt = prefill(self.m, torch.stack([self.questions[q].tokens for q in near]))
            self._prompts |= {q: (prompt, i) for i, q in enumerate(near)}
        return self._prompts[index]

    def _consume_ahead(self) -> None:
        """Consume the prompts of the next jobs; drop those that no job needs any more."""
        # jobs come question by question: those before the next one's can go
        turn = self._turn_of[self._queue[0].question] if self._queue else len(self._order)
        self._prompts = {q: p for q, p in self._prompts.items() if self._turn_of[q] >= turn}
        if self.pace.ahead:
            for job in islice(self._queue, max(self.rows // 8, 2 * self._begun)):
                self._prompt(job.question)


class _Ended(NamedTuple):
    """Rows that have ended, with their jobs, and what they wrote once it is asked for."""

    jobs: list[tuple[int, Job]]
    written: Callable[[], list[Written]]

    def generations(self, diverged: Tensor) -> list[Generation]:
        """Wait for what they wrote.

        Args:
            diverged: [rows] on the host, of the decoder, when they had ended.
        """
        found = []
        for (row, job), written in zip(self.jobs, self.written(), strict=True):
            # a row that was cut has not fed its last token; rows go on until they are looked at
            fed = len(written.tokens) - (written.end == row_sampler.CUT)
            at = int(diverged[row])
            found.append(
                Generation(
                    job=job,
                    tokens=written.tokens,
                    margins=written.margins,
                    finish=_FINISH[written.end],
                    stop_id=written.stop_id,
                    diverged_at=at if at <= fed else -1,
                )
            )
        return found


def _cut(values: list[_T], most: int) -> Iterator[list[_T]]:
    return (values[i : i + most] for i in range(0, len(values), most))


def _places(m: LoadedModel, policies: int, rows: int) -> int:
    """Rows that a policy can have at once: all, or on CUDA what the memory has room for."""
    if m.device.type != "cuda":
        return rows
    free, _ = torch.cuda.mem_get_info(m.device)
    one = sum(4 * heads * dv * dk for heads, dv, dk in m.recurrent_shapes)
    return max(1, min(rows, int(MEMORY_SHARE * free / (STATE_COPIES * one * policies))))


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
