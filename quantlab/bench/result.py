"""What a benchmark writes: one JSON document, the same as its last line."""

from __future__ import annotations

import datetime
import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantlab.bench.measure import Row
from quantlab.errors import RunError
from quantlab.study.provenance import provenance

SCHEMA = 1
BENCHES = ("casts", "scan", "engine", "agreement", "decode", "generation")
STATUSES = ("ok", "refused", "absent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A benchmark's rows and under what they were measured.

    Attributes:
        bench: one of BENCHES.
        measurement: False for a self-test of the harness, which `verify` does not look at.
        command: the command line.
        time: UTC, ISO 8601.
        sizes: elements, rows, tokens, repeats.
        where: versions, revision, device, driver.
        rows: what was measured.
    """

    bench: str
    measurement: bool
    command: str
    time: str
    sizes: dict[str, Any]
    where: dict[str, Any]
    rows: tuple[Row, ...]

    def document(self) -> dict[str, Any]:
        """JSON values: numbers that are not finite become null."""
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            row["values"] = {k: v if math.isfinite(v) else None for k, v in row["values"].items()}
        return (
            {"schema": SCHEMA}
            | {k: v for k, v in asdict(self).items() if k != "rows"}
            | {"rows": rows}
        )

    def row(self, name: str) -> Row | None:
        """Find a row by name."""
        return next((row for row in self.rows if row.name == name), None)


def new_result(
    bench: str, rows: Sequence[Row], *, device: str, command: str, sizes: dict[str, Any]
) -> Result:
    """Describe what was just measured."""
    return Result(
        bench=bench,
        measurement=device.startswith("cuda"),
        command=command,
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        sizes=sizes,
        where=provenance(device) | {"driver": _driver() if device.startswith("cuda") else None},
        rows=tuple(rows),
    )


def write_result(result: Result, path: Path) -> None:
    """Write a result, whole or not at all.

    Raises:
        RunError: if it cannot be written.
    """
    text = json.dumps(result.document(), indent=1, ensure_ascii=False) + "\n"
    partial = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, "utf-8")
        partial.replace(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}") from error


def read_result(path: Path) -> Result:
    """Read what `write_result` wrote.

    Raises:
        RunError: it is not a result.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is not a benchmark result: {error}") from error
    fault = document_fault(found)
    if fault is not None:
        raise RunError(f"{path} is not a benchmark result: {fault}")
    rows = tuple(
        Row(
            name=row["name"],
            status=row["status"],
            reason=row["reason"],
            values={k: math.nan if v is None else float(v) for k, v in row["values"].items()},
        )
        for row in found["rows"]
    )
    names = ("bench", "measurement", "command", "time", "sizes", "where")
    return Result(rows=rows, **{name: found[name] for name in names})


def document_fault(found: Any) -> str | None:
    """Say what keeps a JSON value from being a result, or None."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        return f"expected an object with schema {SCHEMA}"
    types = {"bench": str, "measurement": bool, "command": str, "time": str}
    types |= {"sizes": dict, "where": dict, "rows": list}
    for name, kind in types.items():
        if not isinstance(found.get(name), kind):
            return f"{name} must be of type {kind.__name__}"
    if found["bench"] not in BENCHES:
        return f"bench must be one of {', '.join(BENCHES)}"
    for row in found["rows"]:
        if not isinstance(row, dict) or set(row) != {"name", "status", "reason", "values"}:
            return "a row has name, status, reason and values"
        if row["status"] not in STATUSES or not isinstance(row["values"], dict):
            return f"row {row['name']!r}: status is one of {', '.join(STATUSES)}"
        if row["status"] != "ok" and row["values"]:
            return f"row {row['name']!r}: {row['status']}, and yet it has figures"
        numbers = [v for v in row["values"].values() if v is not None]
        if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in numbers):
            return f"row {row['name']!r}: values are numbers or null"
    return None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip().splitlines()[0] if run.stdout.strip() else None
