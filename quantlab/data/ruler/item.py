"""A question about a long context, made to measure: its haystack grows to the length asked for.

Scored as RULER scores: an answer found is one that the output contains, whatever the case, and a
question's share is that of its answers. It is right when all of them are there, or where several
answers are right, any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quantlab.errors import UsageError

# Characters or tokens of a text, whatever lengths are asked for in.
Count = Callable[[str], int]
Built = tuple[str, tuple[str, ...]]
Builder = Callable[[int], Built]


@dataclass(frozen=True, slots=True, kw_only=True)
class RulerItem:
    """One question.

    Attributes:
        id: index in its task; keys what is drawn.
        build: prompt and answers for a haystack of so many units.
        prompt: the user's message; empty until it is fitted.
        references: what the output should contain.
        any_answer: whether any of them will do.
    """

    id: int
    build: Builder
    prompt: str = ""
    references: tuple[str, ...] = ()
    any_answer: bool = False

    @property
    def gold(self) -> str:
        """The right answer, as one text."""
        return ", ".join(self.references)

    def fitted(self, room: int, count: Count) -> RulerItem:
        """Grow the haystack to the longest that fits.

        Args:
            room: tokens that a prompt may have.
            count: tokens of a prompt.

        Raises:
            UsageError: not even the smallest haystack fits.
        """
        low, size = 1, count(self.build(1)[0])
        if size > room:
            raise UsageError(
                f"--context leaves {room:,} tokens for a prompt, and the smallest has {size:,}"
            )
        # all units are about of one length: a guess from the last two sizes, then closing in
        high: int | None = None
        guess = 2
        while high is None or high - low > 1:
            found = count(self.build(guess)[0])
            if found <= room:
                each = (found - size) / (guess - low)
                low, size = guess, found
            else:
                each = (found - size) / (guess - low)
                high = guess
            step = max(1, int((room - size) / max(each, 1e-9)))
            guess = low + step if high is None else min(max(low + 1, low + step), high - 1)
        prompt, references = self.build(low)
        return replace(self, prompt=prompt, references=references)

    def found(self, text: str) -> tuple[str, ...]:
        """Find the references that an output contains."""
        lower = text.lower()
        return tuple(r for r in self.references if r.lower() in lower)

    def share(self, found: tuple[str, ...]) -> float:
        """Score of an output in which these references were found, between 0 and 1."""
        if self.any_answer:
            return float(bool(found))
        return len(found) / len(self.references)
