"""What every study that can be resumed shares: its sessions in run.json, and what must not change.

A run directory may be gone on with only as what it is: the same spec, data and model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from quantlab.errors import QuantlabError, RunError, UsageError
from quantlab.study.progress import Progress
from quantlab.study.provenance import provenance
from quantlab.study.spec import differences
from quantlab.study.store import RunDirectory


class Interrupted(QuantlabError):
    """The user stopped a run that can go on."""

    exit_code = 130


class Session:
    """One stretch of computing, as recorded in run.json.

    Args:
        directory: of the run.
        progress: of the study.
        command: how it was started.
    """

    def __init__(
        self, directory: RunDirectory, progress: Progress, command: Sequence[str] | None
    ) -> None:
        self.directory, self.progress = directory, progress
        self.clock = time.monotonic()
        self.earlier: list[Any] = list(directory.read_json(directory.run_file).get("sessions", []))
        self.record: dict[str, Any] = {
            "started": _now(),
            "command": list(command or ()),
        }

    def begin(self, device: str) -> None:
        """Record under what it runs, once that is known."""
        self.record["made_with"] = provenance(device)
        self._write("running", [])

    def end(self, state: str, failed: Sequence[dict[str, Any]] = ()) -> None:
        """Record how it ended; a disk that is full must not hide the error that said so."""
        seconds = round(time.monotonic() - self.clock, 1)
        self.record |= {"ended": _now(), "seconds": seconds, "state": state}
        if "made_with" in self.record:  # else nothing has been started
            with suppress(RunError):
                self._write(state, failed)

    def _write(self, state: str, failed: Sequence[dict[str, Any]]) -> None:
        sessions = [*self.earlier, self.record]
        value = {"state": state, "failed": list(failed), "sessions": sessions}
        self.directory.write_json(self.directory.run_file, value)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def require_same(directory: RunDirectory, what: str, recorded: Any, now: Any) -> None:
    """Refuse to go on with a run that is another one.

    Raises:
        UsageError: naming what differs.
    """
    found = differences(recorded, now)
    if found:
        raise UsageError(
            f"{directory.path} holds a run with another {what}, so it cannot be resumed as this "
            f"one: {found}"
        )


def require_same_model(
    directory: RunDirectory, recorded: dict[str, Any], now: dict[str, Any]
) -> None:
    """Refuse to go on with another model; where its files lie may change.

    Raises:
        UsageError: naming what differs.
    """
    ignored = ("path", "name")
    require_same(
        directory,
        "model",
        {k: v for k, v in recorded.items() if k not in ignored},
        {k: v for k, v in now.items() if k not in ignored},
    )
