"""Tables of watched scans and what is said of them, against numbers taken by hand."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from quantlab.analysis.observer import observed
from quantlab.analysis.profile import profile
from quantlab.analysis.profile_schemas import UNIT_SCHEMA
from quantlab.analysis.propagation import (
    first_positions,
    propagation_summary,
    quarter_share,
    spearman,
)
from quantlab.recurrence import OpInputs
from quantlab.replay import WindowedScan, parse_policy
from tests.recurrence.sampling import sample_inputs

POLICIES = [parse_policy(t) for t in ("conventional", "shared:nvfp4-sr L=4", "shared:nvfp4 L=8")]


def watched(kind, layers=2, steps=96):
    build, scans = observed(WindowedScan, stride=8)
    for layer in range(layers):
        one = sample_inputs(kind, steps=steps, rows=1, heads=4, dtype=torch.float32, seed=layer)
        inputs = one.rows(torch.zeros(len(POLICIES), dtype=torch.int64))
        scan = build(POLICIES, torch.tensor([3]), layer=layer, seed=0)
        scan.prefill(inputs.slice(0, 16))
        scan(inputs.slice(16, steps))
    return scans


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_tables_hold_what_was_seen(kind):
    scans = watched(kind)
    tables = profile(scans, POLICIES, stream=3)
    series = tables["series"].to_pylist()
    assert len(series) == 2 * 3 * 4 * 10  # layers, policies, heads, observations
    row = next(
        r for r in series
        if (r["layer"], r["policy"], r["head"], r["position"]) == (1, str(POLICIES[1]), 2, 24)
    )  # fmt: skip
    assert row["stream"] == 3
    assert row["deviation"] == float(scans[1].seen.series["deviation"].tensor()[2, 1, 2])
    heads = {(r["layer"], r["policy"], r["head"]): r for r in tables["heads"].to_pylist()}
    head = heads[1, str(POLICIES[2]), 3]
    seen = scans[1].seen
    stacked = {name: x.tensor()[:, 2, 3] for name, x in seen.series.items()}
    assert head["deviation"] == pytest.approx(float(stacked["deviation"].mean()))
    relative = (stacked["deviation"] / stacked["state"]).mean()
    assert head["relative"] == pytest.approx(float(relative))
    gates = seen.log_decay[2, 3] / 80
    assert head["half_life"] == pytest.approx(math.log(0.5) / float(gates.mean()))
    keys = seen.state_by_key[2, 3].sqrt()
    assert head["key_ratio"] == pytest.approx(float(keys.max() / keys.median()), rel=0.2)
    ranges = tables["ranges"].to_pylist()
    assert len(ranges) == 2 * 3 * 10 and {r["elements"] for r in ranges} == {4 * 8 * 16}
    units = tables["units"]
    assert units.schema.equals(UNIT_SCHEMA)
    assert units.num_rows == 2 * 3 * 4 * (16 if kind == "kda" else 1)
    if kind == "kda":
        one = [r for r in units.to_pylist() if (r["layer"], r["head"]) == (0, 1)]
        per_key = scans[0].seen.log_decay[0, 1, 5] / 80
        assert one[5]["half_life"] == pytest.approx(math.log(0.5) / float(per_key))
        mean = np.mean([r["deviation"] for r in one if r["policy"] == str(POLICIES[1])])
        assert mean == pytest.approx(heads[0, str(POLICIES[1]), 1]["deviation"])


def test_two_copies_have_ranges_of_their_own_and_channels_a_geometry():
    build, scans = observed(WindowedScan, stride=8)
    policies = [parse_policy(t) for t in ("conventional", "nvfp4 / fp16-sr L=4", "shared:fp8 L=8")]
    one = sample_inputs("kda", steps=48, rows=1, heads=2, dtype=torch.float32)
    inputs = one.rows(torch.zeros(3, dtype=torch.int64))
    scan = build(policies, torch.tensor([0]), layer=0, seed=0)
    scan.prefill(inputs.slice(0, 16))
    scan(inputs.slice(16, 48))
    tables = profile(scans, policies, stream=0)
    ranges = tables["ranges"].to_pylist()
    assert [(r["policy"], r["position"]) for r in ranges if r["copy"] == "read"] == [
        (str(policies[1]), t) for t in (8, 16, 24, 32)
    ]
    assert sum(r["copy"] == "recurrence" for r in ranges) == 3 * 4
    flushed = {r["copy"]: r["flushed"] for r in ranges if r["policy"] == str(policies[1])}
    assert flushed["read"] > 10 * flushed["recurrence"]  # FP4 against FP16
    _, heads, dv, dk = scan.seen.write_sum.shape
    assert tables["geometry"].num_rows == 3 * heads * (dv + dk)
    by_axis = {
        axis: np.mean([
            r["deviation"] for r in tables["geometry"].to_pylist()
            if (r["axis"], r["policy"], r["head"]) == (axis, str(policies[2]), 1)
        ])
        for axis in ("key", "value")
    }  # fmt: skip
    head = next(
        r for r in tables["heads"].to_pylist()
        if (r["policy"], r["head"]) == (str(policies[2]), 1)
    )  # fmt: skip
    assert by_axis["key"] == pytest.approx(by_axis["value"]) == pytest.approx(head["deviation"])
    parts = head["deviation_mean"] + head["deviation_variance"]
    assert parts == pytest.approx(head["deviation"])


def test_bias_of_a_write_is_told_from_its_spread():
    """A constant input leaves RTN in its dead band: every write errs alike; SR does not."""
    steps, dv = 512, 64
    ones = torch.ones(2, steps, 1, 1, dtype=torch.float64)
    values = torch.full((2, steps, 1, dv), 0.3, dtype=torch.float64)
    values[..., -1] = 0.01 * 32767
    decay = torch.full((2, steps, 1), math.log(0.99), dtype=torch.float64)
    inputs = OpInputs(q=ones, k=ones, v=values, log_decay=decay)
    policies = [parse_policy(f"conventional:int16@state-{r}") for r in ("rtn", "sr")]
    build, scans = observed(WindowedScan, stride=4, reference=None)
    scan = build(policies, torch.tensor([0]), layer=0, seed=0)
    state = torch.zeros(2, 1, dv, 1, dtype=torch.float64)
    state[:, :, -1] = 32767
    scan.start(state, inputs)
    scan(inputs)
    rtn, sr = profile(scans, policies, stream=0)["heads"].to_pylist()
    # 63 of 64 elements err by −0.3 at every write
    assert rtn["bias"] == pytest.approx(0.09 * 63 / 64, rel=1e-5)
    assert rtn["write"] == pytest.approx(rtn["bias"], rel=1e-5)
    # so the deviation is the bias times Σ γ, and independent errors explain little of it; Σ γ
    # counts the first store as well, which here is exact: some 0.3 %
    assert rtn["deviation"] == pytest.approx(rtn["biased"], rel=0.01)
    assert rtn["independent"] < 0.05 * rtn["deviation"]
    # in the band the deviation is its limit b/(1 − α), and stays
    assert rtn["bias_limit"] == pytest.approx(0.09 * 63 / 64 / 0.01**2, rel=1e-5)
    assert rtn["deviation_variance"] < 0.2 * rtn["deviation_mean"]
    assert rtn["variance_limit"] < 1e-4 * rtn["bias_limit"]
    assert sr["variance_limit"] == pytest.approx(sr["closed_form"], rel=0.2)
    # unbiased errors: b² is 0 within its sampling error, and their energies add up
    assert abs(sr["bias"]) < 0.1 * sr["write"]
    assert sr["deviation"] == pytest.approx(sr["independent"], rel=0.3)
    # the limit is nearly reached on average over 5 relaxation times
    assert sr["independent"] == pytest.approx(sr["closed_form"], rel=0.3)


def test_summary_line():
    scans = watched("gdn")
    tables = profile(scans, POLICIES, stream=3)
    names = [str(p) for p in POLICIES[1:]]
    tokens = pa.Table.from_pylist(
        [
            {"policy": name, "position": t, "nll": 2.0 + t / 100, "nll_reference": 2.0}
            for name in names
            for t in range(1, 401)
        ]
    )
    summary = propagation_summary({**tables, "tokens": tokens}, 400).to_pylist()
    assert [r["policy"] for r in summary] == names
    first, _ = summary
    assert (first["streams"], first["units"]) == (1, 8)
    assert first["excess_nll_first"] == pytest.approx(np.arange(1, 257).mean() / 100)
    assert first["excess_nll_last"] == pytest.approx(np.arange(145, 401).mean() / 100)
    heads = [r for r in tables["heads"].to_pylist() if r["policy"] == names[0]]
    ratio = sum(h["deviation"] for h in heads) / sum(h["independent"] for h in heads)
    assert first["independent_ratio"] == pytest.approx(ratio)
    assert first["contracted_ratio"] > first["independent_ratio"]
    assert first["spearman"] == pytest.approx(
        spearman(*(np.array([h[n] for h in heads]) for n in ("half_life", "deviation")))
    )
    assert first["oracle_ratio"] > 0 and 0 <= first["flushed"] < 1
    plain = profile(watched("mamba2"), POLICIES, stream=3)
    (row, _) = propagation_summary({**plain, "tokens": tokens}, 400).to_pylist()
    assert math.isnan(row["oracle_ratio"]) and row["contracted_ratio"] == row["independent_ratio"]


def test_shares_and_ranks():
    half_life = np.array([1.0, 2, 3, 4, 5, 6, 7, 8])
    error = np.array([1.0, 1, 1, 1, 1, 1, 3, 7])
    assert quarter_share(half_life, error) == 10 / 16
    assert spearman(half_life, half_life**3) == 1 and spearman(half_life, -half_life) == -1
    assert math.isnan(spearman(half_life, np.ones(8)))
    assert list(first_positions(100)) == list(range(1, 101))
    assert list(first_positions(4096)) == list(range(1, 257))


def test_too_short_a_run_says_so():
    build, scans = observed(WindowedScan, stride=8)
    inputs = sample_inputs("gdn", steps=6, rows=1, dtype=torch.float32)
    scan = build(POLICIES[1:2], torch.tensor([0]), layer=0, seed=0)
    scan.prefill(inputs.slice(0, 2))
    scan(inputs.slice(2, 6))
    with pytest.raises(ValueError, match="shorter than the stride"):
        profile(scans, POLICIES[1:2], 0)
