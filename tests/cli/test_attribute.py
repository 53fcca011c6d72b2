"""`quantlab attribute`: one command, its JSON, and what is refused before a model is loaded."""

import json
from pathlib import Path

import pytest

import quantlab.study.attribute as attribute_module
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
    monkeypatch.setattr(attribute_module, "model_heads", lambda name: [2, 2])
    monkeypatch.setattr(run_module, "Backend", FakeBackend)
    monkeypatch.chdir(tmp_path)


def test_one_command(capsys, tmp_path):
    assert main(["attribute", *SMALL, "--json"]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert document["state"] == "finished" and len(document["units"]) == 4 * 3
    assert len(document["additivity"]) == 3 and "layer 1, head 0" in out
    folder = tmp_path / document["directory"]
    assert folder.name.startswith("attribute-tiny-gdn-64-")
    for name in ("attribution.csv", "additivity.csv", "map.svg", "additivity.png", "index.html"):
        assert (folder / name).exists()
    assert main(["attribute", *SMALL, "--resume", "--markdown", "-q", "--no-figures"]) == 0
    assert capsys.readouterr().out.startswith("| unit ")
    assert main(["attribute", *SMALL]) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by", "heads"], "Did you mean 'head'"),
        (["--layers", "2"], "recurrent layers 0 … 1"),
        (["--layers", "a"], "not a list"),
        (["--policy", "shared:nvfp5"], "Did you mean 'nvfp4'"),
        (["--policy", "shared:fp8 except=1"], "leave except=1 out"),
    ],
)
def test_what_is_wrong_is_said(arguments, message, capsys):
    assert main(["attribute", *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err
