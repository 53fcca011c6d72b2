"""Running, killing and resuming a study, with a stand-in engine."""

import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from quantlab.errors import RunError, UsageError
from quantlab.metrics.positions import lengths, measured_positions
from quantlab.study.result import load_result
from quantlab.study.rows import SCHEMA, SCHEMA_VERSION
from quantlab.study.run import Interrupted, run_kl
from quantlab.study.store import RunDirectory
from tests.study.fake import FakeBackend, make_spec

ROOT = Path(__file__).parents[2]


class Killed(BaseException):
    """What SIGKILL looks like from inside: nothing gets to clean up after it."""


def kill_at(event, count):
    """A hook that kills the run at the count-th `event`."""
    seen = 0

    def hook(name, t):
        nonlocal seen
        seen += name == event
        if seen == count and name == event:
            raise Killed

    return hook


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "unbroken"
    return run_kl(make_spec(), out, backend=FakeBackend())


def rows_bytes(result):
    return (result.path / "rows.parquet").read_bytes()


def test_rows_are_complete_sorted_and_documented(unbroken):
    table = pq.read_table(unbroken.path / "rows.parquet")
    spec, positions = make_spec(), measured_positions(400)
    assert table.num_rows == 4 * 3 * len(positions)
    assert table.schema.equals(SCHEMA)
    assert table.schema.metadata[b"quantlab.schema"].decode() == SCHEMA_VERSION
    assert json.loads(table.schema.metadata[b"quantlab.spec"]) == spec.to_json()
    assert all(field.metadata[b"meaning"] for field in table.schema)
    for name in ("model", "policy", "stream", "position", "kl", "nll", "nll_reference"):
        assert table[name].null_count == 0
    policies = [str(p) for p in spec.policies]
    keys = list(
        zip(
            (policies.index(p) for p in table["policy"].to_pylist()),
            table["stream"].to_pylist(),
            table["position"].to_pylist(),
            strict=True,
        )
    )
    assert keys == [(p, s, t) for p in range(4) for s in range(3) for t in positions]
    assert set(table["stream_name"].to_pylist()) == {"armadale", "lord-jim", "nostromo"}


def test_reference_nll_is_the_same_for_every_policy(unbroken):
    nll = unbroken.rows["nll_reference"].to_numpy().reshape(4, -1)
    assert (nll == nll[0]).all() and np.isfinite(nll).all()


def test_diverged_stream_is_marked_from_its_position_on(unbroken):
    table = unbroken.rows
    where = (
        (np.asarray(table["policy"].to_pylist()) == str(make_spec().policies[1]))
        & (table["stream"].to_numpy() == 1)
        & (table["position"].to_numpy() >= 200)
    )
    diverged = table["diverged"].to_numpy()
    assert (diverged == where).all() and where.any()
    assert (np.isnan(table["kl"].to_numpy()) == where).all()
    assert (np.isnan(table["nll"].to_numpy()) == where).all()
    assert not table["top1_agrees"].to_numpy()[where].any()
    assert "div." in str(unbroken)


def test_directory_of_a_finished_run(unbroken):
    names = sorted(p.name for p in unbroken.path.iterdir())
    assert names == ["rows.parquet", "run.json", "spec.json", "summary.csv"]
    record = json.loads((unbroken.path / "spec.json").read_text())
    assert record["spec"]["policies"][0] == "shared:float32"
    assert record["plan"]["stream_batches"] == [[0], [1], [2]] and record["plan"]["segment"] == 64
    assert record["lengths"] == list(lengths(400))
    assert len(record["data"]["streams"]) == 3
    assert len(record["data"]["streams"][0]["tokens_sha256"]) == 64
    assert {"versions", "git", "platform", "device"} <= set(record["made_with"])
    assert record["model"] == {"sha256": "abc", "torch": "2"}
    run = json.loads((unbroken.path / "run.json").read_text())
    assert run["state"] == "finished" and run["sessions"][0]["seconds"] >= 0
    assert unbroken.finished and not unbroken.failed


def test_summary_is_of_the_rows(unbroken):
    point = unbroken.summary.to_pylist()[0]
    kl = unbroken.rows["kl"].to_numpy().reshape(4, 3, -1)
    assert point["n"] == 16 and point["kl"] == pytest.approx(kl[0, :, :16].mean(), rel=1e-12)
    assert point["floor"] == point["kl"]


