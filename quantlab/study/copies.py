"""Change the read format alone, and see whether the recurrence copy stays the same bit for bit.

Twice: of one layer on recorded op inputs, the same for all policies, over a long text; and in
the model, where from the second recurrent layer on each policy has inputs of its own, which feel
what was read before. A directory of such a study holds

    spec.json         what was asked for and what it resolved to
    run.json          when it ran and how it ended
    parts/            either part once it is done; gone once both are
    rows.parquet      see `analysis.copies.COPIES_SCHEMA`
    copies.csv        the same
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv

from quantlab.analysis.copies import COPIES_SCHEMA, ComparedScan, compared_policies
from quantlab.data import check_data
from quantlab.errors import UsageError
from quantlab.study.backend import Backend
from quantlab.study.progress import Progress, Silent
from quantlab.study.provenance import provenance
from quantlab.study.run import open_streams
from quantlab.study.session import Interrupted, Session
from quantlab.study.spec import KlSpec, differences
from quantlab.study.store import RunDirectory, read_table

if TYPE_CHECKING:
    from torch import Tensor

    from quantlab.models import LoadedModel

READS = ("nvfp4", "fp8", "fp16", "int8@row")
WAYS = ("rederive", "fold")
PARTS = ("recorded", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesStudy:
    """What is compared.

    Attributes:
        spec: model, data, prompt, seed and device; `tokens` are those of recorded inputs.
        reads: formats of the read copy.
        recur: of the recurrence copy.
        layer: whose inputs are recorded.
        in_model: tokens decoded in the model; 0 to leave that out.
    """

    spec: KlSpec
    reads: tuple[str, ...] = READS
    recur: str = "fp16-sr"
    layer: int = 0
    in_model: int = 1024

    def __post_init__(self) -> None:
        window = self.spec.policies[0].window
        if len(self.reads) < 2:
            raise UsageError("--read: two formats or more are compared")
        for name, tokens in (("--tokens", self.spec.tokens), ("--in-model", self.in_model)):
            if 0 < tokens < window:
                raise UsageError(f"{name} {tokens} is less than a window of {window}")

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "study": "copies",
            "spec": self.spec.to_json(),
            "reads": list(self.reads),
            "recur": self.recur,
            "layer": self.layer,
            "in_model": self.in_model,
        }


def copies_spec(
    model: str, *, reads: Sequence[str], recur: str, window: int, **others: Any
) -> KlSpec:
    """Build the spec of one stream under all policies."""
    from quantlab.study.build import build_spec

    policies = compared_policies(reads, recur, WAYS, window)
    return build_spec(model, policies, floor=False, streams=1, **others)


def default_directory(study: CopiesStudy) -> Path:
    """`runs/copies-MODEL-N-HASH`."""
    spec = study.spec
    name = f"copies-{Path(spec.model).name.lower()}-{spec.tokens}-{study.layer}-{study.in_model}"
    return Path("runs") / f"{name}-{spec.digest()}"


def run_copies(
    study: CopiesStudy,
    out: Path | str,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    backend: Backend | None = None,
    command: Sequence[str] | None = None,
) -> pa.Table:
    """Compare recurrence copies, into a run directory.

    Args:
        study: what is compared.
        out: the run directory.
        resume: go on with the run that is there, if any; a part that was begun begins again.
        progress: told how far it is, in tokens of both parts.
        backend: models.
        command: recorded as how this was started.

    Returns:
        rows.parquet.

    Raises:
        UsageError: the directory holds another run, or the study does not fit model or data.
        MissingAsset, RunError: as a KL study.
        Interrupted: on SIGINT; resuming goes on.
    """
    progress, backend = progress or Silent(), backend or Backend()
    directory = RunDirectory(Path(out))
    check_data(study.spec.data)
    directory.prepare(resume=resume)
    with directory.locked():
        directory.sweep()
        asked = study.to_json()
        recorded = directory.read_json(directory.spec_file)
        found = differences({k: recorded.get(k) for k in asked}, asked) if recorded else ""
        if found:
            raise UsageError(f"{directory.path} holds another run: {found}")
        if directory.finished:
            progress.note(f"{directory.path} is finished already: nothing to compute")
            return read_table(directory.rows_file)
        session = Session(directory, progress, command)
        try:
            _run(directory, study, asked, session, backend)
        except KeyboardInterrupt:
            session.end("interrupted")
            directory.discard_unstarted()
            raise Interrupted(
                f"interrupted; parts that were done are in {directory.path}, and the same command "
                "with --resume goes on"
            ) from None
        except BaseException:
            directory.discard_unstarted()
            raise
        session.end("finished")
    directory.drop_parts()
    return read_table(directory.rows_file)


def _run(
    directory: RunDirectory,
    study: CopiesStudy,
    asked: dict[str, Any],
    session: Session,
    backend: Backend,
) -> None:
    progress = session.progress
    longest = max(study.spec.tokens, study.in_model)
    m, streams = open_streams(replace(study.spec, tokens=longest), backend)
    if not 0 <= study.layer < m.layers:
        raise UsageError(
            f"--layer {study.layer}: {study.spec.model} has recurrent layers 0 … {m.layers - 1}"
        )
    record = {
        **asked,
        "model": m.identity,
        "data": streams.provenance(),
        "self_test": backend.self_test(m),
        "segment": backend.plan(m, study.spec, 1).segment,
        "made_with": provenance(study.spec.device),
    }
    recorded = directory.read_json(directory.spec_file)
    found = differences({"data": recorded["data"]}, {"data": record["data"]}) if recorded else ""
    if found:
        raise UsageError(f"{directory.path} holds a run on other data: {found}")
    if not recorded:
        directory.write_json(directory.spec_file, record)
    session.begin(study.spec.device)
    lengths = {"recorded": study.spec.tokens, "model": study.in_model}
    paths = {name: directory.parts / f"{name}.parquet" for name in PARTS}
    done = sum(lengths[name] for name in PARTS if paths[name].exists())
    progress.start(sum(lengths.values()), done)
    for name, measure in (("recorded", _on_recorded), ("model", _in_model)):
        if paths[name].exists() or not lengths[name]:
            continue
        before = done

        def advance(tokens: int, before: int = before) -> None:
            progress.advance(before + tokens)

        rows = measure(m, study, streams.tokens, record["segment"], advance)
        directory.write_table(paths[name], pa.Table.from_pylist(rows, schema=COPIES_SCHEMA))
        done += lengths[name]
    tables = [read_table(path) for path in paths.values() if path.exists()]
    table = pa.concat_tables(tables).combine_chunks()
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink)
    directory.write(directory.path / "copies.csv", sink.getvalue().to_pybytes())
    directory.write_table(directory.rows_file, table)


def _on_recorded(
    m: LoadedModel, study: CopiesStudy, tokens: Tensor, segment: int, advance: Any
) -> list[dict[str, Any]]:
    """Feed one layer's op inputs to all policies as they are recorded."""
    import torch

    from quantlab.engine.teacher_forcing import scan_class
    from quantlab.study.tap import tapped

    spec, device = study.spec, m.device
    window = spec.policies[0].window
    inner = scan_class("windowed", device)
    scans = [
        ComparedScan(
            compared_policies(study.reads, study.recur, [way], window),
            torch.tensor([0], device=device), layer=study.layer, seed=spec.seed, inner=inner,
        )
        for way in WAYS
    ]  # fmt: skip
    count = len(study.reads)
    rows = torch.zeros(count, dtype=torch.int64, device=device)
    last = spec.tokens - spec.tokens % window
    heads, going, done = m.recurrent_shapes[study.layer][0], list(scans), 0
    for state, inputs in tapped(
        m, tokens[:, : spec.prompt + last], layer=study.layer, prompt=spec.prompt, segment=segment
    ):
        many = inputs.rows(rows)
        for scan in going:
            if done == 0:
                scan.start(state[rows], many)
            scan(many)
        # once all have differed there is nothing left to learn
        going = [s for s in going if bool((s.first[1:] < 0).any())]
        done += inputs.steps
        advance(done)
        if not going:
            break
    return [row for scan in scans for row in scan.rows("recorded", heads)]


def _in_model(
    m: LoadedModel, study: CopiesStudy, tokens: Tensor, segment: int, advance: Any
) -> list[dict[str, Any]]:
    """Decode all policies in one batch."""
    from quantlab.engine import TeacherForcing
    from quantlab.engine.teacher_forcing import scan_class

    spec = study.spec
    inner = scan_class("windowed", m.device)
    last = study.in_model - study.in_model % spec.policies[0].window
    built: list[ComparedScan] = []

    def build(policies: Any, streams: Any, **keys: Any) -> ComparedScan:
        built.append(ComparedScan(policies, streams, inner=inner, skip=1, **keys))
        return built[-1]

    forcing = TeacherForcing(
        m, tokens[:, : spec.prompt + last + 1], policies=spec.policies, stream_ids=[0],
        positions=[last], prompt=spec.prompt, segment=segment, seed=spec.seed, scan=build,
    )  # fmt: skip
    for _ in forcing.run(lambda done, _: advance(done)):
        pass
    return [
        row
        for scan, (heads, _, _) in zip(built, m.recurrent_shapes, strict=True)
        for row in scan.rows("model", heads)
    ]
