"""A study on the real engine: resumed bit for bit, and what its rows must say."""

from dataclasses import replace

import numpy as np
import pytest

from quantlab.replay.policy import parse_policy
from quantlab.study.run import run_kl
from quantlab.study.spec import KlSpec
from tests.study.real import TinyBackend

POLICIES = ("shared:fp32", "shared:nvfp4-sr", "nvfp4 / fp16-sr", "conventional:fp8-sr")


def make_spec(**changes):
    values = {
        "model": "tiny",
        "policies": tuple(parse_policy(p) for p in POLICIES),
        "tokens": 136,
        "streams": 2,
        "prompt": 19,
        "segment": 64,
        "batch_rows": 5,  # one stream a batch
    }
    return KlSpec(**{**values, **changes})


class Killed(BaseException):
    pass


class KillAt:
    """Progress that dies at the count-th call."""

    def __init__(self, count):
        self.count = count

    def start(self, total, done): ...

    def note(self, text): ...

    def advance(self, done):
        self.count -= 1
        if not self.count:
            raise Killed


@pytest.fixture(scope="module", params=["qwen3_5", "nemotron_h"])
def unbroken(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("real") / "run"
    return request.param, run_kl(make_spec(), out, backend=TinyBackend(request.param))


def rows_bytes(result):
    return (result.path / "rows.parquet").read_bytes()


@pytest.mark.parametrize("count", [3, 7])
@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e9], ids=["saved", "unsaved"])
def test_killed_run_resumes_bit_for_bit(unbroken, tmp_path, count, checkpoint_seconds):
    family, whole = unbroken
    out = tmp_path / "run"
    arguments = {"backend": TinyBackend(family), "checkpoint_seconds": checkpoint_seconds}
    with pytest.raises(Killed):
        run_kl(make_spec(), out, progress=KillAt(count), **arguments)
    saved = list((out / "parts").glob("*.state.safetensors"))
    # the call that dies comes before its segment's save, so the second is the first to leave one
    assert bool(saved) == (checkpoint_seconds == 0)
    assert list((out / "parts").glob("*.parquet"))
    resumed = run_kl(make_spec(), out, resume=True, **arguments)
    assert rows_bytes(resumed) == rows_bytes(whole)


def test_rows_of_a_real_run(unbroken):
    _, whole = unbroken
    kl = whole.rows["kl"].to_numpy().reshape(len(POLICIES), 2, -1)
    assert np.isfinite(kl).all() and (kl >= 0).all()
    nvfp4, separate, conventional = kl[1:].mean(axis=(1, 2))
    assert nvfp4 > separate > 0 and conventional > 0
    # FP32 replay differs from FP32 decoding by rounding at most: 1e-6 relative in the logits
    assert kl[0].mean() < 1e-9
    assert whole.record["self_test"] and all(row["passed"] for row in whole.record["self_test"])
    assert whole.record["model"]["transformers"] and whole.record["model"]["op_implementation"]


def test_engines_agree(tmp_path):
    policies = tuple(parse_policy(p) for p in POLICIES[1:3])
    short = make_spec(tokens=48, streams=1, policies=policies, segment=None)
    backend = TinyBackend("nemotron_h")
    windowed = run_kl(short, tmp_path / "w", backend=backend)
    stepwise = run_kl(replace(short, engine="stepwise"), tmp_path / "s", backend=backend)
    # NLL of the reference is free of rounded states: FP32 noise only (logits of a few units)
    a, b = (r.rows["nll_reference"].to_numpy() for r in (stepwise, windowed))
    np.testing.assert_allclose(a, b, atol=1e-4)
    # KL of rounded states decorrelates in FP32; its mean over 48 positions hardly does
    for policy in range(2):
        a, b = (r.rows["kl"].to_numpy().reshape(2, -1)[policy].mean() for r in (stepwise, windowed))
        assert 1 / 1.5 < a / b < 1.5