def test_same_spec_gives_the_same_bytes(unbroken, tmp_path):
    again = run_kl(make_spec(), tmp_path / "again", backend=FakeBackend())
    assert rows_bytes(again) == rows_bytes(unbroken)


def test_batches_do_not_change_the_rows_of_this_engine(unbroken, tmp_path):
    # of the stand-in, whose rows do not depend on their batch: parts are put together right
    wide = run_kl(make_spec(), tmp_path / "wide", backend=FakeBackend(batch=2))
    assert rows_bytes(wide) == rows_bytes(unbroken)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e9])
def test_killed_anywhere_and_resumed_gives_the_same_bytes(
    unbroken, tmp_path, seed, checkpoint_seconds
):
    rng = random.Random(f"{seed} {checkpoint_seconds}")
    out = tmp_path / "run"
    kills = 0
    for _ in range(3):  # killed up to three times in a row
        event, count = rng.choice([("measure", 24), ("segment", 12)])
        backend = FakeBackend(kill_at(event, rng.randint(1, count)))
        try:
            result = run_kl(
                make_spec(),
                out,
                resume=True,
                backend=backend,
                checkpoint_seconds=checkpoint_seconds,
            )
            break
        except Killed:
            kills += 1
    else:
        result = run_kl(make_spec(), out, resume=True, backend=FakeBackend())
    assert kills
    assert rows_bytes(result) == rows_bytes(unbroken)
    assert not (out / "parts").exists()


class Renames:
    """os.replace that counts, and dies right before or right after the point-th call."""

    real = staticmethod(os.replace)

    def __init__(self, point=0, after=False):
        self.point, self.after, self.count = point, after, 0

    def __call__(self, source, target, **kwargs):
        self.count += 1
        if self.count == self.point and not self.after:
            raise Killed
        self.real(source, target, **kwargs)
        if self.count == self.point:
            raise Killed


def test_killed_between_any_two_writes(tmp_path, monkeypatch):
    spec = make_spec(tokens=20, streams=2)
    counter = Renames()
    monkeypatch.setattr(os, "replace", counter)
    whole = run_kl(spec, tmp_path / "whole", backend=FakeBackend(), checkpoint_seconds=0)
    assert counter.count > 8
    for point in range(1, counter.count + 1):
        for after in (False, True):
            out = tmp_path / f"{point}-{after}"
            monkeypatch.setattr(os, "replace", Renames(point, after))
            with pytest.raises(Killed):
                run_kl(spec, out, backend=FakeBackend(), checkpoint_seconds=0)
            monkeypatch.setattr(os, "replace", Renames.real)
            resumed = run_kl(spec, out, resume=True, backend=FakeBackend())
            assert rows_bytes(resumed) == rows_bytes(whole)
            assert sorted(p.name for p in out.iterdir()) == [
                "rows.parquet",
                "run.json",
                "spec.json",
                "summary.csv",
            ]


SLOW_RUN = """
import sys, time
from quantlab.study.run import run_kl
from tests.study.fake import FakeBackend, make_spec
run_kl(make_spec(), sys.argv[1], resume=True, checkpoint_seconds=0,
       backend=FakeBackend(lambda event, t: time.sleep(0.05)))
"""


