"""Attribution: its spec, its tables against rows taken by hand, and a real model's parts."""

import numpy as np
import pyarrow as pa
import pytest
import torch

import quantlab.study.attribute as module
import quantlab.study.build as build
from quantlab.analysis.attribution import attribution_tables
from quantlab.engine import TeacherForcing
from quantlab.errors import UsageError
from quantlab.models.source import Source
from quantlab.replay import WindowedScan, parse_policy
from quantlab.replay.part import PartError
from quantlab.report.attribution import attribution_report, write_attribution
from quantlab.report.table import plain
from quantlab.study.attribute import attribution_spec, load_attribution, run_attribution
from tests.models.tiny import tiny, tokens
from tests.study.fake import FakeBackend

FIELDS = {"tokens": 300, "streams": 3, "prompt": 8, "segment": 64, "device": "cpu"}


@pytest.fixture(autouse=True)
def zoo_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(
        build, "resolve", lambda name: Source(name=name, origin="zoo", path=tmp_path)
    )
    monkeypatch.setattr(module, "model_heads", lambda name: [2, 2, 1])


def test_every_unit_alone_and_left_out():
    spec = attribution_spec("tiny-gdn", layers=[2, 0], **FIELDS)
    assert [p.short for p in spec.policies] == [
        "shared fp32",
        "shared nvfp4-sr",
        "shared nvfp4-sr only=0.0",
        "shared nvfp4-sr except=0.0",
        "shared nvfp4-sr only=0.1",
        "shared nvfp4-sr except=0.1",
        "shared nvfp4-sr only=2.0",
        "shared nvfp4-sr except=2.0",
    ]
    by_layer = attribution_spec("tiny-gdn", by="layer", policy="nvfp4 / fp16-sr", **FIELDS)
    assert [str(p.part) for p in by_layer.policies[2:4]] == ["only=0", "except=0"]
    assert len(by_layer.policies) == 2 + 2 * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "shared:fp9"}, "--policy: unknown format"),
        ({"policy": "shared:fp8 only=1"}, "leave only=1 out"),
        ({"policy": "shared:fp32"}, "rounds no state"),
        ({"layers": [3]}, r"layers 0 … 2 \(got \[3\]\)"),
        ({"by": "row"}, "--by row"),
    ],
)
def test_what_is_wrong_is_said(options, message):
    with pytest.raises(UsageError, match=message):
        attribution_spec("tiny-gdn", **options, **FIELDS)


def rows_of(kl):
    """Rows at positions 1 … 16 of KLs {policy: [streams]}, the same at every position."""
    found = [
        {"policy": str(parse_policy(text)), "stream": s, "position": t, "kl": value * (1 + t / 100),
         "nll": 1.0, "nll_reference": 1.0, "top1_agrees": True, "diverged": False,
         "kl_of_mean": np.nan}
        for text, values in kl.items() for s, value in enumerate(values) for t in range(1, 17)
    ]  # fmt: skip
    return pa.Table.from_pylist(found)


def parts(only, without, whole):
    name = "shared:nvfp4-sr"
    kl = {"shared:fp32": [0.0] * len(whole), name: whole}
    for head, values in enumerate(only):
        kl[f"{name} only=0.{head}"] = values
    for head, values in enumerate(without):
        kl[f"{name} except=0.{head}"] = values
    return attribution_tables(rows_of(kl), [16])


def test_parts_that_add_up():
    scale = np.array([1.0, 2.0])  # of the two streams
    each = [4.0, 1.0, 2.0, 3.0]
    units, sums = parts([e * scale for e in each], [(10 - e) * scale for e in each], 10 * scale)
    points = units.to_pylist()
    assert [(p["layer"], p["head"]) for p in points] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert [p["share"] for p in points] == pytest.approx([0.4, 0.1, 0.2, 0.3])
    assert [p["saved"] for p in points] == pytest.approx([0.4, 0.1, 0.2, 0.3])
    assert points[0]["share_low"] == pytest.approx(0.4) == points[0]["share_high"]
    assert points[0]["only"] == pytest.approx(4.0 * 1.5 * (1 + 8.5 / 100))
    (total,) = sums.to_pylist()
    assert total["sum_only"] == pytest.approx(1) and total["sum_saved"] == pytest.approx(1)
    assert total["top_quarter"] == pytest.approx(0.4) and total["half"] == 2
    for name in ("streams_spearman", "halves_spearman", "positions_spearman", "ways_spearman"):
        assert total[name] == pytest.approx(1), name


