"""Claims judged by their rules, and the page that lists them."""

import math

import pytest

import quantlab.study.build as build
from quantlab.errors import UsageError
from quantlab.models.source import Source
from quantlab.replay.policy import parse_policy
from quantlab.report.claims import CLAIMS, Evidence, claims_table
from quantlab.report.digest import write_digest
from quantlab.study.ablate import correction_spec, rounding_spec, run_ablation, run_folding
from quantlab.study.propagate import run_propagation
from quantlab.study.spec import KlSpec
from quantlab_cli.main import main
from tests.study.fake import FakeBackend
from tests.study.real import TinyBackend


def rounding(fmt, n, ratio, **changes):
    row = {
        "format": fmt, "n": n, "ratio": ratio, "ratio_low": 0.9 * ratio, "ratio_high": 1.1 * ratio,
        "rtn_diverged": 0, "sr_diverged": 0, "streams": 4, "seeds": 3, "bias": 0.1, "sr": 1.0,
    }  # fmt: skip
    return {**row, **changes}


def window(policy, length, fall, base=1):
    return {
        "policy": policy, "n": 1024, "window": length, "base_window": base, "fall": fall,
        "fall_low": fall / 2, "fall_high": 2 * fall,
    }  # fmt: skip


def verdicts(evidence):
    table = claims_table([evidence])
    return {row[0]: (row[3], row[4]) for row in table.rows}


def find(found, start):
    (key,) = [text for text in found if text.startswith(start)]
    return found[key]


def test_without_runs_nothing_can_be_tested():
    for is_delta in (True, False):
        found = verdicts(Evidence(model="m", is_delta=is_delta))
        assert found and {verdict for _, verdict in found.values()} == {"cannot be tested"}
    assert len(claims_table([Evidence(model="m", is_delta=True)]).rows) < len(CLAIMS)


def test_rounding_rules():
    rows = [rounding("nvfp4", 1024, 0.5), rounding("fp8", 1024, 1.2)]
    found = verdicts(Evidence(model="m", is_delta=True, rounding=rows))
    assert find(found, "NVFP4: RTN gives") == ("0.5 (0.45 … 0.55) at 1K", "holds")
    assert find(found, "FP8: RTN gives")[1] == "does not hold"
    assert find(found, "FP8: the ratio crosses") == ("first above one at 1K", "holds")
    below = verdicts(Evidence(model="m", is_delta=True, rounding=[rounding("fp8", 1024, 0.9)]))
    assert find(below, "FP8: the ratio crosses") == (
        "ratio 0.9 at 1K, the last N", "cannot be tested",
    )  # fmt: skip
    assert find(found, "GDN: RTN drives")[1] == "cannot be tested"
    assert find(found, "SR contributes") == (
        "bias share of SR's KL at 1K: nvfp4 10%, fp8 10%", "holds",
    )  # fmt: skip
    long = [
        rounding("fp8", 8192, 0.9),
        rounding("fp8", 16384, 1.5),
        rounding("fp8", 131072, math.nan, rtn_diverged=2),
        rounding("nvfp4", 131072, math.nan, rtn_diverged=4, bias=0.5),
    ]
    found = verdicts(Evidence(model="m", is_delta=True, rounding=long))
    assert find(found, "FP8: the ratio crosses") == ("first above one at 16K", "holds")
    assert find(found, "GDN: RTN drives") == (
        "streams diverged: fp8: 2 of 4, nvfp4: 4 of 4", "holds",
    )  # fmt: skip
    assert find(found, "SR contributes")[1] == "does not hold"


def test_window_rules():
    rows = [
        window("shared fp8-sr", 16, 4.0), window("shared fp8-sr", 64, 70.0),
        window("fp8 / fp32", 64, 1 / 1.2, base=4), window("nvfp4 / fp32", 64, 1.1, base=4),
    ]  # fmt: skip
    found = verdicts(Evidence(model="m", is_delta=False, window=rows))
    assert find(found, "shared FP8 at L = 16") == ("4× (2 … 8) at 1K", "holds")
    assert find(found, "shared FP8: KL falls")[1] == "does not hold"
    assert find(found, "two copies") == ("fp8 / fp32 1.2×, nvfp4 / fp32 1.1×", "holds")


def test_propagation_rules():
    def row(policy, **figures):
        names = ("independent_ratio", "spearman", "quarter_share", "oracle_ratio", "key_ratio",
                 "value_ratio", "excess_nll_first", "excess_nll_last")  # fmt: skip
        return {"policy": policy, **dict.fromkeys(names, math.nan), **figures}

    rows = [
        row("shared:nvfp4-sr", independent_ratio=1.05),
        row("conventional:int6@row", spearman=0.4, excess_nll_first=0.01, excess_nll_last=0.05),
    ]
    delta, plain = (
        verdicts(Evidence(model="m", is_delta=is_delta, propagation=rows))
        for is_delta in (True, False)
    )
    assert find(delta, "delta rule, SR")[1] == "does not hold"
    assert find(plain, "Mamba-2, SR") == ("1.05", "holds")
    assert not any(text.startswith("Mamba-2, SR") for text in delta)
    assert find(plain, "half-life predicts") == ("0.4", "does not hold")
    assert find(plain, "INT6: excess NLL grows") == ("0.01 → 0.05 nats", "holds")
    assert find(delta, "without delta feedback")[1] == "cannot be tested"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    patch.setattr(build, "resolve", lambda name: Source(name=name, origin="zoo", path=folder))
    identity = {"op": "gdn", "dtype": "float32"}
    fields = {"tokens": 64, "streams": 2, "prompt": 8, "device": "cpu"}
    for name, make in (("rounding", rounding_spec), ("correction", correction_spec)):
        spec = make("tiny-gdn", **fields)
        run_ablation(name, spec, folder / name, backend=FakeBackend(identity=identity))
    patch.undo()
    watched = KlSpec(
        model="tiny-gdn",
        policies=(parse_policy("shared:nvfp4-sr"),),
        tokens=32,
        streams=1,
        prompt=9,
    )
    run_propagation(watched, folder / "watched", backend=TinyBackend("qwen3_5"))
    run_folding("nvfp4", windows=8, out=folder / "folding.csv")
    return folder


def test_page_is_made_of_the_runs(runs, tmp_path, capsys):
    introduction = tmp_path / "intro.md"
    introduction.write_text("# Title\n\nWhat this is.\n")
    paths = [str(runs / name) for name in ("rounding", "correction", "watched")]
    options = ["-o", str(tmp_path / "out"), "--introduction", str(introduction)]
    folding = ["--folding", str(runs / "folding.csv")]
    assert main(["ablate", "digest", *paths, *options, *folding]) == 0
    page = tmp_path / "out" / "README.md"
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text()
    assert text.startswith("# Title\n\nWhat this is.\n\n## Claims\n\n| claim | source | model |")
    for title in ("nearest against stochastic", "corrections folded", "drift of stored states"):
        assert f"## tiny-gdn: {title}" in text
    assert "saturates" in text and "float32; " in text
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {
        "rounding-tiny-gdn.csv", "rounding-tiny-gdn-rounding.svg", "propagation-tiny-gdn-heads.svg",
        "folding.csv",
    }  # fmt: skip
    for name in names:
        assert name == "README.md" or name.endswith(".csv") or f"({name})" in text


def test_runs_that_are_none_or_twice(runs, tmp_path):
    with pytest.raises(UsageError, match="the same rounding run as"):
        write_digest([runs / "rounding"] * 2, tmp_path, introduction="")
    with pytest.raises(UsageError, match="no finished run"):
        write_digest([runs], tmp_path, introduction="")
