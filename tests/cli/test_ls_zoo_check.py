"""Listings, the zoo and the self-test from the command line."""

import json
import re
from types import SimpleNamespace

import pytest

from quantlab.formats import FORMATS, PRESETS, parse_format
from quantlab_cli.ls import LISTINGS
from quantlab_cli.main import main


@pytest.mark.parametrize("what", LISTINGS)
def test_every_listing_prints_and_is_json(what, capsys):
    assert main(["ls", what]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 1
    assert main(["ls", what, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_formats_are_the_registrys(capsys):
    main(["ls", "formats", "--json"])
    listed = {e["name"]: e for e in json.loads(capsys.readouterr().out)}
    assert set(listed) == {*FORMATS, *PRESETS}
    assert float(listed["nvfp4"]["bits"]) == pytest.approx(4.5 + 32 / 128**2, rel=1e-5)
    assert all(str(parse_format(n)) == e["format"] for n, e in listed.items())


def test_formats_say_how_others_are_written(capsys):
    main(["ls", "formats"])
    out = capsys.readouterr().out
    written = re.findall(
        r"[a-z0-9]+[@:][a-z0-9_@:=]+[0-9a-z](?:-sr)?", out.split("A name takes")[1]
    )
    assert len(written) == 4 and all(parse_format(name) for name in written)
    assert "int4, int6, int8 and int16" in out


def test_models_list_zoo_presets_and_families(capsys):
    main(["ls", "models"])
    out = capsys.readouterr().out
    assert all(name in out for name in ("tiny-gdn", "qwen3.5-4b", "<kimi_linear checkpoint>"))


def test_zoo_list(capsys):
    assert main(["zoo", "list", "--json"]) == 0
    assert {e["name"] for e in json.loads(capsys.readouterr().out)} >= {"tiny-gdn", "tiny-mamba2"}
    assert main(["zoo", "list"]) == 0


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["tiny-gnd", "--data", ".", "--out", "o", "--tokens", "1K"], 2, "Did you mean 'tiny-gdn'"),
        (["tiny-gdn", "--data", ".", "--out", "o"], 2, "one of --seconds and --tokens"),
        (["tiny-gdn", "--data", ".", "--out", "o", "--tokens", "0"], 2, "must be positive"),
        (["tiny-gdn", "--data", ".", "--out", "o", "--seconds", "-1"], 2, "--seconds"),
        (
            ["tiny-gdn", "--data", "nowhere", "--out", "o", "--tokens", "1K"],
            5,
            "data_manifests/books-train.toml",
        ),
        (
            ["tiny-gdn", "--data", ".", "--out", "o", "--tokens", "1K", "--resume"],
            2,
            "neither last.pt nor stable.pt",
        ),
        (
            ["tiny-gdn", "--data", __file__, "--out", "o", "--tokens", "1K"],
            2,
            "is a file; give the directory",
        ),
        (
            ["tiny-gdn", "--data", ".", "--out", "o", "--tokens", "1K", "--device", "cpu"],
            5,
            "books-train.txt.xz does not exist",
        ),
        (
            ["tiny-gdn", "--data", ".", "--out", "o", "--tokens", "1K", "--device", "gpu"],
            2,
            "unknown device 'gpu'",
        ),
    ],
)
def test_zoo_train_refuses(arguments, code, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["zoo", "train", *arguments]) == code
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_zoo_train_calls_the_recipe(capsys, tmp_path, monkeypatch):
    called = {}
    monkeypatch.setattr(
        "quantlab.models.zoo.train.train", lambda name, **kwargs: called.update(kwargs, name=name)
    )
    arguments = ["--data", str(tmp_path), "-o", str(tmp_path / "o"), "--seconds", "60"]
    assert main(["zoo", "train", "tiny-gdn", *arguments, "--device", "cpu"]) == 0
    assert called["name"] == "tiny-gdn" and called["seconds"] == 60 and called["tokens"] is None


@pytest.mark.parametrize("passed, code", [(True, 0), (False, 1)])
def test_check_exit_code_is_the_verdict(passed, code, capsys, monkeypatch):
    from quantlab.models.check import CheckReport, CheckRow

    row = CheckRow(name="history", value=0.5, bound=1e-4, passed=passed)
    monkeypatch.setattr("quantlab.models.source.resolve", lambda name: None)
    monkeypatch.setattr(
        "quantlab.models.load_model", lambda *a, **k: SimpleNamespace(), raising=False
    )
    monkeypatch.setattr(
        "quantlab.models.check.check_model", lambda m: CheckReport(model="m", rows=(row,))
    )
    assert main(["check", "m", "--json"]) == code
    out = capsys.readouterr().out
    assert "history" in out and json.loads(out.splitlines()[-1])["passed"] is passed


def test_check_of_an_unknown_model(capsys):
    assert main(["check", "tiny-gnd"]) == 2
    assert "did you mean tiny-gdn" in capsys.readouterr().err
