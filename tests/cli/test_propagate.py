"""`quantlab propagate`: options, tables and JSON, on a tiny random model."""

import json
from pathlib import Path

import pytest

import quantlab.study.build as build
import quantlab.study.propagate as propagate_module
from quantlab.models.source import Source
from quantlab_cli.main import main
from tests.study.real import TinyBackend

SMALL = ["-M", "tiny-gdn", "--device", "cpu", "-N", "32", "--streams", "1", "--prompt", "8"]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, tmp_path):
    monkeypatch.setattr(
        build, "resolve", lambda name: Source(name=name, origin="zoo", path=Path("zoo"))
    )
    monkeypatch.setattr(propagate_module, "Backend", lambda: TinyBackend("qwen3_5"))
    monkeypatch.chdir(tmp_path)


def test_one_command(capsys, tmp_path):
    options = ["--policy", "shared:fp8-sr", "-L", "4", "--seed", "3", "--json"]
    assert main(["propagate", *SMALL, *options]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    (row,) = document["summary"]
    assert row["policy"].endswith("-sr L=4") and row["streams"] == 1
    assert document["every"] == 4 and document["spec"]["seed"] == 3
    folder = tmp_path / document["directory"]
    for name in ("rows.parquet", "heads.parquet", "propagation.csv", "heads.png", "drift.svg"):
        assert (folder / name).exists()
    assert "Spearman" in out and "oracle" in out and "flushed" in out
    again = ["propagate", *SMALL, *options, "--resume", "--markdown", "--no-figures", "-q"]
    assert main(again) == 0
    assert capsys.readouterr().out.startswith("| policy")


def test_default_policies(monkeypatch):
    caught = []

    def stop(spec, *args, **kwargs):
        caught.append(spec)
        raise KeyboardInterrupt

    monkeypatch.setattr(propagate_module, "run_propagation", stop)
    assert main(["propagate", *SMALL]) == 130
    assert [p.short for p in caught[0].policies] == [
        "conventional int6@row",
        "conventional int8@row",
        "shared nvfp4",
        "shared nvfp4-sr",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "shared:fp9"], "--policy: unknown format"),
        (["--every", "0"], "must be positive"),
        (["-L", "64"], "comes after 64 tokens"),
        (["--policy", "shared:fp8 L=3", "--policy", "shared:fp8 L=32"], "comes after 96 tokens"),
    ],
)
def test_what_is_wrong_is_said(options, message, capsys):
    assert main(["propagate", *SMALL, *options]) == 2
    assert message in capsys.readouterr().err
