"""Progress on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_SECONDS = 30.0


class Reporter:
    """Tell how far a study is, how fast it goes and how long it will take.

    Args:
        quiet: say nothing but notes.
        unit: what is counted.
        rate: what is counted, as a rate says it.
    """

    def __init__(
        self, *, quiet: bool = False, unit: str = "stream tokens", rate: str = "tokens"
    ) -> None:
        self.quiet, self.unit, self.rate = quiet, unit, rate
        self.total = self.done = self.begun_at = 0
        self.clock = self.spoken = time.monotonic()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, total: int, done: int) -> None:
        """Begin, perhaps in the middle."""
        self.total, self.done, self.begun_at = total, done, done
        self.clock = self.spoken = time.monotonic()
        if self.quiet:
            return
        if not sys.stderr.isatty():
            begun = f", {done:,} of them done before" if done else ""
            click.echo(f"{total:,} {self.unit} to measure{begun}", err=True)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._bar = Progress(
            TextColumn("measuring"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[state]}"),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=total, completed=done, state="")
        self._bar.start()

    def advance(self, done: int) -> None:
        """Go on."""
        self.done = max(done, self.done)
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, state=self.state(now))
        elif not self.quiet and (now - self.spoken >= LINE_SECONDS or done == self.total):
            self.spoken = now
            percent = 100 * self.done / self.total
            click.echo(
                f"{self.done:,} of {self.total:,} ({percent:.0f} %), {self.state(now)}", err=True
            )

    def state(self, now: float) -> str:
        """Rate of this session, and the time left at that rate."""
        seconds = now - self.clock
        fresh = self.done - self.begun_at
        if fresh <= 0 or seconds <= 0:
            return ""
        rate = fresh / seconds
        left = (self.total - self.done) / rate
        shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        ending = f"{duration(left)} left" if self.done < self.total else f"in {duration(seconds)}"
        return f"{shown} {self.rate}/s, {ending}"

    def note(self, text: str) -> None:
        """Say something, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            click.echo(text, err=True)


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
