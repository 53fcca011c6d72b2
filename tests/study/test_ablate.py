"""Ablations on a stand-in engine: their specs, and their tables against rows taken by hand."""

import numpy as np
import pytest

import quantlab.study.build as build
from quantlab.errors import UsageError
from quantlab.metrics.positions import window
from quantlab.metrics.summary import to_cube
from quantlab.models.source import Source
from quantlab.report.ablation import write_ablation
from quantlab.report.ablation_table import ablation_tables, folding_table
from quantlab.report.table import plain
from quantlab.study.ablate import (
    correction_spec,
    load_ablation,
    rounding_spec,
    run_ablation,
    run_folding,
    window_spec,
)
from quantlab.study.run import run_kl
from tests.study.fake import FakeBackend

FIELDS = {"tokens": 300, "streams": 3, "prompt": 8, "segment": 64, "device": "cpu"}
LAST = np.asarray(window(300))


@pytest.fixture(autouse=True)
def zoo_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(
        build, "resolve", lambda name: Source(name=name, origin="zoo", path=tmp_path)
    )


def run(kind, spec, out):
    return run_ablation(kind, spec, out, backend=FakeBackend())


def last_means(result):
    """KL at the last N per policy and stream."""
    cube = to_cube(result.rows)
    inside = np.isin(cube.positions, LAST)
    return dict(zip(cube.policies, cube.values["kl"][:, :, inside].mean(axis=2), strict=True))


def test_rounding_compares_every_format_over_its_seeds(tmp_path):
    spec = rounding_spec("tiny-gdn", formats=["fp8", "nvfp4"], seeds=[3, 5], **FIELDS)
    assert [p.short for p in spec.policies] == [
        "shared fp32",
        "shared fp8",
        "shared fp8-sr seed=3",
        "shared fp8-sr seed=5",
        "shared nvfp4",
        "shared nvfp4-sr seed=3",
        "shared nvfp4-sr seed=5",
    ]
    ablation = run("rounding", spec, tmp_path / "run")
    points = [r for r in ablation.table.to_pylist() if r["n"] == 300]
    assert [p["format"] for p in points] == ["fp8", "nvfp4"]
    kl = last_means(ablation.result)
    cube = to_cube(ablation.result.rows)
    of_mean = cube.values["kl_of_mean"][:, :, np.isin(cube.positions, LAST)].mean(axis=(1, 2))
    # the stand-in's policy i is off by 10^-(i + 1); its second policy diverges in stream 1 from
    # position 200 on, which is fp8 to nearest
    fp8, nvfp4 = points
    assert fp8["rtn_diverged"] == 1 and np.isnan(fp8["ratio"]) and fp8["sr_diverged"] == 0
    seeds = np.stack([kl[str(p)] for p in spec.policies[5:7]])
    assert nvfp4["sr"] == pytest.approx(seeds.mean())
    assert nvfp4["ratio"] == pytest.approx(kl[str(spec.policies[4])].mean() / seeds.mean())
    assert nvfp4["sr_seed_min"] == pytest.approx(seeds.mean(axis=1).min())
    # two seeds: spread = 2 (mean KL − KL of the mean)
    assert nvfp4["spread"] == pytest.approx(2 * (seeds.mean() - of_mean[5]), rel=1e-6)
    assert nvfp4["bias"] + nvfp4["spread"] == pytest.approx(nvfp4["sr"])
    assert nvfp4["ratio_low"] <= nvfp4["ratio"] <= nvfp4["ratio_high"]
    text = plain(ablation_tables("rounding", ablation.table)[0])
    assert "div." in text and "nvfp4" in text
    again = load_ablation(tmp_path / "run").table
    assert str(again.to_pylist()) == str(ablation.table.to_pylist())  # NaN is not equal to itself
    assert [f.name for f in write_ablation(ablation)] == ["rounding.png", "rounding.svg"]


def test_bias_and_spread_are_unbiased_over_seeds():
    """Logits = reference + common + noise: the split returns the parts, from few seeds."""
    import torch

    from quantlab.analysis.rounding import rounding_table
    from quantlab.metrics.divergence import compare
    from quantlab.metrics.repetitions import kl_of_means
    from quantlab.study.rows import chunk_rows, merge

    generator = torch.Generator().manual_seed(0)
    n, vocab, seeds = 16, 200, [0, 1, 2]
    spec = rounding_spec("tiny-gdn", formats=["fp8"], seeds=seeds, floor=False, **FIELDS)
    streams = 24
    reference = torch.randn(1, streams, n, vocab, generator=generator)
    common = 0.02 * torch.randn(1, streams, n, vocab, generator=generator)
    noise = 0.05 * torch.randn(3, streams, n, vocab, generator=generator)
    logits = torch.cat([reference, reference + common, reference + common + noise])
    targets = torch.zeros(streams, n, dtype=torch.int64)
    rows = chunk_rows(
        spec,
        compare(logits, targets),
        kl_of_means=kl_of_means(logits, spec.repetitions),
        positions=torch.arange(1, n + 1),
        diverged_at=torch.full((4, streams), -1),
        streams=list(range(streams)),
        stream_names=[str(s) for s in range(streams)],
    )
    (point,) = rounding_table(merge([rows], spec), [n]).to_pylist()
    # the policy to nearest is the common part alone
    assert point["bias_low"] < point["rtn"] < point["bias_high"]
    assert point["bias"] == pytest.approx(point["rtn"], rel=0.1)
    # KL is half the variance of a small error: 0.05² / 2, times 1 − Σp²
    assert point["spread"] == pytest.approx(0.05**2 / 2, rel=0.05)


