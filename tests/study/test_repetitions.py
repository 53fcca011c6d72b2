"""Several seeds of one policy in one study."""

import numpy as np
import pytest

from quantlab.metrics.summary import to_cube
from quantlab.replay.policy import parse_policy
from quantlab.study.run import run_kl
from quantlab.study.spec import KlSpec
from tests.study.fake import FakeBackend, make_spec
from tests.study.real import TinyBackend

SEEDS = ("shared:nvfp4-sr seed=4", "shared:nvfp4", "shared:nvfp4-sr seed=9")


def policies(*texts):
    return tuple(parse_policy(text) for text in texts)


def test_groups_are_policies_that_differ_in_their_seed_alone():
    spec = make_spec(policies=policies("shared:fp8-sr", *SEEDS, "shared:nvfp4-sr L=4 seed=4"))
    assert spec.repetitions == ((1, 3),)
    assert KlSpec.from_json(spec.to_json()) == spec


def test_each_seed_is_the_study_with_that_seed(tmp_path):
    options = {"model": "tiny", "tokens": 48, "streams": 2, "prompt": 19}
    backend = TinyBackend("qwen3_5")
    both = run_kl(KlSpec(policies=policies(*SEEDS), **options), tmp_path / "both", backend=backend)
    cube = to_cube(both.rows)
    of_mean = cube.values["kl_of_mean"]
    assert np.isnan(of_mean[1]).all() and np.isfinite(of_mean[[0, 2]]).all()
    assert (of_mean[0] == of_mean[2]).all()
    assert of_mean[0].mean() < cube.values["kl"][[0, 2]].mean()
    for index, seed in ((0, 4), (2, 9)):
        spec = KlSpec(policies=policies("shared:nvfp4-sr"), seed=seed, **options)
        alone = to_cube(run_kl(spec, tmp_path / str(seed), backend=backend).rows)
        # products of more rows add up in another order, and a rounding may flip
        mean, expected = cube.values["kl"][index].mean(), alone.values["kl"][0].mean()
        assert mean == pytest.approx(expected, rel=0.2)
        assert np.median(np.abs(cube.values["kl"][index] / alone.values["kl"][0] - 1)) < 0.01
    different = cube.values["kl"][0] / cube.values["kl"][2] - 1
    assert np.median(np.abs(different)) > 0.05


def test_a_diverged_seed_takes_the_mean_with_it(tmp_path):
    # the stand-in lets the second policy of stream 1 diverge at position 200
    spec = make_spec(policies=policies("shared:fp32", *SEEDS[::2]))
    cube = to_cube(run_kl(spec, tmp_path / "run", backend=FakeBackend()).rows)
    gone = cube.positions >= 200
    of_mean = cube.values["kl_of_mean"][1:, 1]
    assert np.isnan(of_mean[:, gone]).all() and np.isfinite(of_mean[:, ~gone]).all()
    assert np.isfinite(cube.values["kl"][2, 1]).all()
