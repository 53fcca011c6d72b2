"""Claims judged by their rules, and the page that lists them."""

import json
import math
import re

import pyarrow as pa
import pytest

import quantlab.study.build as build
from quantlab.errors import UsageError
from quantlab.models.source import Source
from quantlab.replay.policy import parse_policy
from quantlab.report.claims import CLAIMS, Evidence, claims_table
from quantlab.report.digest import write_digest
from quantlab.report.document import Document, Figure, Section, to_html
from quantlab.report.load import load_shown, unit_order
from quantlab.report.shown import command, write_run_page
from quantlab.study.ablate import correction_spec, rounding_spec, run_ablation, run_folding
from quantlab.study.propagate import run_propagation
from quantlab.study.run import run_kl
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


def verdicts(evidence, paper="replayssm", folding=()):
    table = claims_table(paper, [evidence], folding)
    return {row[0]: (row[3], row[4]) for row in table.rows if row[2] in (evidence.model, "–")}


def find(found, start):
    (key,) = [text for text in found if text.startswith(start)]
    return found[key]


def kl(policy, n, value, floor=1e-5, dtype="bfloat16"):
    return {"policy": str(parse_policy(policy)), "n": n, "kl": value, "floor": floor,
            "dtype": dtype}  # fmt: skip


@pytest.mark.parametrize("paper", CLAIMS)
@pytest.mark.parametrize("op", ["gdn", "kda", "mamba2"])
def test_without_runs_nothing_is_judged(paper, op):
    table = claims_table(paper, [Evidence(model="m", op=op)])
    assert {row[4] for row in table.rows if row[2] == "m"} == {"not measured"}
    assert "cannot be tested here" in {row[4] for row in table.rows}
    assert len(table.rows) < len(CLAIMS[paper])  # some are about other models
    texts = [claim.text for claim in CLAIMS[paper]]
    assert len(set(texts)) == len(texts)
    assert all((claim.judge is None) != (claim.once is None) for claim in CLAIMS[paper])


def test_kl_rules():
    rows = [
        kl("shared:nvfp4-sr", 16, 1e-3), kl("shared:nvfp4-sr", 131072, 0.04),
        kl("shared:fp8-sr", 16, 1e-4), kl("shared:fp8-sr", 131072, 5e-3),
        kl("fp8/fp32", 16, 1e-4), kl("fp8/fp32", 131072, 1.2e-4),
        kl("nvfp4/fp32", 16, 1e-3), kl("nvfp4/fp32", 131072, 1e-3, floor=4e-5),
        kl("nvfp4/fp16-sr", 16, 1.1e-3), kl("nvfp4/fp16-sr", 131072, 2e-3),
        kl("nvfp4/fp32", 131072, 1.0, dtype="float32"),  # a later run of the same policy
    ]  # fmt: skip
    found = verdicts(Evidence(model="m", op="gdn", kl=rows))
    assert find(found, "shared NVFP4 lies 36×") == ("0.04 ÷ 1.00e-3 = 40× at 128K", "holds")
    assert find(found, "the error of a shared") == (
        "fp8 50×, nvfp4 40× from 16 to 128K", "holds",
    )  # fmt: skip
    assert find(found, "delta rule: with two")[1] == "holds"
    assert find(found, "FP16-SR recurrence") == ("1 of 2 points, worst 2×", "holds")
    assert find(found, "NVFP4 reads") == ("1.00e-3 ÷ 1.00e-4 = 10×", "holds")
    assert find(found, "the floor") == ("1.00e-5 at 128K (bfloat16)", "holds")
    plain = verdicts(Evidence(model="m", op="mamba2", kl=rows))
    assert find(plain, "Mamba-2: with two") == (
        "fp8 / fp32 1.2×, nvfp4 / fp32 1× from 16 to 128K", "does not hold",
    )  # fmt: skip
    short = verdicts(Evidence(model="m", op="gdn", kl=[r for r in rows if r["n"] == 16]))
    assert find(short, "shared NVFP4 lies")[1] == "not measured"


