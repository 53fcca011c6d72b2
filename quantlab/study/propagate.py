"""Run a watched decoding and record how its stored states drift.

A directory of such a run holds

    spec.json           what was asked for and what it resolved to
    run.json            when it ran, under what, and how it ended
    parts/              tables of the streams done; gone once the run is complete
    rows.parquet        one row a policy, stream, layer, head and observation
    heads.parquet       one row a policy, stream, layer and head
    units.parquet       one row a unit that decays on its own
    geometry.parquet    size of state and error by key channel and by value row
    ranges.parquet      what every observed store clipped, flushed and kept as a subnormal
    tokens.parquet      KL and NLL of the first and last positions, as rows of a KL study
    propagation.csv     one line a policy

Streams are run one by one, so that a killed run goes on with the first that is not done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from quantlab.analysis.propagation import first_positions, propagation_summary
from quantlab.data import check_data
from quantlab.errors import UsageError
from quantlab.metrics.positions import window
from quantlab.study.backend import Backend
from quantlab.study.progress import Progress, Silent
from quantlab.study.provenance import provenance
from quantlab.study.rows import chunk_rows
from quantlab.study.run import open_streams
from quantlab.study.session import Interrupted
from quantlab.study.spec import KlSpec, differences
from quantlab.study.store import RunDirectory, read_table

POLICIES = ("conventional:int6@row", "conventional:int8@row", "shared:nvfp4", "shared:nvfp4-sr")
# Observations of a run where --every does not say: each costs a few passes in FP64.
OBSERVATIONS = 128
TABLES = ("rows", "heads", "units", "geometry", "ranges", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagation:
    """A watched run.

    Attributes:
        path: its directory.
        spec: what was asked for.
        every: tokens between observations.
        record: spec.json.
        tables: by name, see the module.
        summary: one row a policy (`quantlab.analysis.propagation.PROPAGATION_SCHEMA`).
    """

    path: Path
    spec: KlSpec
    every: int
    record: dict[str, Any]
    tables: dict[str, pa.Table]
    summary: pa.Table


def stride_of(spec: KlSpec, every: int | None = None) -> int:
    """Tokens between observations: a multiple of every window.

    Args:
        spec: the study.
        every: at least so many, rounded up; None for about 128 observations.

    Raises:
        UsageError: nothing would be observed.
    """
    step = math.lcm(*(policy.window for policy in spec.policies))
    wanted = -(-spec.tokens // OBSERVATIONS) if every is None else every
    stride = -(-wanted // step) * step
    if stride > spec.tokens:
        raise UsageError(
            f"--tokens {spec.tokens}: the first observation, where all windows end, comes after "
            f"{stride} tokens"
        )
    return stride


def default_directory(spec: KlSpec, every: int) -> Path:
    """`runs/propagate-MODEL-N-HASH`: the same run finds itself again."""
    model = Path(spec.model).name.lower()
    return Path("runs") / f"propagate-{model}-{spec.tokens}-{every}-{spec.digest()}"


def run_propagation(
    spec: KlSpec,
    out: Path | str,
    *,
    every: int | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    backend: Backend | None = None,
    command: Sequence[str] | None = None,
) -> Propagation:
    """Decode with every policy under watch, into a run directory.

    Args:
        spec: model, policies, streams and N; the engine is the windowed one.
        out: the run directory.
        every: see `stride_of`.
        resume: go on with the run that is there, if any.
        progress: told how far it is.
        backend: models.
        command: recorded as how this was started.

    Raises:
        UsageError: the directory holds another run, or the spec does not fit model or data.
        MissingAsset, RunError: as a KL study.
        Interrupted: on SIGINT; resuming goes on.
    """
    progress, backend = progress or Silent(), backend or Backend()
    partial = [p.short for p in spec.policies if p.part is not None]
    if partial:
        raise UsageError(f"a watched run stores every head in a policy's formats: {partial[0]}")
    stride = stride_of(spec, every)
    directory = RunDirectory(Path(out))
    check_data(spec.data)
    directory.prepare(resume=resume)
    with directory.locked():
        directory.sweep()
        asked = {"study": "propagate", "spec": spec.to_json(), "every": stride}
        recorded = directory.read_json(directory.spec_file)
        if recorded:
            found = differences({k: recorded.get(k) for k in asked}, asked)
            if found:
                raise UsageError(f"{directory.path} holds another run: {found}")
            if directory.finished:
                progress.note(f"{directory.path} is finished already: nothing to compute")
                return load_propagation(directory.path)
        begun = time.monotonic()
        session = {"started": _now(), "command": list(command or ())}
        earlier = list(directory.read_json(directory.run_file).get("sessions", []))

        def end(state: str) -> None:
            record = {**session, "ended": _now(), "seconds": round(time.monotonic() - begun, 1)}
            value = {"state": state, "sessions": [*earlier, record]}
            directory.write_json(directory.run_file, value)

        try:
            _run(directory, spec, stride, asked, progress, backend)
        except KeyboardInterrupt:
            if directory.exists:
                end("interrupted")
            directory.discard_unstarted()
            raise Interrupted(
                f"interrupted; streams that were done are in {directory.path}, and the same "
                "command with --resume goes on"
            ) from None
        except BaseException:
            directory.discard_unstarted()
            raise
        end("finished")
    result = load_propagation(directory.path)
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(result.summary, sink)
    directory.write(directory.path / "propagation.csv", sink.getvalue().to_pybytes())
    directory.drop_parts()
    return result


def load_propagation(path: Path | str) -> Propagation:
    """Read a run; of an unfinished one, the streams that are done.

    Raises:
        UsageError: it holds none, or none of its streams is done.
        RunError: a file in it is damaged.
    """
    directory = RunDirectory(Path(path))
    record = directory.read_json(directory.spec_file)
    if record.get("study") != "propagate":
        raise UsageError(f"{path} holds no run of quantlab propagate")
    spec = KlSpec.from_json(record["spec"])
    if directory.rows_file.exists():
        tables = {name: read_table(directory.path / f"{name}.parquet") for name in TABLES}
    else:
        done = [s for s in range(len(record["data"]["streams"])) if _done(directory, s)]
        if not done:
            raise UsageError(f"{path}: no stream of this run is done yet")
        tables = {name: _joined(directory, done, name) for name in TABLES}
    return Propagation(
        path=directory.path,
        spec=spec,
        every=record["every"],
        record=record,
        tables=tables,
        summary=propagation_summary(tables, spec.tokens),
    )


def _run(
    directory: RunDirectory,
    spec: KlSpec,
    stride: int,
    asked: dict[str, Any],
    progress: Progress,
    backend: Backend,
) -> None:
    m, streams = open_streams(spec, backend)
    record = {
        **asked,
        "model": m.identity,
        "data": streams.provenance(),
        "self_test": backend.self_test(m),
        "segment": backend.plan(m, spec, 1).segment,
        "made_with": provenance(spec.device),
    }
    recorded = directory.read_json(directory.spec_file)
    if recorded:
        found = differences({"data": recorded["data"]}, {"data": record["data"]})
        if found:
            raise UsageError(f"{directory.path} holds a run on other data: {found}")
    else:
        directory.write_json(directory.spec_file, record)
    count = len(streams.streams)
    waiting = [s for s in range(count) if not _done(directory, s)]
    progress.start(spec.tokens * count, spec.tokens * (count - len(waiting)))
    for position, stream in enumerate(waiting):
        before = spec.tokens * (count - len(waiting) + position)
        tables = _stream(m, spec, streams, stream, stride, record["segment"], progress, before)
        for name in TABLES:  # the last one marks the stream as done
            directory.write_table(_part(directory, stream, name), tables[name])
    for name in reversed(TABLES):  # rows.parquet, which marks the run as done, last
        table = _joined(directory, range(count), name)
        directory.write_table(directory.path / f"{name}.parquet", table)


def _stream(
    m: Any,
    spec: KlSpec,
    streams: Any,
    stream: int,
    stride: int,
    segment: int,
    progress: Progress,
    before: int,
) -> dict[str, pa.Table]:
    """Watch one stream, all policies at once."""
    from quantlab.analysis.observer import observed
    from quantlab.analysis.profile import profile
    from quantlab.engine import TeacherForcing
    from quantlab.engine.teacher_forcing import scan_class
    from quantlab.metrics.divergence import compare
    from quantlab.metrics.repetitions import kl_of_means
    from quantlab.replay.seeded import by_seed

    device = next(m.model.parameters()).device
    build, scans = observed(by_seed(scan_class("windowed", device)), stride=stride)
    forcing = TeacherForcing(
        m,
        streams.tokens[[stream]],
        policies=spec.policies,
        stream_ids=[stream],
        positions=[*first_positions(spec.tokens), *window(spec.tokens)],
        prompt=spec.prompt,
        segment=segment,
        seed=spec.seed,
        scan=build,
    )
    measured = [
        chunk_rows(
            spec,
            compare(x.logits, x.targets),
            kl_of_means=kl_of_means(x.logits, spec.repetitions),
            positions=x.positions,
            diverged_at=x.diverged_at[1:],
            streams=[stream],
            stream_names=[streams.streams[stream].name],
        )
        for x in forcing.run(lambda done, _: progress.advance(before + done))
    ]
    tables = profile(scans, forcing.policies, stream)
    tables["rows"] = tables.pop("series")
    tables["tokens"] = pa.concat_tables(measured)
    return tables


def _done(directory: RunDirectory, stream: int) -> bool:
    return _part(directory, stream, TABLES[-1]).exists()


def _joined(directory: RunDirectory, streams: Sequence[int], name: str) -> pa.Table:
    """Join a table's parts of some streams."""
    parts = [read_table(_part(directory, s, name)) for s in streams]
    return pa.concat_tables(parts).unify_dictionaries().combine_chunks()


def _part(directory: RunDirectory, stream: int, name: str) -> Path:
    return directory.parts / f"stream-{stream:04d}-{name}.parquet"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
