"""Recurrence copies under other read formats, on recorded inputs and in tiny random models."""

import json
from pathlib import Path

import pytest
import torch

import quantlab.study.build as build
import quantlab.study.copies as copies_module
from quantlab.analysis.copies import ComparedScan, compared_policies
from quantlab.engine import TeacherForcing
from quantlab.errors import UsageError
from quantlab.models.source import Source
from quantlab.recurrence import exact_scan
from quantlab.replay import WindowedScan
from quantlab.study.calibrate import record
from quantlab.study.copies import CopiesStudy, run_copies
from quantlab.study.session import Interrupted
from quantlab.study.spec import KlSpec
from quantlab.study.tap import tapped
from quantlab_cli.main import main
from tests.recurrence.sampling import sample_inputs
from tests.study.real import SmallBytes, TinyBackend

READS = ("nvfp4", "fp8", "int8@row")


def make_study(**changes):
    policies = tuple(compared_policies(READS, "fp16-sr", ("rederive", "fold"), 8))
    spec = KlSpec(
        model="tiny", policies=policies, tokens=136, streams=1, prompt=11, segment=64,
        **changes.pop("spec", {}),
    )  # fmt: skip
    return CopiesStudy(spec=spec, **{"reads": READS, "in_model": 40, **changes})


def found_in(table):
    return {
        (r["inputs"], r["layer"], r["corrections"], r["read"].split("@")[0]): r
        for r in table.to_pylist()
    }


def test_delta_rule_model(tmp_path):
    table = run_copies(make_study(), tmp_path / "run", backend=TinyBackend("qwen3_5"))
    found = found_in(table)
    layers = {layer for inputs, layer, *_ in found if inputs == "model"}
    assert len(found) == 2 * 2 * (1 + len(layers)) and len(layers) > 1
    for (inputs, layer, ways, _), row in found.items():
        same = ways == "rederive" and (inputs == "recorded" or layer == 0)
        assert (row["first_difference"] == -1) == same, row
        assert (row["relative"] == 0) == same and (row["differing"] == 0) == same
        if inputs == "recorded" and same:
            assert row["windows"] == 17
        if inputs == "model":
            assert row["windows"] == 5
    folded = found["model", 0, "fold", "int8"]
    assert folded["first_difference"] == 1 and folded["differing"] == 5
    assert (tmp_path / "run" / "copies.csv").exists()


def test_without_corrections_nothing_differs_on_the_same_inputs(tmp_path):
    table = run_copies(make_study(), tmp_path / "run", backend=TinyBackend("nemotron_h"))
    for (inputs, layer, *_), row in found_in(table).items():
        assert (row["first_difference"] == -1) == (inputs == "recorded" or layer == 0)


