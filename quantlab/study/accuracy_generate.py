"""Make the generations of an accuracy study, into parts of its run directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantlab.study.accuracy_rows import part_table
from quantlab.study.accuracy_spec import EvalSpec, expected_tokens
from quantlab.study.accuracy_text import Texts
from quantlab.study.progress import Progress
from quantlab.study.store import RunDirectory, read_table, save_tensors

if TYPE_CHECKING:
    from quantlab.engine.generation import GenerationRun, Job


def generation_run(
    spec: EvalSpec,
    m: Any,
    text: Texts,
    *,
    arms: Sequence[int] | None = None,
    skip: Sequence[Job] = (),
) -> GenerationRun:
    """Set up the generations of a study.

    Args:
        spec: the study.
        m: the loaded model.
        text: its questions, tokenized.
        arms: which of the spec's; all if None.
        skip: jobs that need not be made.
    """
    from quantlab.engine.generation import Arm, GenerationRun, Question
    from quantlab.engine.sampling import Sampling

    wanted = range(len(spec.arms)) if arms is None else arms
    return GenerationRun(
        m,
        arms=[Arm(policy=spec.arms[arm][1], seed=spec.arms[arm][2]) for arm in wanted],
        questions=[
            Question(id=i, tokens=tokens) for i, tokens in zip(text.ids, text.prompts, strict=True)
        ],
        sampling=Sampling(
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            presence_penalty=spec.presence_penalty,
        ),
        budget=spec.budget,
        stop_ids=text.stop_ids,
        seed=spec.seed,
        rows=spec.rows,
        repetitions=spec.repetitions,
        skip=skip,
    )


def generate(
    directory: RunDirectory,
    spec: EvalSpec,
    m: Any,
    text: Texts,
    progress: Progress,
    checkpoint_seconds: float,
    record: dict[str, Any],
) -> None:
    """Make every generation that is not on disk yet; a kill costs what came after the last save.

    Args:
        directory: of the run.
        spec: the study.
        m: the loaded model.
        text: its questions, tokenized.
        progress: told how many tokens are done.
        checkpoint_seconds: time between saves.
        record: of the session; is given `seconds_by_part` (see `GenerationRun`), also of one that
            is stopped.
    """
    import torch

    from quantlab.engine.generation import Generation, Job

    state, base = _restore(directory)
    files = _parts(directory)
    columns = ["arm", "asked", "repetition"]
    parts = [
        [Job(*row.values()) for row in read_table(path).select(columns).to_pylist()]
        for path in files
    ]
    made = [job for part in parts for job in part]
    run = generation_run(
        spec,
        m,
        text,
        # a state counts its jobs among those that its own session had to make
        skip=[job for part in parts[:base] for job in part] if state else made,
    )
    if state:
        run.load_state_dict(state)
    else:
        base = len(files)
    # what is left is told by tokens: the longest outputs come first
    expected = [expected_tokens(a, spec) for a in text.asked]
    done = sum(expected[job.question] for job in made)
    progress.start(len(spec.arms) * sum(expected) * spec.repetitions, done)
    waiting: list[Generation] = []
    margins_of = [name for name, _, _ in spec.arms].index("reference")
    count = len(files)
    due = time.monotonic() + checkpoint_seconds

    def save() -> None:
        nonlocal waiting, count
        if waiting:
            path = directory.part_file(0, count, count)
            directory.write_table(path, part_table(waiting, margins_of=margins_of))
            waiting, count = [], count + 1

    def stepped() -> None:
        nonlocal due
        going = sum(min(tokens, expected[job.question]) for job, tokens in run.under_way)
        progress.advance(done + going)
        if time.monotonic() < due:
            return
        save()
        if run.worth_saving:
            tensors = run.state_dict() | {
                "study.parts": torch.tensor(count),
                "study.base": torch.tensor(base),
            }
            problem = save_tensors(directory.state_file(0), tensors)
            if problem:
                progress.note(f"the state could not be saved ({problem})")
        due = time.monotonic() + checkpoint_seconds

    try:
        for generation in run.run(stepped):
            waiting.append(generation)
            done += expected[generation.job.question]
    except KeyboardInterrupt:
        # of use where there is no state to go on from, which these would be made again from
        save()
        raise
    finally:
        record["seconds_by_part"] = {part: round(s, 1) for part, s in run.seconds.items()}
    save()
    progress.advance(done)
    directory.state_file(0).unlink(missing_ok=True)


def _parts(directory: RunDirectory) -> list[Path]:
    return sorted(directory.parts.glob("batch-0000-*.parquet"))


def _restore(directory: RunDirectory) -> tuple[dict[str, Any], int]:
    """Read the engine state and the number of parts its session began with; drop later parts.

    Without a usable state, what is in the parts stays and the rest is made again.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    if directory.state_file(0).exists():
        # a state that a kill cut short
        with suppress(SafetensorError, OSError):
            tensors = load_file(directory.state_file(0))
    files = _parts(directory)
    if "study.parts" not in tensors or len(files) < int(tensors["study.parts"]):
        return {}, 0
    for path in files[int(tensors["study.parts"]) :]:
        path.unlink()
    base = int(tensors.pop("study.base"))
    tensors.pop("study.parts")
    return tensors, base
