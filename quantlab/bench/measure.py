"""Timing one operation on one device, after a check of its outputs on the same inputs.

On CUDA: events around each call, the second-level cache overwritten before it, warm-up calls left
out. Elsewhere a clock, which is good for testing the harness and nothing else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

FLUSH_BYTES = 256 << 20
"""Written before a timed call: four times the second-level cache of an H200."""

Status = Literal["ok", "refused", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of repeated calls.

    Attributes:
        seconds: one number a call.
    """

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) <= 0:
            raise ValueError(f"times are positive, and at least one: {self.seconds}")

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median; of fewer than four calls, the range."""
        if len(self.seconds) < 4:
            return (max(self.seconds) - min(self.seconds)) / self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured operation.

    Attributes:
        name: what targets call it.
        status: "ok"; "refused": its check failed, so it has no speed; "absent": not installed here.
        reason: why it has no speed.
        values: milliseconds, ratios and sizes by name.
    """

    name: str
    status: Status = "ok"
    reason: str = ""
    values: dict[str, float] = field(default_factory=dict)


class Bench:
    """Measures on one device.

    Args:
        device: where.
        repeats: timed calls of an operation.
        warmup: calls before them.
    """

    def __init__(self, device: str, *, repeats: int = 20, warmup: int = 3) -> None:
        if repeats < 1:
            raise ValueError(f"repeats must be positive, got {repeats}")
        self.device = torch.device(device)
        self.repeats = repeats
        self.warmup = warmup
        self._flush: torch.Tensor | None = None

    @property
    def on_cuda(self) -> bool:
        """Whether this measures anything."""
        return self.device.type == "cuda"

    def time(
        self, calls: Callable[[], Any] | Sequence[Callable[[], Any]], repeats: int | None = None
    ) -> Timing:
        """Time a call, or several in turn (the same work on other buffers), one at a time."""
        turns = [calls] if callable(calls) else list(calls)
        repeats = self.repeats if repeats is None else repeats
        for i in range(self.warmup):
            turns[i % len(turns)]()
        return Timing(seconds=tuple(self._once(turns[i % len(turns)]) for i in range(repeats)))

    def measured(
        self,
        name: str,
        call: Callable[[], Any],
        *,
        check: Callable[[], str | None],
        values: Callable[[Timing], dict[str, float]],
        repeats: int | None = None,
    ) -> Row:
        """Check an operation on the inputs it is timed on, then time it.

        Args:
            name: of the row.
            call: the operation.
            check: returns what is wrong with its outputs, or None.
            values: what to report of the timing, beside `ms` and `spread`.
            repeats: instead of the bench's own.

        Returns:
            The row, without a speed if the check finds fault or anything raises.
        """
        try:
            fault = check()
            if fault is not None:
                return Row(name=name, status="refused", reason=fault)
            timing = self.time(call, repeats)
        except ModuleNotFoundError as error:
            return Row(name=name, status="absent", reason=str(error))
        except Exception as error:
            # one broken operation must not hide the others
            return Row(name=name, status="refused", reason=f"{type(error).__name__}: {error}"[:300])
        shown = {"ms": timing.median * 1e3, "spread": timing.spread}
        return Row(name=name, values=shown | values(timing))

    def copy_rate(self, elements: int) -> float:
        """Measure an FP32 copy: bytes per second, read and written."""
        source = torch.randn(elements, device=self.device)
        target = torch.empty_like(source)
        timing = self.time(lambda: target.copy_(source))
        return 8 * elements / timing.median

    def read_rate(self, elements: int) -> float:
        """Measure a sum of FP32 numbers: bytes per second, read."""
        source = torch.randn(elements, device=self.device)
        return 4 * elements / self.time(lambda: source.sum()).median

    def in_turn(self, calls: Sequence[Callable[[], Any]], repeats: int | None = None) -> Timing:
        """Time calls that follow each other without a gap, in one graph on CUDA: seconds a call.

        What keeps the cache cold is that they work on different memory; the first call is made
        once before, so that it is compiled.

        Args:
            calls: of one length, each once a repeat.
            repeats: of all of them; the bench's own if None.
        """
        repeats = self.repeats if repeats is None else repeats
        calls[0]()
        if not self.on_cuda:
            whole = self.time(lambda: [call() for call in calls], repeats)
            return Timing(seconds=tuple(s / len(calls) for s in whole.seconds))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        seconds = []
        for _ in range(self.warmup + repeats):
            start, stop = new_event(), new_event()
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            seconds.append(float(start.elapsed_time(stop)) / 1e3 / len(calls))
        return Timing(seconds=tuple(seconds[self.warmup :]))

    def _once(self, call: Callable[[], Any]) -> float:
        if not self.on_cuda:
            started = time.perf_counter()
            call()
            return max(time.perf_counter() - started, 1e-9)
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        self._flush.zero_()
        start, stop = new_event(), new_event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def new_event() -> torch.cuda.Event:
    """Make an event that reads the device's clock."""
    # torch ships no types for it
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
