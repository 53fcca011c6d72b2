"""A problem with its worked solution, and the rules that all embedded tasks share.

A text is `prompt + solution + END`. The prompt states the problem in full and ends with a colon and
a newline; the solution is one short line a step and a last line `answer VALUE`. Everything is
ASCII, so that a byte-level model writes it a character a token. END is a byte that occurs nowhere
else: generation stops on its id, never on a string.

Problem `index` of a (task, seed) is drawn from a counter generator keyed by these three alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quantlab.data.tokenize import BYTE_OFFSET

END = "\x04"
"""End of a solution: ASCII's end of transmission."""
END_ID = ord(END) + BYTE_OFFSET
"""Its id in ByT5's vocabulary."""
ANSWER = "answer "


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem.

    Attributes:
        task: name of its task.
        index: in the task's sequence.
        steps: of the derivation.
        prompt: what the model reads.
        solution: what it should write, END left out.
        answer: the value of the solution's last line.
    """

    task: str
    index: int
    steps: int
    prompt: str
    solution: str
    answer: str

    @property
    def text(self) -> str:
        """All of it, as trained on."""
        return self.prompt + self.solution + END


# Fills in a problem of `steps` steps: (generator, steps) → (prompt, lines of the solution, answer).
Draw = Callable[[np.random.Generator, int], tuple[str, list[str], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A generator of problems.

    Attributes:
        name: what `--task` calls it.
        summary: one line for lists.
        fewest: steps of the shortest derivation.
        most: steps of the longest; lengths are even in log between the two.
        draw: makes a problem of given steps.
    """

    name: str
    summary: str
    fewest: int
    most: int
    draw: Draw

    def text_length(self, steps: int) -> int:
        """Bytes of a problem's text: every line of a task has one width."""
        short, long = (len(self.problem(0, 0, steps=n).text) for n in (1, 2))
        return short + (long - short) * (steps - 1)

    def problem(self, seed: int, index: int, *, steps: int | None = None) -> Problem:
        """Make problem `index` of a seed.

        Args:
            seed: 64-bit; training and evaluation use different ones.
            index: from 0, below 2^32.
            steps: of the derivation; drawn if None.
        """
        if not 0 <= seed < 2**64 or not 0 <= index < 2**32:
            raise ValueError(f"seed {seed} or index {index} is out of range")
        which = zlib.crc32(self.name.encode())
        # as uint64: a list with a value above 2^63 would become floats and lose the index
        key = np.array([seed, which << 32 | index], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        if steps is None:
            # n steps are as likely as [n, n + 1) is wide in log
            low, high = np.log(self.fewest), np.log(self.most + 1)
            steps = min(max(int(np.exp(generator.uniform(low, high))), self.fewest), self.most)
        prompt, lines, answer = self.draw(generator, steps)
        solution = "".join(f"{line}\n" for line in [*lines, ANSWER + answer])
        return Problem(
            task=self.name,
            index=index,
            steps=steps,
            prompt=prompt + ":\n",
            solution=solution,
            answer=answer,
        )


def extract(text: str) -> str | None:
    """Answer of an output: the value of the last complete line that begins with `answer `.

    Args:
        text: the output, END left out.

    Returns:
        The value, or None if there is none. A last line without its newline is cut off, and a
        prefix of the right value must not count.
    """
    for line in reversed(text.split("\n")[:-1]):
        if line.startswith(ANSWER):
            return line.removeprefix(ANSWER)
    return None


def grade(text: str, problem: Problem) -> bool:
    """Whether the output's answer is the problem's, character by character."""
    return extract(text) == problem.answer


def first_wrong_step(text: str, problem: Problem) -> int | None:
    """Index of the first line of an output that is not the worked solution's; None if all are.

    Args:
        text: the output, END left out.
        problem: whose solution it should be.
    """
    written, right = text.split("\n"), problem.solution.split("\n")
    for index, line in enumerate(right):
        if index >= len(written) or written[index] != line:
            return index
    return None if len(written) == len(right) else len(right)
