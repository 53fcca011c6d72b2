"""The run directory: what is in it, and writing it so that a kill or a full disk loses nothing.

    spec.json         what the study is, and what it resolved to; written before the first forward
    run.json          when it ran, under what, and how it ended
    parts/            rows as they are measured, one file a chunk; gone once the run is complete
    rows.parquet      all rows, sorted
    summary.csv       KL at N and its companions

Every file appears whole or not at all: written under another name, synced, then renamed.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from quantlab.errors import RunError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

_FULL = (errno.ENOSPC, errno.EDQUOT)


class RunDirectory:
    """A directory with one run.

    Args:
        path: the directory; created with `prepare`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = path / "parts"
        self.spec_file = path / "spec.json"
        self.run_file = path / "run.json"
        self.rows_file = path / "rows.parquet"
        self.summary_file = path / "summary.csv"

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.spec_file.exists()

    def prepare(self, *, resume: bool) -> None:
        """Create the directory, or accept the one that is there.

        Raises:
            UsageError: if it holds a run and `resume` is not asked for, holds something else, or
                cannot be created.
        """
        if self.exists and not resume:
            state = "finished" if self.finished else "unfinished"
            raise UsageError(
                f"{self.path} holds a run already ({state}): --resume goes on with it, another "
                "--out starts afresh"
            )
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--out {self.path} is a file; give a directory")
        if not self.exists and self.path.exists() and self._foreign():
            raise UsageError(
                f"--out {self.path} is not empty and holds no run ({self._foreign()[0]}, …): "
                "give a new directory"
            )
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _explain(error, self.path, wrong=UsageError) from error

    def discard_unstarted(self) -> None:
        """Remove what `prepare` made if no run has been written into it."""
        if not self.exists:
            with suppress(OSError):  # somebody's files, or nothing there
                self.sweep()
                self.parts.rmdir()
                self.path.rmdir()

    def _foreign(self) -> list[str]:
        ours = {self.parts, _temporary(self.spec_file)}
        return sorted(p.name for p in self.path.iterdir() if p not in ours)

    def sweep(self) -> None:
        """Remove what a kill left half written."""
        for folder in (self.path, self.parts):
            for path in folder.glob(_temporary(Path("*")).name):
                path.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out.

        Raises:
            RunError: if one is in already.
        """
        # The directory itself is the lock: no file is left behind, and none can go missing.
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(f"{self.path} is in use by another process") from error
            yield
        finally:
            os.close(handle)

    @property
    def finished(self) -> bool:
        """Whether the run here is complete."""
        return self.rows_file.exists() and self.read_json(self.run_file).get("state") == "finished"

    def read_json(self, path: Path) -> dict[str, Any]:
        """Read a JSON object; empty if the file is not there.

        Raises:
            RunError: if it is not JSON.
        """
        try:
            value = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise RunError(f"{path} is damaged: {error}") from error
        return dict(value)

    def write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        """Write a JSON object."""
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        self.write(path, text.encode("utf-8"))

    def write(self, path: Path, data: bytes) -> None:
        """Write a file atomically.

        Raises:
            RunError: if the disk is full, or the directory cannot be written.
        """
        temporary = _temporary(path)
        try:
            with temporary.open("wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
            temporary.replace(path)
            sync_directory(path.parent)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise _explain(error, path) from error

    def part_file(self, batch: int, first: int, last: int) -> Path:
        """Path of the part with positions first … last of a batch."""
        return self.parts / f"batch-{batch:04d}-{first:08d}-{last:08d}.parquet"

    def done_file(self, batch: int) -> Path:
        """Path of the mark that a batch is complete."""
        return self.parts / f"batch-{batch:04d}.done"

    def state_file(self, batch: int) -> Path:
        """Path of the engine's state within a batch."""
        return self.parts / f"batch-{batch:04d}.state.safetensors"

    def write_table(self, path: Path, table: pa.Table) -> None:
        """Write a Parquet file atomically; equal tables give equal bytes."""
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd")
        self.write(path, buffer.getvalue())

    def read_parts(self, batch: int | None = None) -> list[pa.Table]:
        """Rows measured so far, in the order of batches and positions.

        Raises:
            RunError: if a part is damaged.
        """
        prefix = "batch-" if batch is None else f"batch-{batch:04d}-"
        return [read_table(path) for path in sorted(self.parts.glob(f"{prefix}*.parquet"))]

    def drop_parts(self) -> None:
        """Remove the parts, once their rows are in `rows.parquet`."""
        for path in self.parts.glob("*"):
            path.unlink()
        if self.parts.exists():
            self.parts.rmdir()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def read_table(path: Path) -> pa.Table:
    """Read a Parquet file.

    Raises:
        RunError: if it is missing or damaged.
    """
    try:
        # a plain file, not a data set: no partition columns guessed from directory names
        return pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path} cannot be read: {error}") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write an engine's state atomically; return what went wrong, empty if nothing."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # clones: the file format refuses tensors that share memory
        save_file({name: t.detach().cpu().clone() for name, t in tensors.items()}, temporary)
        with temporary.open("rb+") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        return str(error)
    return ""


def sync_directory(path: Path) -> None:
    """Make a rename last across a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _explain(
    error: OSError, path: Path, *, wrong: type[UsageError] | type[RunError] = RunError
) -> RunError | UsageError:
    if error.errno in _FULL:
        return RunError(
            f"no space left on the disk while writing {path}: what was measured before is kept; "
            "free some space and run the same command with --resume"
        )
    return wrong(f"cannot write {path}: {error.strerror or error}")
