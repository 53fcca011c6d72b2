"""From a model's output to its answer: thinking apart, last complete box, last stated letter.

Nothing here guesses: an output without a finished answer has none, and counts as wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# after "answer", "answer is" or "answer:", the letter bare or within (), **, $ or \\text{}
_LETTER = re.compile(
    r"answer\s*(?:is)?\s*:?\s*(?:\\text\{|[\s(*$\[])*([A-Z])(?![A-Za-z])", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How a chat template marks the reasoning.

    Attributes:
        open: opening tag.
        close: closing tag.
        opened: the rendered prompt ends inside the reasoning, so outputs have no opening tag.
    """

    open: str
    close: str
    opened: bool


# Tags in use: Qwen3.5, Nemotron 3 and DeepSeek; Magistral; Seed-OSS. The template at hand decides.
TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def thinking_of(template: str | None, prompt: str) -> Thinking | None:
    """Read off a chat template how reasoning is marked.

    Args:
        template: the tokenizer's chat template, or None.
        prompt: a rendered prompt, up to where the model writes.

    Returns:
        The marks, or None where the template knows no reasoning.
    """
    for opening, closing in TAGS:
        if template is not None and closing in template:
            opened = prompt.rfind(opening) > prompt.rfind(closing)
            return Thinking(open=opening, close=closing, opened=opened)
    return None


def final_text(output: str, thinking: Thinking | None) -> str | None:
    """Cut off the reasoning.

    Args:
        output: the model's.
        thinking: of its chat template.

    Returns:
        The text after the last closing tag; all of it where no reasoning was begun; None where
        the reasoning never ended: what it says on the way is not an answer.
    """
    if thinking is None:
        return output
    before, closed, after = output.rpartition(thinking.close)
    if closed:
        return after
    return None if thinking.opened or thinking.open in before + after else output


def last_box(text: str) -> str | None:
    r"""Content of the last complete \boxed{…}, braces balanced; None without one.

    A self-corrected answer is the last one, and equal boxes are never joined.
    """
    for match in reversed(list(BOX.finditer(text))):
        content = _balanced(text, match.end())
        if content is not None:
            return content.strip()
    return None


def _balanced(text: str, start: int) -> str | None:
    """Text from `start` to the brace that closes the group it is in."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 2  # an escaped brace opens and closes nothing
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
        at += 1
    return None


def last_letter(text: str, options: int) -> str | None:
    """Letter of the option that the text settles on: the last `answer … X`, else a boxed letter.

    Args:
        text: without the reasoning.
        options: how many there are; a letter beyond them is none.
    """
    known = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:options]
    stated = [m[1].upper() for m in _LETTER.finditer(text) if m[1] in known]
    if stated:
        return stated[-1]
    box = last_box(text) or ""
    inside = re.fullmatch(r"(?:\\text(?:bf)?\{)?\(?([A-Z])\)?\}?", box)
    return inside[1] if inside and inside[1] in known else None