def test_copies_rules():
    def row(way, first, inputs="recorded", layer=0):
        return {"inputs": inputs, "layer": layer, "corrections": way, "windows": 8192,
                "first_difference": first}  # fmt: skip

    rows = [row("rederive", -1), row("rederive", -1, "model"), row("fold", 1),
            row("rederive", 3, "model", layer=1)]  # fmt: skip
    start = "corrections derived again: the recurrence copy"
    found = verdicts(Evidence(model="m", op="gdn", copies=rows))
    assert find(found, start) == (
        "derived again: identical over 8,192 windows; folded: differ from window 1", "holds",
    )  # fmt: skip
    found = verdicts(Evidence(model="m", op="gdn", copies=[*rows, row("rederive", 7)]))
    assert find(found, start)[1] == "does not hold"
    found = verdicts(Evidence(model="m", op="gdn", copies=[*rows, row("fold", -1)]))
    assert find(found, start)[1] == "does not hold"


def test_claims_that_need_no_model():
    points = [
        {"decay": 0.9, "outcome": "harmless"}, {"decay": 0.999, "outcome": "saturates"},
        {"decay": 1.0, "outcome": "saturates"},
    ]  # fmt: skip
    found = verdicts(Evidence(model="m", op="gdn"), folding=points)
    assert find(found, "folded, the error sums") == (
        "decay < 1: harmless, saturates; decay 1: saturates", "does not hold",
    )  # fmt: skip
    points[-1]["outcome"] = "grows"
    found = verdicts(Evidence(model="m", op="gdn"), folding=points)
    assert find(found, "folded, the error sums")[1] == "holds"
    assert find(found, "a delta rule at β") == (
        "3.98 against 31.7 (dk = 32, isotropic keys; simulated in tests)", "holds",
    )  # fmt: skip
    assert find(found, "replay moves 0.58")[1] == "holds"


def test_rounding_rules():
    rows = [rounding("nvfp4", 1024, 0.5), rounding("fp8", 1024, 1.2)]
    found = verdicts(Evidence(model="m", op="gdn", rounding=rows))
    assert find(found, "NVFP4: RTN gives") == ("0.5 (0.45 … 0.55) at 1K", "holds")
    assert find(found, "FP8: RTN gives")[1] == "does not hold"
    assert find(found, "FP8: the ratio crosses") == ("first above one at 1K", "holds")
    below = verdicts(Evidence(model="m", op="gdn", rounding=[rounding("fp8", 1024, 0.9)]))
    assert find(below, "FP8: the ratio crosses") == (
        "ratio 0.9 at 1K, the last N", "not measured",
    )  # fmt: skip
    assert find(found, "GDN: RTN drives")[1] == "not measured"
    assert find(found, "SR contributes") == (
        "bias share of SR's KL at 1K: nvfp4 10%, fp8 10%", "holds",
    )  # fmt: skip
    long = [
        rounding("fp8", 8192, 0.9),
        rounding("fp8", 16384, 1.5),
        rounding("fp8", 131072, math.nan, rtn_diverged=2),
        rounding("nvfp4", 131072, math.nan, rtn_diverged=4, bias=0.5),
    ]
    found = verdicts(Evidence(model="m", op="gdn", rounding=long))
    assert find(found, "FP8: the ratio crosses") == ("first above one at 16K", "holds")
    assert find(found, "GDN: RTN drives") == (
        "streams diverged: fp8: 2 of 4, nvfp4: 4 of 4", "holds",
    )  # fmt: skip
    assert find(found, "SR contributes")[1] == "does not hold"
    rising = [*rows, rounding("fp8", 32768, 1.3), rounding("nvfp4", 32768, 0.4),
              rounding("fp16", 32768, 1.9)]  # fmt: skip
    found = verdicts(Evidence(model="m", op="gdn", rounding=rising))
    assert find(found, "FP8, NVFP4: RTN loses") == (
        "fp8 1.2 → 1.3, nvfp4 0.5 → 0.4 at 32K", "does not hold",
    )  # fmt: skip
    assert find(found, "FP16, GDN")[1] == "holds"
    plain = verdicts(Evidence(model="m", op="mamba2", rounding=rising))
    assert find(plain, "FP16, Mamba-2") == ("1.9 (1.71 … 2.09) at 32K", "holds")


