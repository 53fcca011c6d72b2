"""What an accuracy study is, and the questions it asks. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quantlab.data.benchmarks.benchmark import (
    BENCHMARKS,
    Benchmark,
    Item,
    load_benchmark,
    load_items,
)
from quantlab.data.ruler import RULER, RulerItem, ruler_items, ruler_tasks
from quantlab.data.tasks import EVALUATION_SEED, TASKS, Problem, task_named
from quantlab.errors import RunError, UsageError
from quantlab.models.source import public_name
from quantlab.replay.policy import Policy, parse_policy

SPEC_VERSION = 1
REFERENCE = parse_policy("conventional:fp32")
SLOT = 1 << 15
"""Question ids of a task: its place in the lists below, times this, plus the question's index. So a
draw does not depend on which other tasks are asked."""
SEARCH = 1_000
"""Problems looked at for ones that fit the budget: this many, and a tenth as many per question."""
KNOWN = (*TASKS, *BENCHMARKS, *RULER)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSpec:
    """An accuracy study.

    Attributes:
        model: zoo name, preset, directory or hub id.
        policies: compared with FP32-state decoding.
        tasks: embedded tasks or benchmarks.
        limit: questions of each task; None for all of a benchmark (embedded tasks need one).
        repetitions: generations of each question by each arm.
        budget: output tokens at which a generation is cut, which counts as wrong. Embedded
            problems whose worked solution would not fit are not asked, under any policy.
        seed: 64-bit seed of stochastic rounding, and of the sampling noise that the second FP32
            run shares with every policy; the first FP32 run, which defines the bins, has the next.
        temperature: see `quantlab.engine.sampling.Sampling`, as the next three.
        top_p: kept probability.
        top_k: kept tokens; 0 for all.
        presence_penalty: on tokens already written.
        context: tokens of prompt and output of RULER's tasks; for those alone.
        rows: rows of every forward.
        margin: of the equivalence test, as a share of the questions.
        device: "cpu", "cuda" or "cuda:i".
        dtype: of weights and activations; None for the checkpoint's own.
    """

    model: str
    policies: tuple[Policy, ...]
    tasks: tuple[str, ...] = ("chain",)
    limit: int | None = 6
    repetitions: int = 1
    budget: int = 1024
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    presence_penalty: float = 0.0
    context: int | None = None
    rows: int = 32
    margin: float = 0.01
    device: str = "cpu"
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("limit", "repetitions", "budget", "context", "rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} must be positive (got {value})")
        if not 0 <= self.seed < 2**64 - 1:
            raise UsageError(f"--seed must be in 0 … 2^64 - 2 (got {self.seed})")
        if not 0 < self.margin < 1:
            raise UsageError(f"--margin is a share between 0 and 1 (got {self.margin})")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise UsageError("give at least one --task, each once")
        for task in self.tasks:
            if task in BENCHMARKS:
                continue
            task_or_fail(task)
            if self.limit is None:
                raise UsageError(f"--limit: {task} has no end; say how many problems")
        long = [task for task in self.tasks if task in RULER]
        if bool(long) != (self.context is not None):
            raise UsageError(
                f"--context: {long[0]} needs one" if long else "--context is for RULER's tasks"
            )
        if self.context is not None and self.context <= self.budget:
            raise UsageError(
                f"--context {self.context:,} has no room beside --budget {self.budget:,}"
            )
        names = [str(policy) for policy in self.policies]
        if len(set(names)) < len(names) or str(REFERENCE) in names:
            raise UsageError(
                f"policies are listed once each, without {REFERENCE.short}, which rides along"
            )

    @property
    def room(self) -> int | None:
        """Tokens that a prompt of RULER's may have."""
        return None if self.context is None else self.context - self.budget

    @property
    def arms(self) -> list[tuple[str, Policy, int]]:
        """(name, policy, sampling seed) of every arm.

        `bins` defines the bins with noise of its own; `reference` is what policies are compared
        with; `repeat` is the reference once more: what changes by itself on this machine.
        """
        return [
            ("bins", REFERENCE, self.seed + 1),
            ("reference", REFERENCE, self.seed),
            ("repeat", REFERENCE, self.seed),
            *((str(policy), policy, self.seed) for policy in self.policies),
        ]

    def to_json(self) -> dict[str, Any]:
        """JSON values; policies by their long names, the model without where it lies."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["model"] = public_name(self.model)
        names = [str(policy) for policy in self.policies]
        return {**values, "policies": names, "tasks": list(self.tasks)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EvalSpec:
        """Read what `to_json` wrote.

        Raises:
            RunError: if it is something else.
        """
        try:
            policies = tuple(parse_policy(text) for text in values["policies"])
            return cls(**{**values, "policies": policies, "tasks": tuple(values["tasks"])})
        except (TypeError, KeyError, ValueError, UsageError) as error:
            raise RunError(f"not the spec of an accuracy study: {error}") from error

    def digest(self) -> str:
        """Eight hex digits that tell specs apart, for names of run directories."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def task_or_fail(name: str) -> None:
    """Check that a task exists.

    Raises:
        UsageError: with the known ones, embedded and public.
    """
    if name in BENCHMARKS or name in RULER:
        return
    try:
        task_named(name)
    except UsageError as error:
        raise UsageError(f"{error} Benchmarks: {', '.join((*BENCHMARKS, *RULER))}") from error


