"""From the rows of an accuracy run to its tables: by policy, and by FP32 output length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quantlab.metrics.accuracy import Bools, Ints, accuracy, clustered, clustered_wilson
from quantlab.metrics.bins import log_bins, quantile_bins
from quantlab.metrics.paired import MARGIN, change, flips

BINS, REFERENCE, REPEAT = "bins", "reference", "repeat"
ALL = "all"
"""Task of the rows that hold every task."""


class _Arm:
    """Columns of one arm in the order of (task, question, repetition)."""

    def __init__(self, rows: pa.Table) -> None:
        self.policy = rows["policy"][0].as_py()
        self.length: Ints = rows["length"].to_numpy().astype(np.int64)
        self.share = rows["share"].to_numpy()
        self.graded: Bools = rows["graded"].to_numpy(zero_copy_only=False).astype(bool)
        finish = np.array(rows["finish"].to_pylist(), dtype=object)
        self.truncated: Bools = finish == "budget"
        self.diverged: Bools = finish == "diverged"
        self.collapsed: Bools = np.array([c is not None for c in rows["collapse"].to_pylist()])
        self.ends = [
            f"id {stop}" if stop is not None else end
            for stop, end in zip(rows["stop_id"].to_pylist(), finish, strict=True)
        ]
        self.left_at = rows["left_at"].to_pylist()
        self.left_margin = rows["left_margin"].to_pylist()
        tasks, questions = rows["task"].to_pylist(), rows["question"].to_pylist()
        self.key = list(zip(tasks, questions, rows["repetition"].to_pylist(), strict=True))
        # one id a (task, question), the same in every arm
        ids: dict[tuple[str, int], int] = {}
        pairs = zip(tasks, questions, strict=True)
        self.question: Ints = np.array([ids.setdefault(p, len(ids)) for p in pairs], np.int64)

    @property
    def correct(self) -> Bools:
        """Right and finished by itself."""
        return self.graded & ~self.truncated & ~self.diverged


def _arms(rows: pa.Table) -> dict[str, _Arm]:
    """Arms of a run or of one task, in the rows' order.

    Raises:
        ValueError: the arms do not hold the same draws.
    """
    names = rows["arm"].to_pylist()
    found = {}
    for name in dict.fromkeys(names):
        inside = rows.filter(pa.array([n == name for n in names]))
        order = [("task", "ascending"), ("question", "ascending"), ("repetition", "ascending")]
        found[name] = _Arm(inside.sort_by(order))
    if len({tuple(arm.key) for arm in found.values()}) > 1:
        raise ValueError("the arms of this run do not hold the same questions and repetitions")
    return found


def _compared(arms: dict[str, _Arm]) -> list[str]:
    """Arms that tables show, the reference first; the one that defines bins is not among them."""
    return [REFERENCE, *(name for name in arms if name not in (BINS, REFERENCE))]


def _cells(
    arm: _Arm, reference: _Arm, inside: npt.NDArray[np.intp], margin: float
) -> dict[str, Any]:
    ids = arm.question[inside]
    found = accuracy(arm.graded[inside], (arm.truncated | arm.diverged)[inside], ids)
    low, high = clustered_wilson(found.strict)
    ends = Counter(arm.ends[i] for i in inside)
    moved = change(reference.correct[inside], arm.correct[inside], ids, margin=margin)
    return {
        "questions": found.strict.questions,
        "draws": found.strict.draws,
        "accuracy": found.strict.mean,
        "se": found.strict.se,
        "low": low,
        "high": high,
        "as_graded": found.as_graded.mean,
        "share": float(arm.share[inside].mean()),
        "finished_only": found.finished_only.mean,
        "truncated": clustered(arm.truncated[inside], ids).mean,
        "diverged": clustered(arm.diverged[inside], ids).mean,
        "collapsed": clustered(arm.collapsed[inside], ids).mean,
        "ends": ", ".join(f"{end} × {n}" for end, n in ends.most_common()),
        "change": moved.difference,
        "change_se": moved.se,
        "change_low": moved.low,
        "change_high": moved.high,
        "lost": moved.lost,
        "gained": moved.gained,
        "p": moved.p,
        "equivalence_p": moved.equivalence_p,
        "verdict": moved.verdict,
        "flips": flips(reference.correct[inside], arm.correct[inside]),
        "identical": float(np.mean([arm.left_at[i] is None for i in inside])),
        "left_at_median": _median([arm.left_at[i] for i in inside]),
        "left_margin_median": _median([arm.left_margin[i] for i in inside]),
    }


def _median(values: Sequence[float | None]) -> float:
    given = [v for v in values if v is not None]
    return float(np.median(given)) if given else float("nan")


def _by_task(rows: pa.Table) -> list[tuple[str, pa.Table]]:
    """(task, rows) of every task, and of all together where there are several."""
    tasks = rows["task"].to_pylist()
    names = list(dict.fromkeys(tasks))
    found = [(name, rows.filter(pa.array([t == name for t in tasks]))) for name in names]
    return [*found, (ALL, rows)] if len(names) > 1 else found


def summary_table(rows: pa.Table, *, margin: float = MARGIN) -> pa.Table:
    """Accuracy of every arm and its change from the reference, task by task.

    Args:
        rows: of `quantlab.study.accuracy_rows.SCHEMA`.
        margin: of the equivalence verdict, as a share.

    Returns:
        A row a task and arm: accuracy (a truncated answer is wrong) with clustered error and
        Wilson's interval, `as_graded`, `share` (of several answers asked for, whatever the finish:
        RULER's own score), `finished_only`, shares of truncated, diverged and
        collapsed outputs, how many ended how (`ends`: which stop id, or what else), the paired
        change with its interval, exact p and verdict, the share of flipped grades and of outputs
        identical to the reference's, and where and at what margin (nats) the others leave it.
    """
    found = []
    for task, inside in _by_task(rows):
        arms = _arms(inside)
        everything = np.arange(len(arms[REFERENCE].length))
        for name in _compared(arms):
            cells = _cells(arms[name], arms[REFERENCE], everything, margin)
            found.append({"task": task, "arm": name, "policy": arms[name].policy, **cells})
    return pa.Table.from_pylist(found)


def bins_table(
    rows: pa.Table, *, margin: float = MARGIN, count: int = 4, log: bool = False
) -> pa.Table:
    """Accuracy by FP32 output length, task by task.

    Every generation is binned by the length of its counterpart in the first FP32 run, whose noise
    is its own; the curve of FP32 is the second run's.

    Args:
        rows: as for `summary_table`.
        margin: of the verdict.
        count: of equally full bins.
        log: bins of doubling length instead.

    Returns:
        `summary_table`'s columns, with the bin's number and its range and median of FP32 lengths.
    """
    found = []
    for task, inside in _by_task(rows):
        arms = _arms(inside)
        lengths = arms[BINS].length
        for number, one in enumerate(log_bins(lengths) if log else quantile_bins(lengths, count)):
            for name in _compared(arms):
                cells = _cells(arms[name], arms[REFERENCE], one.members, margin)
                found.append(
                    {
                        "task": task,
                        "bin": number,
                        "length_low": one.low,
                        "length_high": one.high,
                        "length_median": one.median,
                        "arm": name,
                        "policy": arms[name].policy,
                        **cells,
                    }
                )
    return pa.Table.from_pylist(found)
