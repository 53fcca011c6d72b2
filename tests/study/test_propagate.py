"""Watched runs of tiny random models on the real engine."""

import numpy as np
import pyarrow as pa
import pytest

from quantlab.errors import UsageError
from quantlab.replay.policy import parse_policy
from quantlab.report.load import load_shown
from quantlab.report.propagation import propagation_tables, write_propagation
from quantlab.report.table import plain
from quantlab.study.propagate import (
    TABLES,
    default_directory,
    load_propagation,
    run_propagation,
    stride_of,
)
from quantlab.study.run import Interrupted, run_kl
from quantlab.study.spec import KlSpec
from tests.study.real import TinyBackend

TEXTS = ("conventional:int8@row", "shared:nvfp4-sr L=4", "nvfp4 / fp32 L=8")


def make_spec(**changes):
    values = {
        "model": "tiny",
        "policies": tuple(parse_policy(text) for text in TEXTS),
        "tokens": 96,
        "streams": 2,
        "prompt": 19,
        "segment": 64,
    }
    return KlSpec(**{**values, **changes})


@pytest.fixture(scope="module", params=["qwen3_5", "nemotron_h"])
def watched(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("watched") / "run"
    return request.param, run_propagation(
        make_spec(), out, every=10, backend=TinyBackend(request.param)
    )


def test_watching_changes_no_result(watched, tmp_path):
    family, result = watched
    alone = run_kl(make_spec(batch_rows=4), tmp_path / "kl", backend=TinyBackend(family))
    expected = alone.rows["kl"].to_numpy().reshape(3, 2, 96)
    tokens = result.tables["tokens"]
    found = np.empty_like(expected)
    names = [str(p) for p in result.spec.policies]
    for row in tokens.to_pylist():
        found[names.index(row["policy"]), row["stream"], row["position"] - 1] = row["kl"]
    # cuts change the order of additions: FP32 noise, and a rounding may flip
    assert found.mean(axis=(1, 2)) == pytest.approx(expected.mean(axis=(1, 2)), rel=0.1)
    assert np.median(np.abs(found[1:] / expected[1:] - 1)) < 0.05


def test_tables_are_complete(watched):
    _, result = watched
    assert result.every == 16  # a multiple of 1, 4 and 8
    rows = result.tables["rows"]
    assert sorted(set(rows["position"].to_pylist())) == [16, 32, 48, 64, 80, 96]
    assert len(set(rows["policy"].to_pylist())) == 4  # the reference is watched as well
    deviation = rows["deviation"].to_numpy()
    policy = np.array(rows["policy"].to_pylist())
    state = rows["state"].to_numpy()
    relative = {p: (deviation / state)[policy == p].mean() for p in set(policy.tolist())}
    conventional, int8, nvfp4, separate = (
        relative[name] for name in ("conventional:float32", *(str(p) for p in result.spec.policies))
    )
    # FP32's own rounding: 2^-24 relative a step, squared, over some tens of steps
    assert conventional < 1e-11 and separate < 1e-11
    assert 1e-7 < int8 < nvfp4 < 1
    summary = {r["policy"]: r for r in result.summary.to_pylist()}
    assert len(summary) == 3
    last = summary[str(result.spec.policies[2])]
    # two copies: the recurrence copy follows its own inputs, which feel the read copy's error
    assert last["reference_ratio"] > 1e3
    # and its read copy deviates as FP4 does, in itself and in what steps put out
    assert last["read_relative"] > 1e6 * last["relative"] and last["step_relative"] > 1e-5
    for name in ("propagation.csv", *(f"{table}.parquet" for table in TABLES)):
        assert (result.path / name).exists()
    text = "\n".join(plain(t) for t in propagation_tables(result.summary))
    assert "shared nvfp4-sr L=4" in text
    assert [f.name for f in write_propagation(result)] == [
        "heads.png", "heads.svg", "drift.png", "drift.svg", "injection.png", "injection.svg",
    ]  # fmt: skip


class StopAt:
    def __init__(self, at):
        self.at = at

    def start(self, total, done): ...

    def note(self, text): ...

    def advance(self, done):
        if done >= self.at:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_with_the_streams_left(watched, tmp_path):
    family, whole = watched
    backend = TinyBackend(family)
    out = tmp_path / "run"
    with pytest.raises(Interrupted, match="--resume goes on"):
        run_propagation(make_spec(), out, every=10, backend=backend, progress=StopAt(120))
    assert len(list((out / "parts").glob("stream-0000-*"))) == len(TABLES)
    so_far = load_propagation(out)
    assert so_far.summary["streams"].to_pylist() == [1, 1, 1]
    facts = load_shown(out).section().facts
    assert facts.startswith("1 stream of ") and facts.endswith("Not finished (interrupted).")
    streams = np.array(whole.tables["rows"]["stream"].to_pylist())
    assert so_far.tables["rows"].equals(whole.tables["rows"].filter(pa.array(streams == 0)))
    with pytest.raises(UsageError, match="holds another run: every"):
        run_propagation(make_spec(), out, every=32, backend=backend, resume=True)
    resumed = run_propagation(make_spec(), out, every=10, backend=backend, resume=True)
    assert resumed.tables["rows"].equals(whole.tables["rows"])
    assert not (out / "parts").exists()
    again = run_propagation(make_spec(), out, every=10, backend=backend, resume=True)
    assert str(again.summary.to_pylist()) == str(whole.summary.to_pylist())


def test_strides():
    spec = make_spec(tokens=4096)
    assert stride_of(spec) == 32 and stride_of(spec, 1) == 8 and stride_of(spec, 33) == 40
    with pytest.raises(UsageError, match="comes after 8 tokens"):
        stride_of(make_spec(tokens=7))
    assert default_directory(spec, 32).name.startswith("propagate-tiny-4096-32-")


def test_what_cannot_be_watched_or_read_is_said(tmp_path):
    with pytest.raises(UsageError, match="holds no run of quantlab propagate"):
        load_propagation(tmp_path)
    part = make_spec(policies=(parse_policy("shared:fp8 only=0.1"),))
    with pytest.raises(UsageError, match="stores every head"):
        run_propagation(part, tmp_path / "run", backend=TinyBackend("qwen3_5"))


def test_an_error_before_the_first_forward_leaves_nothing(tmp_path):
    class Broken(TinyBackend):
        def load(self, spec):
            raise UsageError("no such model")

    with pytest.raises(UsageError, match="no such model"):
        run_propagation(make_spec(), tmp_path / "run", backend=Broken("qwen3_5"))
    assert not (tmp_path / "run").exists()
