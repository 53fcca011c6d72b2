"""Run one batch of streams into part files, from its last saved state if there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from quantlab.metrics.divergence import compare
from quantlab.metrics.repetitions import kl_of_means
from quantlab.study.rows import chunk_rows
from quantlab.study.store import RunDirectory, read_table, save_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from quantlab.study.backend import Forcing
    from quantlab.study.spec import KlSpec


# Saving takes at most about one part in this many of the time: a long cache is gigabytes.
SAVE_SHARE = 20


def run_batch(
    directory: RunDirectory,
    spec: KlSpec,
    index: int,
    forcing: Forcing,
    *,
    streams: Sequence[int],
    stream_names: Sequence[str],
    positions: Sequence[int],
    advance: Callable[[int], None],
    note: Callable[[str], None],
    checkpoint_seconds: float,
) -> None:
    """Measure one batch; its parts and its mark are on disk when this returns.

    Args:
        directory: where.
        spec: the study.
        index: of the batch.
        forcing: the batch, not yet started.
        streams: indices of its streams in the study.
        stream_names: their names.
        positions: measured positions, ascending.
        advance: told the positions done.
        note: told when a state could not be saved.
        checkpoint_seconds: time between saves of the engine's state; longer where they are slow,
            but every segment is saved at 0.

    Raises:
        RunError: numbers that cannot be, or a disk that is full.
    """
    _restore(directory, index, forcing, positions)
    advance(forcing.done)
    due = time.monotonic() + checkpoint_seconds

    def segment_done(done: int, last: int) -> None:
        nonlocal due
        advance(done)
        begun = time.monotonic()
        if done < last and begun >= due:
            problem = save_tensors(directory.state_file(index), forcing.state_dict())
            if problem:
                note(f"the state could not be saved ({problem}): a kill would restart this batch")
            now = time.monotonic()
            slow = SAVE_SHARE * (now - begun) if checkpoint_seconds else 0.0
            due = now + max(checkpoint_seconds, slow)

    for measured in forcing.run(segment_done):
        rows = chunk_rows(
            spec,
            compare(measured.logits, measured.targets),
            kl_of_means=kl_of_means(measured.logits, spec.repetitions),
            positions=measured.positions,
            diverged_at=measured.diverged_at[1:],  # row 0 is the reference
            streams=streams,
            stream_names=stream_names,
        )
        first, last = int(measured.positions[0]), int(measured.positions[-1])
        directory.write_table(directory.part_file(index, first, last), rows)
    directory.write(directory.done_file(index), b"")
    directory.state_file(index).unlink(missing_ok=True)


def _restore(
    directory: RunDirectory, index: int, forcing: Forcing, positions: Sequence[int]
) -> None:
    """Load the batch's saved state if its parts go that far, and drop what comes after it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state = directory.state_file(index)
    parts = {path: _span(path) for path in directory.parts.glob(f"batch-{index:04d}-*.parquet")}
    tensors: dict[str, Tensor] = {}
    if state.exists():
        # a state that a kill cut short, or that another version wrote: measured again instead
        with suppress(SafetensorError, OSError):
            tensors = load_file(state)
    if "done" in tensors:
        done = int(tensors["done"])
        kept = [path for path, (_, last) in parts.items() if last <= done]
        have = {p for path in kept for p in read_table(path)["position"].to_pylist()}
        if have == {p for p in positions if p <= done}:
            forcing.load_state_dict(tensors)
    for path, (first, _) in parts.items():
        if first > forcing.done:
            path.unlink()


def _span(path: Path) -> tuple[int, int]:
    first, last = path.stem.split("-")[-2:]
    return int(first), int(last)