def test_order_that_turns_round_and_parts_that_do_not_add_up():
    units, sums = parts(
        [[1.0, 4.0], [2.0, 3.0], [3.0, 2.0], [4.0, 1.0]],
        [[9.0, 9.0], [8.0, 8.0], [7.0, 7.0], [6.0, 6.0]],
        [20.0, 20.0],
    )
    (total,) = sums.to_pylist()
    assert total["streams_spearman"] == -1 == total["halves_spearman"]
    assert total["sum_only"] == pytest.approx(0.5)
    assert total["sum_saved"] == pytest.approx((4 * 20 - 30) / 20)
    assert total["sum_only_low"] == pytest.approx(0.5) == total["sum_only_high"]
    # one stream: no interval, no order over streams
    _, single = parts([[1.0], [2.0], [3.0]], [[1.0], [2.0], [3.0]], [5.0])
    (row,) = single.to_pylist()
    assert np.isnan(row["sum_only_low"]) and np.isnan(row["streams_spearman"])
    assert row["positions_spearman"] == pytest.approx(1)
    assert "layer 0, head 2" in plain(attribution_report(units, sums)[0])


def test_a_run_resumes_and_is_drawn(tmp_path):
    spec = attribution_spec("tiny-gdn", layers=[1, 2], **FIELDS)
    whole = run_attribution(spec, tmp_path / "whole", backend=FakeBackend())
    assert whole.units.num_rows == 3 * 6 and whole.sums.num_rows == 6

    def die(event, t):
        if event == "segment" and t == 300:
            raise KeyboardInterrupt

    with pytest.raises(Exception, match="resume"):
        run_attribution(spec, tmp_path / "run", backend=FakeBackend(die))
    measured = load_attribution(tmp_path / "run").sums  # of the first of three streams
    assert set(measured["streams"].to_pylist()) == {1}
    run_attribution(spec, tmp_path / "run", resume=True, backend=FakeBackend())
    for name in ("attribution.csv", "additivity.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    again = load_attribution(tmp_path / "run")
    assert str(again.sums.to_pylist()) == str(whole.sums.to_pylist())
    files = write_attribution(again)
    assert [f.name for f in files] == ["map.png", "map.svg", "additivity.png", "additivity.svg"]


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_a_part_leaves_earlier_layers_as_they_are(family):
    """Op inputs up to the first layer of the part are the FP32 replay's, bit for bit."""
    m = tiny(family)
    last = m.layers - 1
    texts = ["shared:fp32", "shared:nvfp4-sr", f"shared:nvfp4-sr only={last}",
             f"shared:nvfp4-sr except={last}"]  # fmt: skip
    seen = {}

    class Watched(WindowedScan):
        def __call__(self, inputs):
            seen[self.layer] = inputs.v.clone()
            return super().__call__(inputs)

    forcing = TeacherForcing(
        m, tokens(1, 60), policies=[parse_policy(t) for t in texts], stream_ids=[0],
        positions=[40], prompt=8, segment=48, seed=0, scan=Watched,
    )  # fmt: skip
    (measured,) = forcing.run()
    _, fp32, whole, only, rest = range(5)
    assert torch.equal(seen[last][only], seen[last][fp32])
    assert torch.equal(seen[last][rest], seen[last][whole])
    assert not torch.equal(seen[last][whole], seen[last][fp32])
    logits = measured.logits[:, 0]
    assert not torch.equal(logits[only], logits[fp32])
    assert not torch.equal(logits[rest], logits[whole])
    with pytest.raises(PartError, match=f"layers 0 … {last}"):
        TeacherForcing(
            m, tokens(1, 60), policies=[parse_policy(f"shared:fp8 only={m.layers}")],
            stream_ids=[0], positions=[40], prompt=8, segment=48, seed=0,
        )  # fmt: skip
