"""`quantlab predict`: options, tables and JSON, on a tiny random model."""

import json
from pathlib import Path

import pytest

import quantlab.study.build as build
import quantlab.study.calibrate as calibrate
import quantlab.study.predict as predict_module
from quantlab.models.source import Source
from quantlab_cli.main import main
from tests.study.real import TinyBackend

SMALL = [
    "-M", "tiny-gdn", "--device", "cpu", "-N", "16", "--streams", "2", "--prompt", "12",
    "--calibrate", "64", "--texts", "1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, tmp_path):
    monkeypatch.setattr(
        build, "resolve", lambda name: Source(name=name, origin="zoo", path=Path("zoo"))
    )
    monkeypatch.setattr(predict_module, "Backend", lambda: TinyBackend("nemotron_h"))
    monkeypatch.setattr(calibrate, "INJECTION_PROMPT", 8)
    monkeypatch.setattr(calibrate, "INJECTION_TOKENS", 16)
    monkeypatch.chdir(tmp_path)


def test_one_command_and_against_its_own_measurement(capsys, tmp_path):
    options = ["--policy", "shared:fp8-sr", "--policy", "nvfp4 / fp32", "-L", "8"]
    assert main(["predict", *SMALL, *options, "--json", "--no-figures"]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    compared = {r["policy"]: r for r in document["compared"]}
    assert document["files"] == []
    assert len(compared) == 2 and all(r["predicted"] > 0 for r in compared.values())
    assert "predicted" in out and "Kendall" in out
    measured = document["measured"]
    again = ["predict", "--against", measured, "--device", "cpu", "--calibrate", "64"]
    again += ["--texts", "1", "--out", "again", "--json", "-q"]
    assert main(again) == 0
    held = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert held["compared"] == document["compared"] and held["measured"] == measured
    drawn = {Path(name).name for name in held["files"]}
    assert drawn == {"prediction.png", "prediction.svg", "report.md", "index.html"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-N", "16"], "Missing option '--model'"),
        (["--against", "nowhere"], "holds no run"),
        (["--against", "nowhere", "-M", "tiny-gdn"], "--model is that of the run"),
        ([*SMALL, "--policy", "shared:fp9"], "--policy: unknown format"),
        ([*SMALL, "--suite", "replayssn"], "--suite: unknown suite"),
        ([*SMALL, "--dtype", "bf16"], "in fp32"),
    ],
)
def test_what_is_wrong_is_said(options, message, capsys):
    assert main(["predict", *options]) == 2
    assert message in capsys.readouterr().err


def test_default_policies(monkeypatch):
    caught = []

    def stop(spec, *args, **kwargs):
        caught.append(spec)
        raise KeyboardInterrupt

    monkeypatch.setattr(predict_module, "run_prediction", stop)
    assert main(["predict", *SMALL]) == 130
    names = [p.short for p in caught[0].policies]
    assert names[:2] == ["shared fp32", "shared fp16-sr"] and names[-1] == "shared nvfp4"
    assert len(names) == 12
