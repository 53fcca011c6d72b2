"""Pages of predictions and of compared recurrence copies, from rows that are made up."""

import json
import re

import pyarrow as pa
import pyarrow.csv
import pytest

from quantlab.analysis.comparison import PREDICTION_SCHEMA
from quantlab.analysis.copies import COPIES_SCHEMA
from quantlab.errors import UsageError
from quantlab.replay.policy import parse_policy
from quantlab.report.copies import copies_figure
from quantlab.report.digest import write_digest
from quantlab.report.load import kind_of
from quantlab.report.prediction import FACTOR, prediction_figure
from quantlab.study.predict import HEAD_SCHEMA, load_prediction
from quantlab.study.run import run_kl
from quantlab.study.spec import KlSpec
from quantlab.study.store import RunDirectory
from quantlab_cli.main import main
from quantlab_cli.report import page_of
from tests.study.fake import FakeBackend

MODEL = {"op": "gdn", "dtype": "float32"}
MADE = {"git": None, "device": "cpu"}
POLICIES = tuple(parse_policy(p) for p in ("nvfp4/fp16-sr", "shared:fp16-sr", "shared:fp32"))
SPEC = KlSpec(model="tiny-gdn", policies=POLICIES, tokens=32, streams=2, prompt=8)
COMMAND = ["quantlab", "predict", "--against", "/somewhere/runs/kl-gdn", "-o", "/somewhere/else"]


def write_run(path, record, tables, state="finished"):
    directory = RunDirectory(path)
    directory.prepare(resume=False)
    directory.write_json(directory.spec_file, {"model": MODEL, "made_with": MADE, **record})
    session = {"command": COMMAND, "seconds": 1.0, "state": state}
    directory.write_json(directory.run_file, {"state": state, "sessions": [session]})
    for name, table in tables.items():
        directory.write_table(path / f"{name}.parquet", table)


def copies_row(layer, corrections, read, relative, inputs="model"):
    return {
        "inputs": inputs, "layer": layer, "heads": 2, "read": read, "against": "float32",
        "recur": "float16-sr", "corrections": corrections, "window": 16, "windows": 4,
        "first_difference": 1 if relative else -1, "differing": 4 if relative else 0,
        "relative": relative,
    }  # fmt: skip


