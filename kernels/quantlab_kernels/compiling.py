"""Compile kernels side by side instead of one by one as they are met.

    with compiling(jobs=8):
        step()  # launches through `launch` are compiled, and nothing of them runs

Most of a compilation holds no lock of the interpreter, so threads do. Under Triton's CPU
interpreter there is nothing to compile and a launch inside does nothing.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton
from triton.runtime.jit import JITFunction

_COMPILING: ContextVar[bool] = ContextVar("quantlab_compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel, or, inside `compiling`, have it compiled for these arguments."""
    if not _COMPILING.get():
        kernel[grid](*args, **options)
    elif isinstance(kernel, JITFunction):
        kernel.warmup(*args, grid=grid, **options)


@contextmanager
def compiling(jobs: int | None = None) -> Iterator[None]:
    """Compile what is launched inside, `jobs` kernels at once, and run nothing.

    What cannot be compiled raises where it is launched, not here.

    Args:
        jobs: threads; as many as processors if None.
    """
    jobs = jobs or os.cpu_count() or 1
    with ThreadPoolExecutor(jobs) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        token = _COMPILING.set(True)
        try:
            yield
        finally:
            _COMPILING.reset(token)