Source = Problem | Item | RulerItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One question of a study.

    Attributes:
        id: keys its draws.
        task: name.
        question: index within the task.
        source: the embedded problem, or the benchmark's item; RULER's have a prompt once they are
            fitted to a model's tokens.
    """

    id: int
    task: str
    question: int
    source: Source

    @property
    def gold(self) -> str:
        """The right answer."""
        return self.source.answer if isinstance(self.source, Problem) else self.source.gold


def expected_tokens(a: Asked, spec: EvalSpec) -> int:
    """Guess the tokens of an output: the worked solution's, or half the budget."""
    return len(a.source.solution) + 1 if isinstance(a.source, Problem) else spec.budget // 2


def ask(spec: EvalSpec) -> list[Asked]:
    """Collect the questions of a study, task by task.

    Raises:
        MissingAsset, RunError: of a benchmark's data.
        UsageError: no problem fits the budget.
    """
    found: list[Asked] = []
    for task in spec.tasks:
        sources: list[tuple[int, Source]] = []
        if task in BENCHMARKS:
            items = load_items(load_benchmark(task))[: spec.limit]
            sources += [(item.id, item) for item in items]
        elif task in RULER:
            assert spec.limit is not None
            sources += [(item.id, item) for item in ruler_items(task, spec.limit)]
        else:
            assert spec.limit is not None
            looked_at = min(SLOT, SEARCH + SEARCH // 10 * spec.limit)
            for index in range(looked_at):
                problem = TASKS[task].problem(EVALUATION_SEED, index)
                if len(problem.solution) + 1 <= spec.budget:
                    sources.append((index, problem))
                if len(sources) == spec.limit:
                    break
            if len(sources) < spec.limit:
                raise UsageError(
                    f"--budget {spec.budget}: of the first {looked_at:,} problems of {task} "
                    f"{len(sources):,} have a solution that fits, fewer than --limit {spec.limit}"
                )
        base = KNOWN.index(task) * SLOT
        found += [Asked(id=base + i, task=task, question=i, source=s) for i, s in sources]
    return found


def describe(asked: list[Asked]) -> dict[str, Any]:
    """Provenance of the questions: count and hash by task, source and licence of benchmarks."""
    found: dict[str, Any] = {}
    for task in dict.fromkeys(a.task for a in asked):
        texts = [f"{a.source.prompt}\0{a.gold}\0" for a in asked if a.task == task]
        entry: dict[str, Any] = {
            "questions": len(texts),
            "sha256": hashlib.sha256("".join(texts).encode()).hexdigest(),
        }
        if task in BENCHMARKS:
            b: Benchmark = load_benchmark(task)
            entry |= {"source": f"{b.repository}@{b.revision}", "licence": b.licence}
        if task in RULER:
            entry |= {key: ruler_tasks()[task][key] for key in ("source", "licence")}
        found[task] = entry
    return found
