"""Embedded tasks: problems with long worked solutions that are checked exactly, made offline."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from quantlab.data.tasks.addition import ADDITION
from quantlab.data.tasks.chain import CHAIN
from quantlab.data.tasks.permutation import PERMUTATION
from quantlab.data.tasks.problem import (
    END,
    END_ID,
    Problem,
    Task,
    extract,
    first_wrong_step,
    grade,
)
from quantlab.data.tasks.recall import RECALL
from quantlab.errors import UsageError

__all__ = [
    "END",
    "END_ID",
    "EVALUATION_SEED",
    "TASKS",
    "Problem",
    "Task",
    "extract",
    "first_wrong_step",
    "grade",
    "task_named",
]

EVALUATION_SEED = 0
"""Seed of the problems that studies use; training takes seeds from 1 on (`corpus`)."""

TASKS: Mapping[str, Task] = MappingProxyType(
    {task.name: task for task in (CHAIN, PERMUTATION, ADDITION, RECALL)}
)
"""Embedded tasks by name."""


def task_named(name: str) -> Task:
    """Look a task up.

    Raises:
        UsageError: with the known ones and the nearest.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"unknown task {name!r}.{hint} Known: {', '.join(TASKS)}")
    return TASKS[name]