def test_windows_are_compared_with_the_shortest(tmp_path):
    spec = window_spec(
        "tiny-gdn", policies=["shared:fp8-sr", "fp8/fp32"], windows=[16, 1, 4], **FIELDS
    )
    assert [(p.kind, p.window) for p in spec.policies[1:]] == [
        ("shared", 1), ("shared", 4), ("shared", 16), ("separate", 4), ("separate", 16),
    ]  # fmt: skip
    ablation = run("window", spec, tmp_path / "run")
    points = {(r["policy"], r["window"], r["n"]): r for r in ablation.table.to_pylist()}
    kl = last_means(ablation.result)
    last = points["shared fp8-sr", 16, 300]
    assert (last["writes"], last["base_window"]) == (19, 1)
    assert (last["predicted_low"], last["predicted_high"]) == (16, 16)
    # the stand-in's second policy, L = 1, diverges: nothing to compare with
    assert points["shared fp8-sr", 1, 300]["diverged"] == 1 and np.isnan(last["fall"])
    two = points["fp8 / fp32", 16, 300]
    expected = kl[str(spec.policies[4])].mean() / kl[str(spec.policies[5])].mean()
    assert two["fall"] == pytest.approx(expected) and two["base_window"] == 4
    assert two["predicted_low"] == two["predicted_high"] == 1
    before = points["shared fp8-sr", 16, 128]
    assert before["fall"] == pytest.approx(100**2, rel=0.1)  # 10^-2 against 10^-4, squared
    texts = [plain(t) for t in ablation_tables("window", ablation.table)]
    assert "div." in texts[0] and "predicted" in texts[1]
    write_ablation(ablation)


def test_corrections_name_what_is_identical(tmp_path):
    spec = correction_spec("tiny-gdn", policies=["nvfp4/fp32", "fp8/fp32 L=4"], **FIELDS)
    assert [(p.corrections, p.window) for p in spec.policies[1:]] == [
        ("rederive", 16), ("fold", 16), ("rederive", 4), ("fold", 4),
    ]  # fmt: skip
    ablation = run("correction", spec, tmp_path / "run")
    points = [r for r in ablation.table.to_pylist() if r["policy"] == "fp8 / fp32 L=4"]
    assert not any(p["identical"] for p in points) and points[0]["first_difference"] == 1
    kl = last_means(ablation.result)
    expected = kl[str(spec.policies[4])].mean() / kl[str(spec.policies[3])].mean()
    assert points[-1]["ratio"] == pytest.approx(expected)
    write_ablation(ablation)


def test_an_ablation_resumes_like_any_study(tmp_path):
    spec = rounding_spec("tiny-gdn", formats=["fp8"], **FIELDS)
    whole = run("rounding", spec, tmp_path / "whole")

    def die(event, t):
        if event == "segment" and t == 300:
            raise KeyboardInterrupt

    with pytest.raises(Exception, match="resume"):
        run_ablation("rounding", spec, tmp_path / "run", backend=FakeBackend(die))
    measured = load_ablation(tmp_path / "run").table  # of the first of three streams
    assert set(measured["streams"].to_pylist()) == {1}
    resumed = run_ablation("rounding", spec, tmp_path / "run", resume=True, backend=FakeBackend())
    assert str(resumed.table.to_pylist()) == str(whole.table.to_pylist())
    assert (tmp_path / "run" / "ablation.csv").read_bytes() == (
        tmp_path / "whole" / "ablation.csv"
    ).read_bytes()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (rounding_spec, {"formats": ["fp9"]}, "unknown format"),
        (rounding_spec, {"formats": ["fp32"]}, "nothing is rounded"),
        (rounding_spec, {"seeds": [1, 1]}, "different"),
        (rounding_spec, {"seeds": []}, "one or more"),
        (window_spec, {"windows": [4]}, "two or more"),
        (window_spec, {"windows": [0, 4]}, "two or more"),
        (window_spec, {"policies": ["conventional:fp8"]}, "shared:fp8"),
        (window_spec, {"policies": ["shard:fp8"]}, "Did you mean 'shared'"),
        (correction_spec, {"policies": ["nvfp4/fp33"]}, "Did you mean 'fp32'"),
    ],
)
def test_wrong_choices_are_named(make, options, message):
    with pytest.raises(UsageError, match=message):
        make("tiny-gdn", **options, **FIELDS)


def test_other_studies_are_no_ablations(tmp_path):
    spec = rounding_spec("tiny-gdn", formats=["fp8"], **FIELDS)
    run_kl(spec, tmp_path / "run", backend=FakeBackend())
    with pytest.raises(UsageError, match="holds no ablation"):
        load_ablation(tmp_path / "run")


def test_folding_saturates_and_derived_again_is_exact(tmp_path):
    points = run_folding("nvfp4", windows=16, out=tmp_path / "f.csv").to_pylist()
    assert len(points) == 36 and (tmp_path / "f.csv").exists()
    assert all(p["rederived"] == 0 for p in points)
    by_key = {(p["decay"], p["beta"], p["rank"]): p for p in points}
    assert by_key[0.9, 0.1, 32]["outcome"] == "harmless"
    assert by_key[1.0, 0.9, 32]["outcome"] == "saturates"
    assert by_key[1.0, 0.9, 32]["error"] > 10 * by_key[0.9, 0.1, 32]["error"]
    assert "saturates" in plain(folding_table(run_folding("fp8", windows=8)))
    for read, windows, message in (
        ("nvfp4", 4, "at least 8"), ("fp32", 8, "rounds"), ("fp9", 8, "unknown format"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            run_folding(read, windows=windows)
