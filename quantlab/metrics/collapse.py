"""Loops and collapses in generated tokens, flagged by where they begin.

A loop is an output whose end repeats one block of tokens; a collapse is a run of one token, or of
ids that stand for no text (unknown, padding). Both look at the end of an output alone: a table or
a list may repeat itself for a while and go on, a stuck model does not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A loop: the last LOOP_TOKENS tokens or more have a period of at most LONGEST_PERIOD, and hold the
# repeated block at least LOOP_REPEATS times. Running text has no exact repeats of this length;
# tables of equal rows do, hence the number of repeats.
LOOP_TOKENS = 128
LOOP_REPEATS = 8
LONGEST_PERIOD = 512
# A collapse: this many times the same token at the end (rules of dashes and spaces are shorter),
# or this many ids that are no text.
SAME_TOKEN = 128
NO_TEXT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """How an output went wrong.

    Attributes:
        kind: "loop" (a block of several tokens repeats), "run" (one token repeats) or "no text"
            (ids that stand for none).
        start: index of the first token of the repetition.
        period: tokens of the repeated block.
    """

    kind: str
    start: int
    period: int


def collapse(tokens: npt.ArrayLike, no_text: Collection[int] = ()) -> Collapse | None:
    """Find the repetition that an output ends in.

    Args:
        tokens: output tokens, the stop token left out.
        no_text: ids that stand for no text, such as unknown and padding.

    Returns:
        The collapse, or None.
    """
    x = np.asarray(tokens, np.int64)
    silent = _run_at_end(np.isin(x, list(no_text)))
    if silent >= NO_TEXT:
        return Collapse(kind="no text", start=len(x) - silent, period=1)
    for period in range(1, min(LONGEST_PERIOD, len(x) // 2) + 1):
        # a cheap look before the whole comparison
        if x[-1] != x[-1 - period]:
            continue
        covered = _run_at_end(x[period:] == x[:-period]) + period
        enough = SAME_TOKEN if period == 1 else max(LOOP_TOKENS, LOOP_REPEATS * period)
        if covered >= enough:
            kind = "run" if period == 1 else "loop"
            return Collapse(kind=kind, start=len(x) - covered, period=period)
    return None


def _run_at_end(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Length of the run of true values that `flags` ends with."""
    broken = np.flatnonzero(~flags)
    return len(flags) if not len(broken) else len(flags) - 1 - int(broken[-1])
