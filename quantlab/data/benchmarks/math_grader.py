"""Grade mathematical answers with math-verify, in worker processes that can be killed.

math-verify parses and simplifies what a model wrote, and some of that never ends. Its own timeouts
need the main thread's alarm signal and grade by string comparison without it, so they are off here;
a worker that exceeds its time is killed and replaced, and the answer is a class of its own.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Literal, Self

from quantlab.errors import MissingAsset, RunError

Verdict = Literal["right", "wrong", "timeout", "error"]

LONGEST = 2_000
"""Characters of an answer that is looked at; anything longer is wrong as it stands."""
MEMORY = 4 << 30
"""Bytes of address space of a worker: 10^10^10 must fail, not swap."""
START_SECONDS = 120.0
WARM = "quantlab.data.benchmarks.math_warm"
"""Module that the process workers are forked from imports."""
_READY = "ready"


def equal(gold: str, answer: str) -> bool:
    """Whether math-verify takes two LaTeX expressions for equal; may run for ever."""
    from math_verify import parse, verify

    one, two = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer))
    return bool(verify(one, two, timeout_seconds=None))


def _work(connection: Connection) -> None:
    import logging
    import resource
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)  # math-verify warns of the missing timeouts at every call
    equal("1", "1")  # whatever is still to import, before the clock runs
    connection.send(_READY)
    while True:
        try:
            gold, answer = connection.recv()
        except EOFError:
            return
        try:
            found = "right" if equal(gold, answer) else "wrong"
        except (MemoryError, RecursionError, Exception):
            found = "error"
        connection.send(found)


@dataclass(slots=True, kw_only=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    item: int = -1
    ready: bool = False
    deadline: float = 0.0


class MathGrader:
    """A pool of killable workers.

    Args:
        workers: processes.
        timeout: seconds an answer may take.

    Raises:
        MissingAsset: math-verify is not installed.
    """

    def __init__(self, *, workers: int = 2, timeout: float = 5.0) -> None:
        import importlib.util

        if importlib.util.find_spec("math_verify") is None:
            raise MissingAsset(
                "grading mathematical answers needs math-verify: pip install 'quantlab[eval]'"
            )
        self.timeout = timeout
        # Forked from a small process that has imported everything once: a fork of this one would
        # copy torch and its threads, and a fresh interpreter takes seconds to replace a worker.
        multiprocessing.set_forkserver_preload([WARM])
        self._context = multiprocessing.get_context("forkserver")
        self._workers = [self._start() for _ in range(workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            self._end(worker)
        self._workers = []

    def grade(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Grade (gold, answer) pairs, in order.

        Answers that are equal as strings are right without a look at what they mean.
        """
        found: dict[int, Verdict] = {}
        waiting = []
        for index, (gold, answer) in enumerate(pairs):
            if gold.strip() == answer.strip():
                found[index] = "right"
            elif len(answer) > LONGEST:
                found[index] = "wrong"
            else:
                waiting.append(index)
        waiting.reverse()
        while len(found) < len(pairs):
            for worker in self._workers:
                if worker.ready and worker.item < 0 and waiting:
                    worker.item = waiting.pop()
                    worker.connection.send(pairs[worker.item])
                    worker.deadline = time.monotonic() + self.timeout
            self._listen(found)
        return [found[index] for index in range(len(pairs))]

    def _listen(self, found: dict[int, Verdict]) -> None:
        """Wait for the next answer or deadline."""
        active = [w for w in self._workers if w.item >= 0 or not w.ready]
        left = min(w.deadline for w in active) - time.monotonic()
        answered = wait([w.connection for w in active], max(0.0, left))
        for index, worker in enumerate(self._workers):
            if worker not in active:
                continue
            if worker.connection in answered:
                verdict: Verdict | None = "error"
                with suppress(EOFError, OSError):
                    verdict = worker.connection.recv()
                    if verdict == _READY:
                        worker.ready, verdict = True, None
                if verdict is None:
                    continue
                if worker.item < 0:
                    raise RunError("a grading worker ended while it was starting")
                found[worker.item] = verdict
                worker.item = -1
                if not worker.process.is_alive():
                    self._workers[index] = self._start()
            elif time.monotonic() >= worker.deadline:
                if worker.item < 0:
                    raise RunError(f"a grading worker did not start within {START_SECONDS:.0f} s")
                found[worker.item] = "timeout"
                self._end(worker)
                self._workers[index] = self._start()

    def _start(self) -> _Worker:
        own, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process=process, connection=own, deadline=time.monotonic() + START_SECONDS)

    def _end(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
