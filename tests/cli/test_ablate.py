"""`quantlab ablate`: options to spec, tables, JSON, and what is refused."""

import json
from pathlib import Path

import pytest

import quantlab.study.ablate as ablate_module
import quantlab.study.build as build
import quantlab.study.run as run_module
from quantlab.models.source import Source
from quantlab_cli.main import main
from tests.study.fake import FakeBackend

SMALL = ["-M", "tiny-gdn", "--device", "cpu", "-N", "64", "--streams", "2", "--prompt", "8"]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, tmp_path):
    monkeypatch.setattr(
        build, "resolve", lambda name: Source(name=name, origin="zoo", path=Path("zoo"))
    )
    monkeypatch.setattr(run_module, "Backend", FakeBackend)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", ["rounding", "window", "correction"])
def test_each_ablation_is_one_command(kind, capsys, tmp_path):
    assert main(["ablate", kind, *SMALL, "--json"]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert document["ablation"] == kind and document["table"] and document["state"] == "finished"
    folder = tmp_path / document["directory"]
    assert folder.name.startswith(f"ablate-{kind}-tiny-gdn-64-")
    for name in ("rows.parquet", "ablation.csv", "report.md", "index.html", f"{kind}.png"):
        assert (folder / name).exists()
    assert "policy" in out or "format" in out
    # again: finished already, the same table
    assert main(["ablate", kind, *SMALL, "--resume", "--markdown", "-q", "--no-figures"]) == 0
    assert capsys.readouterr().out.startswith("| ")
    assert main(["ablate", kind, *SMALL]) == 2
    assert "--resume" in capsys.readouterr().err


def spec_of(monkeypatch, *arguments):
    caught = []

    def stop(kind, spec, *args, **kwargs):
        caught.append(spec)
        raise KeyboardInterrupt

    monkeypatch.setattr(ablate_module, "run_ablation", stop)
    assert main(["ablate", *arguments]) == 130
    return caught[0]


def test_options_reach_the_spec(monkeypatch):
    spec = spec_of(
        monkeypatch, "rounding", *SMALL, "--format", "int8@row", "--seeds", "7,9", "-L", "4"
    )
    assert [p.short for p in spec.policies[1:]] == [
        "shared int8@row L=4",
        "shared int8@row-sr L=4 seed=7",
        "shared int8@row-sr L=4 seed=9",
    ]
    spec = spec_of(monkeypatch, "window", *SMALL, "--policy", "shared:fp8", "--windows", "1, 2")
    assert [p.window for p in spec.policies[1:]] == [1, 2]
    spec = spec_of(monkeypatch, "correction", *SMALL, "--policy", "fp8/fp32", "--segment", "64")
    assert [p.corrections for p in spec.policies[1:]] == ["rederive", "fold"]
    assert spec.segment == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rounding", *SMALL, "--seeds", "a,b"], "not a list such as 0,1,2"),
        (["rounding", *SMALL, "--format", "nvfp5"], "Did you mean 'nvfp4'"),
        (["window", *SMALL, "--windows", "4"], "two or more"),
        (["window", *SMALL, "--windows", "-1,4"], "not a list"),
        (["correction", *SMALL, "--policy", "fp8"], "shared:fp8"),
        (["rounding", "-N", "64"], "--model"),
        (["roundin"], "No such command"),
    ],
)
def test_what_is_wrong_is_said(arguments, message, capsys):
    assert main(["ablate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_folding_needs_no_model(capsys, tmp_path):
    out = tmp_path / "f.csv"
    assert main(["ablate", "folding", "--windows", "8", "--json", "-o", str(out)]) == 0
    text = capsys.readouterr().out
    assert "key rank" in text and len(json.loads(text.splitlines()[-1])["points"]) == 36
    assert out.read_text().count("\n") == 37