def test_window_rules():
    rows = [
        window("shared fp8-sr", 16, 4.0), window("shared fp8-sr", 64, 70.0),
        window("fp8 / fp32", 64, 1 / 1.2, base=4), window("nvfp4 / fp32", 64, 1.1, base=4),
        window("shared nvfp4-sr", 64, 23.0),
    ]  # fmt: skip
    found = verdicts(Evidence(model="m", op="mamba2", window=rows))
    assert find(found, "shared FP8: KL falls 3.8×") == (
        "4× (2 … 8) at 1K, the last N", "not measured",
    )  # fmt: skip
    assert find(found, "shared FP8: KL falls 12×")[1] == "does not hold"
    assert find(found, "shared NVFP4: KL falls 23×") == ("23× (11.5 … 46) at 1K", "holds")
    assert find(found, "two copies") == ("fp8 / fp32 1.2×, nvfp4 / fp32 1.1× at 1K", "holds")
    late = [{**row, "n": 131072} for row in rows]
    found = verdicts(Evidence(model="m", op="mamba2", window=[*rows, *late]))
    assert find(found, "shared FP8: KL falls 3.8×") == ("4× (2 … 8) at 128K", "holds")
    assert find(found, "shared FP8: KL falls 12×")[0].endswith("at 1K")


def test_propagation_rules():
    def row(policy, **figures):
        names = ("independent_ratio", "spearman", "quarter_share", "oracle_ratio", "key_ratio",
                 "value_ratio", "excess_nll_first", "excess_nll_last", "relative", "probe_left",
                 "oracle_left")  # fmt: skip
        return {"policy": policy, **dict.fromkeys(names, math.nan), **figures}

    rows = [
        row("shared:nvfp4-sr", independent_ratio=1.05),
        row(
            "conventional:int6@row",
            spearman=0.4,
            excess_nll_first=0.01,
            excess_nll_last=0.05,
            probe_left=0.1,
            oracle_left=0.2,
        ),
        row("nvfp4/fp32", relative=1e-13),
    ]
    delta, plain = (
        verdicts(Evidence(model="m", op=op, propagation=rows))
        | verdicts(Evidence(model="m", op=op, propagation=rows), "delta-rule")
        for op in ("gdn", "mamba2")
    )
    assert find(delta, "delta rule, SR")[1] == "does not hold"
    assert find(plain, "Mamba-2, SR") == ("1.05", "holds")
    assert not any(text.startswith("Mamba-2, SR") for text in delta)
    assert find(plain, "half-life predicts") == ("0.4", "does not hold")
    assert find(plain, "INT6: excess NLL grows") == ("0.01 → 0.05 nats", "holds")
    assert find(delta, "without delta feedback")[1] == "not measured"
    assert find(delta, "corrections derived again: read errors") == ("1.00e-13", "holds")
    assert find(delta, "the transition has norm") == (
        "share of one injection left: 0.1, by the gates alone 0.2", "holds",
    )  # fmt: skip
    assert not any(text.startswith("KDA") for text in delta)


def test_order_of_units_and_of_formats():
    rows = [
        kl(f"conventional:{name}", 1024, value)
        for name, value in (("bf16", 1e-6), ("int8@row", 1e-4), ("fp8", 1e-3), ("int4@row", 1e-2))
    ]
    evidence = Evidence(model="m", op="kda", kl=rows, order={"conventional int6@row": 0.97})
    found = verdicts(evidence, "delta-rule")
    assert find(found, "units rank alike") == ("0.97 between two books", "holds")
    assert find(found, "uniform formats") == (
        "KL at 1K: bf16 1.00e-6, int8@row 1.00e-4, fp8 1.00e-3, int4@row 0.01", "holds",
    )  # fmt: skip
    rows[1]["kl"] = 0.5
    found = verdicts(evidence, "delta-rule")
    assert find(found, "uniform formats")[1] == "does not hold"
    units = pa.table(
        {"policy": [str(parse_policy("conventional:int6@row"))] * 8, "stream": [0] * 4 + [1] * 4,
         "deviation": [1.0, 2.0, 3.0, 4.0, 1.0, 3.0, 2.0, 4.0]}
    )  # fmt: skip
    assert unit_order(units) == {"conventional int6@row": pytest.approx(0.8)}


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
    head = "# Title\n\nWhat this is.\n\n## Claims of ReplaySSM (arXiv 2610.13778)\n\n| claim |"
    assert text.startswith(head) and "## Claims on delta-rule states" in text
    for title in ("nearest against stochastic", "corrections folded", "drift of stored states"):
        assert f"## tiny-gdn: {title}" in text
    assert "saturates" in text and "float32; " in text
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {
        "rounding-tiny-gdn.csv", "rounding-tiny-gdn-rounding.svg", "propagation-tiny-gdn-heads.svg",
        "folding.csv", "index.html",
    }  # fmt: skip
    for name in names - {"README.md", "index.html"}:
        assert f"({name})" in text, name
    html = (tmp_path / "out" / "index.html").read_text()
    assert html.count("<svg") == text.count("![") > 0
    assert "<h1>Title</h1>" in html and "<script" not in html and "src=" not in html
    links = re.findall(r'(?:href|url)[=(]"?([^")]+)', html)
    assert links and all(link in names or link.startswith("#") for link in links)
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert '<td class="not-measured">not measured</td>' in html