def test_sigkill_of_a_real_process(unbroken, tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", SLOW_RUN, str(out)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while len(list(out.glob("parts/*.parquet"))) < 10 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (out / "rows.parquet").exists() and len(list(out.glob("parts/*.parquet"))) >= 10
    result = run_kl(make_spec(), out, resume=True, backend=FakeBackend())
    assert rows_bytes(result) == rows_bytes(unbroken)


def test_saved_state_is_used(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run_kl(
            make_spec(),
            out,
            backend=FakeBackend(kill_at("segment", 5)),
            checkpoint_seconds=0,
        )
    steps = []
    backend = FakeBackend(lambda event, t: steps.append(t) if event == "segment" else None)
    run_kl(make_spec(), out, resume=True, backend=backend)
    assert steps[0] == 5 * 64  # four segments were saved, the fifth is the first to run
    assert backend.restarts == [[0], [1], [2]]


def test_finished_batches_are_not_run_again(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run_kl(make_spec(), out, backend=FakeBackend(kill_at("segment", 16)))
    backend = FakeBackend()
    run_kl(make_spec(), out, resume=True, backend=backend)
    assert backend.restarts == [[2]]


def test_unfinished_run_can_be_read(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run_kl(make_spec(), out, backend=FakeBackend(kill_at("segment", 9)))
    result = load_result(out)
    assert not result.finished and 0 < result.rows.num_rows < 4 * 3 * 400
    assert set(result.summary["streams"].to_pylist()) == {1, 2}


def test_damaged_state_and_leftovers_are_ignored(unbroken, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run_kl(make_spec(), out, backend=FakeBackend(kill_at("segment", 5)), checkpoint_seconds=0)
    directory = RunDirectory(out)
    state = directory.state_file(0)
    state.write_bytes(state.read_bytes()[:50])
    (directory.parts / ".batch-0000-00000001-00000050.parquet.tmp").write_bytes(b"cut short")
    assert rows_bytes(run_kl(make_spec(), out, resume=True, backend=FakeBackend())) == rows_bytes(
        unbroken
    )


def test_finished_run_resumed_computes_nothing(unbroken):
    backend = FakeBackend()
    again = run_kl(make_spec(), unbroken.path, resume=True, backend=backend)
    assert backend.loads == 0 and again.rows.num_rows == unbroken.rows.num_rows


def test_existing_run_needs_resume(unbroken):
    with pytest.raises(UsageError, match=r"holds a run already \(finished\): --resume"):
        run_kl(make_spec(), unbroken.path, backend=FakeBackend())


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"tokens": 401}, "tokens: 400 there, 401 now"),
        ({"seed": 1}, "seed: 0 there, 1 now"),
        ({"model": "tiny-mamba2"}, 'model: "tiny-gdn" there'),
        ({"policies": make_spec().policies[:2]}, "policies: "),
    ],
)
def test_resume_refuses_another_spec(unbroken, changes, field):
    backend = FakeBackend()
    with pytest.raises(UsageError, match="holds a run with another spec") as caught:
        run_kl(make_spec(**changes), unbroken.path, resume=True, backend=backend)
    assert field in str(caught.value) and caught.value.exit_code == 2
    assert backend.loads == 0


def test_D05_resume_refuses_other_weights_and_other_data(tmp_path):
    out = tmp_path / "run"
    text = tmp_path / "a.jsonl"
    text.write_text("\n".join(json.dumps({"text": c * 700}) for c in "abc"), "utf-8")
    spec = make_spec(data=str(text))
    with pytest.raises(Killed):
        run_kl(spec, out, backend=FakeBackend(kill_at("segment", 3)))
    with pytest.raises(UsageError, match=r'another model.*sha256: "abc" there, "xyz" now'):
        run_kl(
            spec, out, resume=True, backend=FakeBackend(identity={"sha256": "xyz", "torch": "2"})
        )
    text.write_text("\n".join(json.dumps({"text": c * 700}) for c in "abd"), "utf-8")
    with pytest.raises(UsageError, match=r"another data.*streams"):
        run_kl(spec, out, resume=True, backend=FakeBackend())


def test_interrupt_says_how_to_go_on(unbroken, tmp_path):
    def stop(event, t):
        if event == "segment" and t == 192:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(Interrupted, match="--resume goes on") as caught:
        run_kl(make_spec(), out, backend=FakeBackend(stop))
    assert caught.value.exit_code == 130
    assert json.loads((out / "run.json").read_text())["state"] == "interrupted"
    result = run_kl(make_spec(), out, resume=True, backend=FakeBackend())
    assert rows_bytes(result) == rows_bytes(unbroken)
    sessions = json.loads((out / "run.json").read_text())["sessions"]
    assert [s["state"] for s in sessions] == ["interrupted", "finished"]


def test_full_disk_is_explained_and_loses_nothing(unbroken, tmp_path, monkeypatch):
    out = tmp_path / "run"
    real, calls = os.fsync, 0

    def full(handle):
        nonlocal calls
        calls += 1
        if calls > 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"no space left .*kept; free some space .* --resume") as e:
        run_kl(make_spec(), out, backend=FakeBackend())
    assert e.value.exit_code == 1
    monkeypatch.setattr(os, "fsync", real)
    kept = len(list((out / "parts").glob("*.parquet")))
    assert kept > 5 and not list(out.glob("**/.*.tmp"))
    assert load_result(out).rows.num_rows > 0
    result = run_kl(make_spec(), out, resume=True, backend=FakeBackend())
    assert rows_bytes(result) == rows_bytes(unbroken)


def test_state_that_does_not_fit_the_disk_does_not_stop_the_run(unbroken, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    notes = []

    class Notes:
        def start(self, total, done): ...
        def advance(self, done): ...
        def note(self, text):
            notes.append(text)

    monkeypatch.setattr("safetensors.torch.save_file", full)
    result = run_kl(
        make_spec(),
        tmp_path / "run",
        backend=FakeBackend(),
        checkpoint_seconds=0,
        progress=Notes(),
    )
    assert rows_bytes(result) == rows_bytes(unbroken)
    assert any("could not be saved" in n for n in notes)


def test_a_failing_batch_leaves_the_others(unbroken, tmp_path):
    class Faulty(FakeBackend):
        def forcing(self, m, spec, tokens, *, streams, **kwargs):
            if streams == [1]:
                raise ValueError("this stream cannot be")
            return super().forcing(m, spec, tokens, streams=streams, **kwargs)

    out = tmp_path / "run"
    result = run_kl(make_spec(), out, backend=Faulty())
    assert [f["streams"] for f in result.failed] == [[1]]
    assert "this stream cannot be" in (out / "failed-0001.log").read_text()
    assert not result.finished and set(result.summary["streams"].to_pylist()) == {2}
    healed = run_kl(make_spec(), out, resume=True, backend=FakeBackend())
    assert healed.finished and rows_bytes(healed) == rows_bytes(unbroken)


def test_a_study_whose_only_batch_fails_fails(tmp_path):
    def broken(event, t):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_kl(make_spec(), tmp_path / "run", backend=FakeBackend(broken, batch=3))


def test_out_of_memory_says_what_to_do(tmp_path):
    torch = pytest.importorskip("torch")

    def full(event, t):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    with pytest.raises(RunError, match=r"out of memory with 9 rows .*--batch-rows"):
        run_kl(make_spec(), tmp_path / "run", backend=FakeBackend(full))


def test_bad_input_leaves_no_directory(tmp_path):
    out = tmp_path / "new" / "run"
    backend = FakeBackend()
    with pytest.raises(UsageError, match="longest N possible"):
        run_kl(make_spec(tokens=10**6), out, backend=backend)
    assert not out.exists() and backend.loads == 0
    with pytest.raises(UsageError, match="no such data set"):
        run_kl(make_spec(data="nowhere"), out, backend=backend)
    assert not out.exists()


def test_out_must_be_a_new_directory(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"not empty and holds no run \(notes.txt"):
        run_kl(make_spec(), tmp_path, backend=FakeBackend())
    with pytest.raises(UsageError, match="is a file"):
        run_kl(make_spec(), tmp_path / "notes.txt", backend=FakeBackend())
    with pytest.raises(UsageError, match="cannot write"):
        run_kl(make_spec(), tmp_path / "notes.txt" / "run", backend=FakeBackend())
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_two_processes_in_one_directory(tmp_path):
    out = tmp_path / "run"
    directory = RunDirectory(out)
    directory.prepare(resume=False)
    with directory.locked(), pytest.raises(RunError, match="in use by another process"):
        run_kl(make_spec(), out, backend=FakeBackend())


def test_damaged_files_are_named(tmp_path):
    out = tmp_path / "run"
    run_kl(make_spec(tokens=16, streams=1), out, backend=FakeBackend())
    (out / "rows.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(RunError, match=r"rows\.parquet cannot be read"):
        load_result(out)
    (out / "spec.json").write_text("{")
    with pytest.raises(RunError, match=r"spec\.json is damaged"):
        load_result(out)
    with pytest.raises(UsageError, match="holds no run"):
        load_result(tmp_path)


def test_progress_counts_stream_tokens(tmp_path):
    seen = []

    class Recorder:
        def start(self, total, done):
            seen.append(("start", total, done))

        def advance(self, done):
            seen.append(done)

        def note(self, text): ...

    run_kl(make_spec(), tmp_path / "run", backend=FakeBackend(), progress=Recorder())
    assert seen[0] == ("start", 1200, 0) and seen[-1] == 1200
    assert seen[1:] == sorted(seen[1:])
