"""Predictions of tiny random models on the real engine, small in everything."""

import numpy as np
import pyarrow.csv
import pytest

import quantlab.study.calibrate as calibrate
from quantlab.errors import UsageError
from quantlab.replay.policy import parse_policy
from quantlab.report.prediction import prediction_tables, write_prediction
from quantlab.report.table import plain
from quantlab.study.predict import calibration_tokens, load_prediction, run_prediction
from quantlab.study.run import Interrupted, run_kl
from quantlab.study.spec import KlSpec
from tests.study.real import SmallBytes, TinyBackend

TEXTS = (
    "shared:fp32",
    "shared:fp8-sr",
    "nvfp4 / fp16-sr",
    "shared:nvfp4 L=8",
    "conventional:int8@row-sr",
)


def make_spec(**changes):
    values = {
        "model": "tiny",
        "policies": tuple(parse_policy(text) for text in TEXTS),
        "tokens": 48,
        "streams": 2,
        "prompt": 24,
        "segment": 64,
    }
    return KlSpec(**{**values, **changes})


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(calibrate, "INJECTION_PROMPT", 12)
    monkeypatch.setattr(calibrate, "INJECTION_TOKENS", 40)


@pytest.fixture(scope="module")
def predictions(tmp_path_factory):
    """A finished prediction by family, made when it is first asked for."""
    made = {}

    def make(family):
        if family not in made:
            backend = TinyBackend(family)
            out = tmp_path_factory.mktemp("predicted") / "run"
            made[family] = (
                backend,
                run_prediction(make_spec(), out, tokens=128, texts=1, backend=backend),
            )
        return made[family]

    return make


@pytest.fixture
def done(predictions):
    return predictions("nemotron_h")


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_what_is_predicted_is_what_is_measured(family, predictions):
    _, result = predictions(family)
    compared = {(r["policy"], r["n"]): r for r in result.compared.to_pylist()}
    assert len(compared) == 4 * 3
    names = [str(p) for p in result.spec.policies]
    for name in names[1:]:
        row = compared[name, 48]
        assert row["counts"] and row["streams"] == 2
        assert row["predicted"] == pytest.approx(row["kept"] + row["fresh"])
        # one text of 128 tokens and 40 tokens of injections: the order of size; rounding to
        # nearest repeats its errors only until they have moved the state
        factor = 20 if name == names[3] else 5
        assert 1 / factor < row["ratio"] < factor, (name, row["ratio"])
    assert compared[names[2], 48]["fresh"] > 0.9 * compared[names[2], 48]["predicted"]
    assert compared[names[1], 48]["predicted"] > compared[names[1], 16]["predicted"]
    last = result.agreement.to_pylist()[-1]
    assert last["policies"] == 4 and last["spearman"] > 0.7
    # the propagation of error is right on the text that it was calibrated on
    of = [r for r in result.heads.to_pylist() if r["policy"] == names[1]]
    ratios = [r["predicted_error"] / r["decoded_error"] for r in of]
    assert 0.5 < np.median(ratios) < 2


def test_directory_tables_and_figure(done):
    _, result = done
    assert {p.name for p in result.path.iterdir()} >= {
        "spec.json", "run.json", "rows.parquet", "heads.parquet", "measured", "compared.csv",
        "agreement.csv",
    }  # fmt: skip
    assert pyarrow.csv.read_csv(result.path / "compared.csv").num_rows == 12
    text = "\n".join(plain(table) for table in prediction_tables(result))
    assert "conventional int8@row-sr" in text and "Kendall" in text
    assert [f.name for f in write_prediction(result)] == ["prediction.png", "prediction.svg"]
    again = load_prediction(result.path)
    assert again.predicted.equals(result.predicted)


def test_nothing_measured_enters_the_prediction(done, tmp_path):
    """Held against a run on other rounding draws, the prediction is the same to the last bit."""
    backend, result = done
    spec = make_spec()
    other = run_kl(make_spec(seed=9), tmp_path / "kl", backend=backend)
    held = run_prediction(
        spec, tmp_path / "run", tokens=128, texts=1, against=other.path, backend=backend
    )
    assert held.predicted.equals(result.predicted) and held.heads.equals(result.heads)
    assert held.measured == other.path and not (held.path / "measured").exists()
    assert not held.compared.equals(result.compared)


def test_an_interrupted_measurement_goes_on(done, tmp_path):
    backend, result = done

    class Stop:
        def start(self, total, done): ...

        def note(self, text): ...

        def advance(self, done):
            raise KeyboardInterrupt

    out = tmp_path / "run"
    keys = {"tokens": 128, "texts": 1, "backend": backend}
    with pytest.raises(Interrupted, match="--resume goes on"):
        run_prediction(make_spec(), out, measuring=Stop(), **keys)
    assert (out / "rows.parquet").exists()
    with pytest.raises(UsageError, match="holds another run: texts"):
        run_prediction(make_spec(), out, resume=True, **{**keys, "texts": 2})
    resumed = run_prediction(make_spec(), out, resume=True, **keys)
    assert resumed.compared.equals(result.compared)


def test_calibration_follows_the_measured_tokens():
    from quantlab.data import load_streams

    spec = make_spec(tokens=100)
    found = calibration_tokens(spec, 30, 2, SmallBytes())
    whole = load_streams("books", tokenizer=SmallBytes(), streams=2, tokens=500, prompt=24)
    begin = 24 + 100
    assert found.tokens.equal(whole.tokens[:, begin : begin + 24 + 30 + 1])


@pytest.mark.parametrize(
    ("changes", "keys", "message"),
    [
        ({"dtype": "bf16"}, {}, "far below what 16-bit activations resolve"),
        ({}, {"tokens": 20}, "injections take 52"),
        ({}, {"texts": 0}, "--texts must be positive"),
        ({"tokens": 149_900}, {}, "a stream of N tokens needs"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(changes, keys, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        run_prediction(
            make_spec(**changes), tmp_path / "run", backend=TinyBackend("qwen3_5"),
            **{"tokens": 128, "texts": 1, **keys},
        )  # fmt: skip
    assert not (tmp_path / "run").exists()