def test_runs_that_are_none_or_twice(runs, tmp_path):
    with pytest.raises(UsageError, match="the same rounding run as"):
        write_digest([runs / "rounding"] * 2, tmp_path, introduction="")
    with pytest.raises(UsageError, match="holds no run of kl, ablate"):
        write_digest([runs], tmp_path, introduction="")


@pytest.mark.parametrize("name", ["rounding", "watched"])
def test_every_run_has_a_page(runs, name, capsys):
    files = {path.name for path in write_run_page(load_shown(runs / name))}
    assert {"report.md", "index.html"} < files and any(f.endswith(".png") for f in files)
    html = (runs / name / "index.html").read_text()
    assert "<svg" in html and "<script" not in html
    text = (runs / name / "report.md").read_text()
    assert text.startswith("# tiny-gdn: ") and text.count("## ") == 1
    for linked in re.findall(r"\]\(([^)]+)\)", text):
        assert (runs / name / linked).exists(), linked
    (runs / name / "index.html").unlink()
    assert main(["report", str(runs / name), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["files"][-1].endswith("index.html") and (runs / name / "index.html").exists()


def test_a_kl_study_is_shown_with_the_others(runs, tmp_path):
    fields = {"tokens": 32, "streams": 2, "prompt": 8}
    policies = tuple(parse_policy(p) for p in ("shared:fp32", "shared:nvfp4-sr", "nvfp4/fp32"))
    spec = KlSpec(model="tiny-gdn", policies=policies, **fields)
    identity = {"op": "gdn", "dtype": "bfloat16"}
    run_kl(spec, tmp_path / "kl", backend=FakeBackend(identity=identity))
    (tmp_path / "kl" / "kl.svg").write_text("<svg></svg>")  # drawn already
    write_digest([tmp_path / "kl", runs / "watched"], tmp_path / "out", introduction="# T")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "## tiny-gdn: KL from FP32-state decoding" in text
    assert (tmp_path / "out" / "kl-tiny-gdn.csv").exists()
    assert "NVFP4 reads cost 17 times" in text


def test_figures_on_one_page_share_no_id():
    inside = '<clipPath id="clip1"/><g clip-path="url(#clip1)"/><a id="clip10" fill="url(#g)"/>'
    svg = f"<svg>{inside}</svg>"
    section = Section(
        title="t", figures=[Figure(name=f"{n}.svg", text=n, svg=svg) for n in ("a", "b")]
    )
    html = to_html(Document(introduction="# T <b>\n\nA `x < y`.\n\n    a & b", sections=[section]))
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == 4 == len(set(ids))
    used = re.findall(r"url\(#([^)]+)\)", html)
    assert [name for name in used if name != "g"] == ["s0f0-clip1", "s0f1-clip1"]
    assert "<h1>T &lt;b&gt;</h1>" in html and "<code>x &lt; y</code>" in html
    assert "<pre>a &amp; b</pre>" in html


def test_commands_show_what_decides_rows():
    given = ["quantlab", "kl", "-M", "m", "-o", "/x/y", "-q", "--policy", "fp8 / fp32", "--resume"]
    shown = "quantlab kl -M m --policy 'fp8 / fp32'"
    assert command([{"command": given}]) == command([{"command": [*given, "--out=/z"]}]) == shown
    assert command([]).startswith("from Python")
