"""How a study tells its caller where it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """What a study reports to; the command line draws a bar from it."""

    def start(self, total: int, done: int) -> None:
        """Say how much there is to do, in stream tokens, and how much a resumed run has done."""

    def advance(self, done: int) -> None:
        """Say how much is done by now, in stream tokens."""

    def note(self, text: str) -> None:
        """Say something that the user should know, one line."""


class Silent:
    """Report nothing."""

    def start(self, total: int, done: int) -> None:
        """Ignore."""

    def advance(self, done: int) -> None:
        """Ignore."""

    def note(self, text: str) -> None:
        """Ignore."""