COPIES = pa.Table.from_pylist(
    [
        copies_row(0, "rederive", "float16", 0.0, inputs="recorded"),
        copies_row(0, "fold", "float16", 0.03, inputs="recorded"),
        copies_row(1, "rederive", "float16", 0.004),
        copies_row(1, "fold", "int8@row", 0.02),
    ],
    schema=COPIES_SCHEMA,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    streams = {"streams": [{"name": "one text"}]}
    record = {"study": "copies", "spec": SPEC.to_json(), "in_model": 64, "data": streams}
    write_run(folder / "copies", record, {"rows": COPIES})
    measured = run_kl(SPEC, folder / "kl", backend=FakeBackend(identity=MODEL))
    kl = {(r["policy"], r["n"]): r["kl"] for r in measured.summary.to_pylist()}
    rows = [
        {"policy": policy, "n": n, "predicted": 1.5 * value, "kept": 1.5 * value, "fresh": 0.0}
        for (policy, n), value in kl.items()
    ]
    head = dict.fromkeys(HEAD_SCHEMA.names, 1.0) | {"layer": 0, "head": 0}
    tables = {
        "rows": pa.Table.from_pylist(rows, schema=PREDICTION_SCHEMA),
        "heads": pa.Table.from_pylist(
            [{**head, "policy": str(p), "write": 0.1**i} for i, p in enumerate(POLICIES)],
            schema=HEAD_SCHEMA,
        ),
    }
    record = {"study": "predict", "spec": SPEC.to_json(), "tokens": 1024, "texts": 1,
              "against": str(folder / "kl"), "data": streams}  # fmt: skip
    write_run(folder / "prediction", record, tables)
    write_run(folder / "begun", record, tables, state="running")
    return folder


EXPECTED = {
    "copies": ("does what is read change", {"copies.csv", "copies.png", "copies.svg"}),
    "prediction": (
        "KL predicted from calibration alone",
        {"compared.csv", "agreement.csv", "prediction.png", "prediction.svg"},
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_report_draws_the_run_again(runs, name, capsys):
    title, expected = EXPECTED[name]
    path = runs / name
    assert main(["report", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["study"] == name and document["files"][-1].endswith("index.html")
    assert {p.name for p in path.iterdir()} >= expected | {"report.md", "index.html"}
    text, html = (path / "report.md").read_text(), (path / "index.html").read_text()
    assert text.startswith(f"# tiny-gdn: {title}")
    if name == "prediction":
        made = "2 streams of books, prompt 8, float32, calibrated on 1 other text of 1,024 tokens"
        assert f"\n{made}; 1 s on cpu" in text
    linked = re.findall(r"\]\(([^)]+)\)", text)
    assert set(linked) == {f for f in expected if not f.endswith(".png")}
    assert html.count("<svg") == 1 and "<script" not in html and "src=" not in html
    links = re.findall(r'(?:href|url)[=(]"?([^")]+)', html)
    assert all(link in expected or link.startswith("#") for link in links)
    assert "    quantlab predict --against kl-gdn\n" in text and "/somewhere" not in text + html
    before = (path / "index.html").read_bytes()
    assert page_of(path, wanted=False) == []
    assert page_of(path, wanted=True)[-1].read_bytes() == before


def test_predicted_figure(runs):
    result = load_prediction(runs / "prediction")
    layers = prediction_figure(result).to_dict()["layer"]
    band, equal, lines, _, bars, marks = (layer["data"]["values"] for layer in layers)
    assert all(p["high"] / p["predicted"] == p["predicted"] / p["low"] == FACTOR for p in band)
    assert all(p["measured"] == p["predicted"] for p in equal)
    counted = [r for r in result.compared.to_pylist() if r["counts"]]
    assert len(lines) == len(counted) == 4 and bars == marks
    assert [p["n"] for p in marks] == [32, 32]
    for point, row in zip(lines, counted, strict=True):
        assert point["predicted"] == pytest.approx(1.5 * row["measured"])
        assert point["low"] < point["measured"] < point["high"]
        assert point["predicted"] / point["low"] == pytest.approx(row["ratio_high"])
    domain = layers[3]["encoding"]["x"]["scale"]["domain"]
    assert all(domain[0] <= p["low"] and p["high"] <= domain[1] for p in bars)


def test_nothing_above_the_floor_is_no_figure(runs):
    result = load_prediction(runs / "prediction")
    table = result.compared
    none = pa.array([False] * len(table))
    table = table.set_column(table.schema.get_field_index("counts"), "counts", none)
    object.__setattr__(result, "compared", table)
    assert prediction_figure(result) is None


def test_copies_that_never_differ_are_hollow_and_below_all_others():
    rows = [*COPIES.to_pylist(), copies_row(2, "fold", "int8@row", float("nan"))]
    table = pa.Table.from_pylist(rows, schema=COPIES_SCHEMA)
    figure = copies_figure(table, title="t", subtitle="s").to_dict()
    filled, hollow = figure["layer"]
    assert filled["mark"]["filled"] and not hollow["mark"]["filled"]
    (same,) = hollow["data"]["values"]
    assert (same["place"], same["first"], same["relative"]) == ("recorded 0", "never", "0")
    others = {p["place"] + p["corrections"]: p["y"] for p in filled["data"]["values"]}
    assert others["model 1folded"] == 0.02 and same["y"] < min(others.values())
    assert others["model 2folded"] == max(others.values())
    domain = figure["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert domain[0] < same["y"] and max(others.values()) < domain[1]
    assert "not finite" in figure["title"]["subtitle"][1]
    finite = copies_figure(COPIES, title="t", subtitle="s").to_dict()
    assert "not finite" not in finite["title"]["subtitle"][1]
    identical = copies_figure(COPIES.slice(0, 1), title="t", subtitle="s").to_dict()
    assert len(identical["layer"]) == 1


def test_digest_takes_both(runs, tmp_path):
    page = write_digest([runs / "prediction", runs / "copies"], tmp_path, introduction="# T")
    text = page.read_text()
    for title, _ in EXPECTED.values():
        assert f"\n## tiny-gdn: {title}" in text
    names = {
        "prediction-tiny-gdn.csv", "prediction-tiny-gdn-agreement.csv", "copies-tiny-gdn.csv",
        "prediction-tiny-gdn-prediction.svg", "copies-tiny-gdn-copies.svg",
    }  # fmt: skip
    assert {p.name for p in tmp_path.iterdir()} == names | {"README.md", "index.html"}
    assert all(f"({name})" in text for name in names)
    table = pyarrow.csv.read_csv(tmp_path / "copies-tiny-gdn.csv")
    assert table["relative"].to_pylist() == COPIES["relative"].to_pylist()


def test_unfinished_runs_are_not_shown(runs):
    with pytest.raises(UsageError, match="no finished run of quantlab predict"):
        kind_of(runs / "begun")
    with pytest.raises(UsageError, match="propagate or predict"):
        kind_of(runs)