def test_the_first_difference_is_the_windows_own():
    """Another read format from the third window on: a scan put together by hand."""
    inputs = sample_inputs("gdn", rows=1, steps=32, dtype=torch.float32)
    policies = compared_policies(["fp8", "fp16"], "fp32", ["fold"], 8)
    both = inputs.rows(torch.zeros(2, dtype=torch.int64))
    scan = ComparedScan(policies, torch.tensor([0]), layer=0, seed=0, inner=WindowedScan)
    scan.start(torch.zeros(2, 4, 8, 16), both)  # zeros are zeros in every format
    scan(both.slice(0, 13))
    assert scan.windows == 1 and scan.first.tolist() == [-1, -1]
    scan(both.slice(13, 32))
    assert scan.windows == 4 and scan.first.tolist() == [-1, 2] and scan.count.tolist() == [0, 3]
    (row,) = scan.rows("recorded", 4)
    assert (row["read"], row["against"], row["first_difference"]) == (
        "float16", "float8_e4m3fn@block128", 2,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_tapped_inputs_are_those_of_whole_forwards(family):
    m = TinyBackend(family).load(None)
    tokens = torch.tensor([SmallBytes()("The light of other days, " * 6)["input_ids"]])
    recorded = record(m, tokens, prompt=11, segment=32)
    for layer in (0, m.layers - 1):
        parts = list(
            tapped(m, tokens[:, :-1], layer=layer, prompt=11, segment=32)
        )  # the recording ends before the last target
        assert torch.allclose(parts[0][0], recorded[layer].state, atol=1e-5)
        for name in ("q", "k", "v", "log_decay"):
            joined = torch.cat([getattr(inputs, name) for _, inputs in parts], 1)
            expected = getattr(recorded[layer].inputs, name)
            # one row alone adds in another order than in a batch
            assert torch.allclose(joined, expected, rtol=1e-4, atol=1e-5), name
    # nothing of the taps is left in the model
    o = TeacherForcing(
        m, tokens, policies=[], stream_ids=[0], positions=[20], prompt=11, segment=32, seed=0
    )
    assert all(x.logits.isfinite().all() for x in o.run())


def test_an_interrupted_study_goes_on(tmp_path):
    class Stop:
        def start(self, total, done): ...

        def note(self, text): ...

        def advance(self, done):
            if done > 136:
                raise KeyboardInterrupt

    out, backend = tmp_path / "run", TinyBackend("nemotron_h")
    with pytest.raises(Interrupted, match="--resume goes on"):
        run_copies(make_study(), out, backend=backend, progress=Stop())
    assert [p.name for p in (out / "parts").iterdir()] == ["recorded.parquet"]
    with pytest.raises(UsageError, match="holds another run: layer"):
        run_copies(make_study(layer=1), out, backend=backend, resume=True)
    resumed = run_copies(make_study(), out, backend=backend, resume=True)
    whole = run_copies(make_study(), tmp_path / "whole", backend=backend)
    assert resumed.equals(whole) and not (out / "parts").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reads": ("fp8",)}, "two formats or more"),
        ({"in_model": 4}, "--in-model 4 is less than a window of 8"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        make_study(**changes)


def test_a_layer_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"--layer 9: tiny has recurrent layers 0 … "):
        run_copies(make_study(layer=9), tmp_path / "run", backend=TinyBackend("nemotron_h"))
    assert not (tmp_path / "run").exists()


def test_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        build, "resolve", lambda name: Source(name=name, origin="zoo", path=Path("zoo"))
    )
    monkeypatch.setattr(copies_module, "Backend", lambda: TinyBackend("nemotron_h"))
    monkeypatch.chdir(tmp_path)
    small = ["-M", "tiny-gdn", "--device", "cpu", "-N", "64", "--in-model", "0", "--prompt", "8"]
    assert main(["ablate", "copies", *small, "--json"]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert [r["windows"] for r in document["rows"]] == [4] * 6
    drawn = {Path(name).name for name in document["files"]}
    assert drawn == {"copies.png", "copies.svg", "report.md", "index.html"}
    assert "never" in out and document["reads"] == ["nvfp4", "fp8", "fp16", "int8@row"]
    assert main(["ablate", "copies", *small, "--read", "fp9"]) == 2
    assert "unknown format" in capsys.readouterr().err


def test_scan_of_the_prompt_is_the_first_state():
    """`start` from the exact state is what `prefill` does."""
    inputs = sample_inputs("gdn", rows=1, steps=20, dtype=torch.float32)
    both = inputs.rows(torch.zeros(2, dtype=torch.int64))
    policies = compared_policies(["fp8", "nvfp4"], "fp16-sr", ["rederive"], 4)
    a, b = (
        ComparedScan(policies, torch.tensor([0]), layer=0, seed=0, inner=WindowedScan)
        for _ in range(2)
    )
    a.prefill(both.slice(0, 8))
    b.start(exact_scan(both.slice(0, 8))[1], both.slice(0, 8))
    assert torch.equal(a(both.slice(8, 20)), b(both.slice(8, 20)))
