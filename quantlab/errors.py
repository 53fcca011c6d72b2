"""What a user may have to act on, each kind with its process exit code.

The command line prints the message of a QuantlabError, without a traceback, and exits with its
code. Anything else that escapes is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

from typing import ClassVar


class QuantlabError(Exception):
    """Base of every error whose message is written for the user."""

    exit_code: ClassVar[int] = 1


class UsageError(QuantlabError):
    """A name, option or input that cannot work as given; nothing has been started."""

    exit_code: ClassVar[int] = 2


class MissingAsset(QuantlabError):
    """A checkpoint, data file or package that is not here and cannot be fetched now."""

    exit_code: ClassVar[int] = 5


class RunError(QuantlabError):
    """Work that was well specified and failed."""

    exit_code: ClassVar[int] = 1
