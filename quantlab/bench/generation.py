"""Free-running generation: tokens a second with sampling and rows that are replaced.

Every question is answered twice by the same policy under the same noise, in different rows, so that
each run also says what share of outputs a device repeats to the last token. Twice as many answers
as rows: every row is replaced once. Timed from the first look after the captures to the end, with
the prompts that are consumed on the way; `quantlab bench decode --part models` has the step alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from quantlab.bench.decode import CONVENTIONAL
from quantlab.bench.engine import QWEN, TINY, build_model
from quantlab.bench.measure import Bench, Row
from quantlab.engine.generation import Arm, GenerationRun, Job, Question
from quantlab.engine.sampling import Sampling
from quantlab.models import LoadedModel, load_model
from quantlab.replay import Policy, parse_policy

POLICIES = (CONVENTIONAL, *(parse_policy(p) for p in ("shared:nvfp4-sr", "nvfp4 / fp16-sr")))
PROMPT = 64
BUDGET = 256
REASONER = "tiny-reasoner-gdn"
BATCHES = {REASONER: (1024,), QWEN.name: (32, 256)}
WARM_STEPS = 64
"""Steps that are not counted: the first ones run plainly and are captured."""
SETTINGS = Sampling(temperature=1.0, top_p=0.95, top_k=20)
"""Of the paper for Qwen3.5, without the presence penalty."""
SEED = 12


def generation_rows(
    bench: Bench, *, quick: bool, only: str = "", budget: int = BUDGET
) -> Iterator[Row]:
    """Measure a reasoner and a random model of the shape of Qwen3.5-4B.

    Args:
        bench: where.
        quick: a tiny model and a few tokens, to see that it runs.
        only: models whose name contains this.
        budget: tokens of an output.
    """
    if quick:
        m = build_model(TINY, bench.device)
        yield from bench_generation(bench, m, "tiny", batches=(4,), budget=6, warm=2)
        return
    for name, batches in BATCHES.items():
        if only not in name:
            continue
        if name == QWEN.name:
            m = build_model(QWEN, bench.device)
        else:
            m = load_model(name, device=str(bench.device), dtype=torch.bfloat16)
        yield from bench_generation(bench, m, name, batches=batches, budget=budget)


def bench_generation(
    bench: Bench,
    m: LoadedModel,
    name: str,
    *,
    batches: Sequence[int],
    policies: Sequence[Policy] = POLICIES,
    budget: int = BUDGET,
    warm: int = WARM_STEPS,
) -> Iterator[Row]:
    """Measure a model at several numbers of rows under several policies.

    Args:
        bench: where.
        m: the model.
        name: of the model; row names start with it.
        batches: numbers of rows.
        policies: one a row of results.
        budget: tokens of an output.
        warm: steps that are not counted.
    """
    generator = torch.Generator().manual_seed(SEED)
    for batch in batches:
        questions = [
            Question(id=i, tokens=torch.randint(3, min(m.vocab_size, 256), (PROMPT,),
                                                generator=generator))
            for i in range(batch)
        ]  # fmt: skip
        for policy in policies:
            row_name = f"{name} generation B={batch} {policy.short}"
            try:
                yield Row(
                    name=row_name,
                    values=_measured(bench, m, policy, questions, batch, budget, warm),
                )
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:300]
                yield Row(name=row_name, status="refused", reason=reason)
            if bench.on_cuda:
                torch.cuda.empty_cache()


def _measured(
    bench: Bench,
    m: LoadedModel,
    policy: Policy,
    questions: Sequence[Question],
    batch: int,
    budget: int,
    warm: int,
) -> dict[str, float]:
    arms = [Arm(policy=policy, seed=SEED)] * 2
    run = GenerationRun(
        m, arms=arms, questions=questions, sampling=SETTINGS, budget=budget, stop_ids=[], seed=SEED,
        rows=batch,
    )  # fmt: skip
    begun: tuple[float, int] | None = None

    def look() -> None:
        nonlocal begun
        if begun is None and run.steps >= warm:
            _wait(bench)
            begun = time.perf_counter(), run.steps

    found = {g.job: g for g in run.run(look)}
    _wait(bench)
    assert begun is not None
    seconds, steps = time.perf_counter() - begun[0], run.steps - begun[1]
    same = [found[Job(0, q, 0)].tokens == found[Job(1, q, 0)].tokens for q in range(len(questions))]
    return {
        "tokens_per_s": batch * steps / seconds,
        "ms": 1e3 * seconds / steps,
        "steps": float(steps),
        "identical": sum(same) / len(same),
    }


def _wait(bench: Bench) -> None:
    if bench.on_cuda:
        torch.cuda.synchronize(bench.device)
