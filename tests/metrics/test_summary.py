"""Curves from rows: windows, quantiles, intervals, diverged and unfinished streams."""

import numpy as np
import pyarrow as pa
import pytest

from quantlab.metrics.positions import lengths, measured_positions, window
from quantlab.metrics.summary import bootstrap, summarise


def make_rows(kl, positions, *, names=None, diverged=None):
    """Rows of dense [policies, streams, n] KL; NLL of the reference 1, of the policy 1 + kl/2."""
    policies, streams, n = kl.shape
    names = names or [f"policy {i}" for i in range(policies)]
    diverged = np.zeros(kl.shape, bool) if diverged is None else diverged
    flat = kl.ravel()
    return pa.table(
        {
            "policy": np.repeat(names, streams * n),
            "stream": np.tile(np.repeat(np.arange(streams), n), policies),
            "position": np.tile(positions, policies * streams),
            "kl": flat,
            "nll": 1 + flat / 2,
            "nll_reference": np.ones(flat.size),
            "top1_agrees": flat < 1,
            "diverged": diverged.ravel(),
        }
    )


@pytest.fixture
def cube():
    positions = np.asarray(measured_positions(2000))
    kl = np.random.default_rng(0).gamma(0.5, 1.0, size=(3, 4, len(positions)))
    return kl, positions


def column(table, policy, n, name):
    mask = [
        p == policy and m == n
        for p, m in zip(*(table[c].to_pylist() for c in ("policy", "n")), strict=True)
    ]
    return table[name].to_numpy()[np.asarray(mask)].item()


def test_kl_at_n_is_the_mean_over_streams_and_the_window(cube):
    kl, positions = cube
    got = summarise(make_rows(kl, positions), lengths(2000))
    assert got.num_rows == 3 * len(lengths(2000))
    for n in lengths(2000):
        inside = np.isin(positions, list(window(n)))
        part = kl[1][:, inside]
        assert part.shape[1] == min(n, 256)
        assert column(got, "policy 1", n, "kl") == pytest.approx(part.mean(), rel=1e-12)
        assert column(got, "policy 1", n, "kl_p99") == pytest.approx(
            np.quantile(part, 0.99), rel=1e-12
        )
        assert column(got, "policy 1", n, "kl_max") == part.max()
        assert column(got, "policy 1", n, "kl_median") == pytest.approx(np.median(part))
        assert column(got, "policy 1", n, "excess_nll") == pytest.approx(part.mean() / 2)
        assert column(got, "policy 1", n, "top1_agreement") == (part < 1).mean()


def test_order_of_rows_does_not_matter_but_policies_keep_theirs(cube):
    kl, positions = cube
    rows = make_rows(kl, positions, names=["z", "a", "m"])
    # shuffle all but the first row of each policy's block order
    order = np.concatenate(
        [np.random.default_rng(1).permutation(kl[0].size) + i * kl[0].size for i in range(3)]
    )
    got, shuffled = summarise(rows, lengths(2000)), summarise(rows.take(order), lengths(2000))
    for name in got.column_names:
        np.testing.assert_array_equal(got[name].to_numpy(), shuffled[name].to_numpy())
    assert list(dict.fromkeys(got["policy"].to_pylist())) == ["z", "a", "m"]


def test_floor_is_the_fp32_replays_own_kl(cube):
    kl, positions = cube
    got = summarise(make_rows(kl, positions), lengths(2000), floor="policy 0")
    assert column(got, "policy 2", 2000, "floor") == column(got, "policy 0", 2000, "kl")
    assert np.isnan(summarise(make_rows(kl, positions), [2000])["floor"].to_numpy()).all()


def test_diverged_stream_leaves_no_mean(cube):
    kl, positions = cube
    kl, bad = kl.copy(), np.zeros(kl.shape, bool)
    bad[1, 2, positions >= 900] = True
    kl[bad] = np.nan
    got = summarise(make_rows(kl, positions, diverged=bad), lengths(2000))
    assert column(got, "policy 1", 512, "diverged") == 0
    assert np.isfinite(column(got, "policy 1", 512, "kl"))
    assert column(got, "policy 1", 1024, "diverged") == 1
    for name in ("kl", "kl_low", "kl_p99", "excess_nll", "top1_agreement"):
        assert np.isnan(column(got, "policy 1", 1024, name))
    assert np.isfinite(column(got, "policy 0", 1024, "kl"))


def test_unfinished_run_uses_the_streams_it_has(cube):
    kl, positions = cube
    rows = make_rows(kl, positions)
    there = (rows["stream"].to_numpy() < 1) | (
        (rows["stream"].to_numpy() < 2) & (rows["position"].to_numpy() <= 256)
    )
    got = summarise(rows.filter(pa.array(there)), lengths(2000))
    assert column(got, "policy 0", 256, "streams") == 2
    assert column(got, "policy 0", 512, "streams") == 1
    assert np.isnan(column(got, "policy 0", 512, "kl_low"))
    assert column(got, "policy 0", 512, "kl") == pytest.approx(
        kl[0, 0, np.isin(positions, list(window(512)))].mean()
    )
    assert summarise(rows.slice(0, 0), lengths(2000)).num_rows == 0
    assert summarise(rows.slice(0, 3), lengths(2000)).num_rows == 0


def test_bootstrap_is_deterministic_and_brackets_the_mean():
    x = np.random.default_rng(2).normal(5, 1, size=(2, 6))
    low, high = bootstrap(x)
    again = bootstrap(x)
    assert (low == again[0]).all() and (high == again[1]).all()
    assert (low < x.mean(1)).all() and (x.mean(1) < high).all()


def test_bootstrap_matches_the_normal_limit():
    # 200 streams: the percentile interval tends to mean ± 1.96 sd/sqrt(S); 10,000 resamples leave
    # its ends a standard error of about 0.03 sd/sqrt(S)
    x = np.random.default_rng(3).normal(size=(1, 200))
    low, high = bootstrap(x)
    half = 1.96 * x.std() / np.sqrt(200)
    assert (high - low).item() / 2 == pytest.approx(half, rel=0.06)


def test_bootstrap_resamples_streams_not_positions(cube):
    # streams that differ, each constant within itself: resampling positions would see no spread
    positions = np.asarray(measured_positions(16))
    kl = np.broadcast_to(np.array([1.0, 2.0, 3.0, 4.0])[None, :, None], (1, 4, 16)).copy()
    got = summarise(make_rows(kl, positions), [16])
    assert got["kl_low"].to_numpy().item() < 1.9 and got["kl_high"].to_numpy().item() > 3.1
