"""`quantlab eval` and `quantlab bins` from the command line, on a tiny model."""

import json

import pytest

from quantlab.engine.sampling import Sampling
from quantlab.errors import UsageError
from quantlab_cli.eval import make_spec
from quantlab_cli.main import main
from tests.models.tiny import tiny

SMALL = ["--limit", "1", "--budget", "60", "--rows", "4", "--device", "cpu", "--quiet"]
OPTIONS = {
    "model": "tiny-gdn", "tasks": (), "suite": None, "policies": (), "window": 16, "limit": None,
    "repetitions": None, "budget": None, "temperature": None, "top_p": None, "top_k": None,
    "presence_penalty": None, "context": None, "seed": 0, "margin": 1.0, "rows": None,
    "device": "cpu", "dtype": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, made through the command."""
    patch = pytest.MonkeyPatch()
    m = tiny("qwen3_5", vocab_size=264)
    patch.setattr("quantlab.models.load_model", lambda *a, **k: m)
    out = tmp_path_factory.mktemp("eval") / "run"
    assert main(["eval", "-M", "tiny-gdn", *SMALL, "--out", str(out)]) == 0
    patch.undo()
    return out


def test_a_run_leaves_its_files(run):
    names = {path.name for path in run.iterdir()}
    assert names == {
        "spec.json", "run.json", "rows.parquet", "outputs.parquet", "summary.csv", "bins.csv",
        "bins-chain.png", "bins-chain.svg", "index.html",
    }  # fmt: skip
    session = json.loads((run / "run.json").read_text())["sessions"][0]
    assert session["command"][:2] == ["quantlab", "eval"]


def test_a_plan_says_what_would_be_generated(monkeypatch, capsys, tmp_path):
    m = tiny("qwen3_5", vocab_size=264)
    monkeypatch.setattr("quantlab.models.load_model", lambda *a, **k: m)
    out = tmp_path / "o"
    assert main(["eval", "-M", "tiny-gdn", *SMALL, "--dry-run", "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    # five arms, one question of at most 60 tokens
    assert found["generations"] == 5 and 5 * 50 <= found["tokens"] <= 5 * 60
    assert found["seconds"] > 0 and found["tokens_per_second"] > 0 and not out.exists()
    assert main(["eval", "-M", "tiny-gdn", *SMALL, "--dry-run", "--out", str(out)]) == 0
    assert "about" in capsys.readouterr().out


def test_bins_again(run, capsys):
    assert main(["bins", str(run), "--log", "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert "FP32 repeated" in "\n".join(text) and "shared nvfp4-sr" in "\n".join(text)
    (found,) = json.loads(last)
    assert {r["arm"] for r in found["bins"]} >= {"reference", "repeat"}
    assert main(["bins", str(run), str(run), "--markdown"]) == 0
    assert capsys.readouterr().out.count("| FP32 |") == 4


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["-M", "tiny-gdn", "--task", "chian"], 2, "Did you mean 'chain'"),
        (["-M", "tiny-gdm"], 2, "tiny-gdn"),
        (["-M", "tiny-gdn", "--policy", "shared:nvfp5"], 2, "--policy"),
        (["-M", "tiny-gdn", "--suite", "replaysm"], 2, "replayssm"),
        (["-M", "tiny-gdn", "--task", "gsm8k", "--task", "chain"], 2, "run it alone"),
        (["-M", "tiny-gdn", "--task", "ruler-single-1", "--task", "chain"], 2, "run them alone"),
        (["-M", "tiny-gdn", "--context", "4K"], 2, "for RULER's tasks"),
        (["-M", "tiny-gdn", "--task", "ruler-single-1", "--context", "100"], 2, "no room"),
        (["-M", "tiny-gdn", "--top-p", "0"], 2, "top-p"),
        (["-M", "tiny-gdn", "--device", "gpu"], 2, "cuda:<index>"),
    ],
)
def test_refusals(arguments, code, message, capsys, tmp_path):
    assert main(["eval", *arguments, "--out", str(tmp_path / "o")]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_missing_data_is_named(monkeypatch, capsys, tmp_path):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "dataset_info", refuse)
    arguments = ["eval", "-M", "tiny-gdn", "--task", "aime", "--out", str(tmp_path / "o")]
    assert main(arguments) == 5
    assert "HuggingFaceH4/aime_2024" in capsys.readouterr().err


def test_a_budget_of_ones_own_is_found_once(monkeypatch, capsys, tmp_path):
    """The spec that is run, and gone on with, has the number that the pilot found."""
    from quantlab.study import accuracy, accuracy_plan

    asked, run = [], []
    monkeypatch.setattr(accuracy_plan, "find_budget", lambda spec: asked.append(spec.budget) or 640)

    def stop(spec, out, **_):
        run.append(spec.budget)
        out.mkdir(exist_ok=True)
        (out / "spec.json").write_text(json.dumps({"spec": spec.to_json()}))
        raise UsageError("enough")

    monkeypatch.setattr(accuracy, "run_eval", stop)
    arguments = ["eval", "-M", "tiny-gdn", "--budget", "auto", "--out", str(tmp_path / "o")]
    assert main(arguments) == 2 and asked == [4096] and run == [640]
    assert "budget: 640 tokens" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 2 and asked == [4096] and run == [640, 640]
    assert main(["eval", "-M", "tiny-gdn", "--budget", "aut"]) == 2
    assert "'aut' is not a whole number" in capsys.readouterr().err


def test_defaults_follow_the_protocol():
    spec = make_spec(**OPTIONS)
    assert (spec.tasks, spec.limit, spec.budget, spec.repetitions) == (("chain",), 6, 1024, 1)
    assert [p.short for p in spec.policies] == ["shared nvfp4-sr", "nvfp4 / fp16-sr"]
    qwen = make_spec(**OPTIONS | {"model": "qwen3.5-4b", "tasks": ("gpqa-diamond",)})
    assert (qwen.limit, qwen.repetitions, qwen.budget) == (None, 3, 32768)
    names = ("temperature", "top_p", "top_k", "presence_penalty")
    settings = Sampling(**{n: getattr(qwen, n) for n in names})
    assert settings == Sampling(top_p=0.95, top_k=20, presence_penalty=1.5)
    long = make_spec(**OPTIONS | {"model": "qwen3.5-4b", "tasks": ("ruler-single-1",)})
    assert (long.temperature, long.limit, long.budget, long.context) == (0, 100, 128, 4096)
    own = make_spec(**OPTIONS | {"suite": "replayssm", "temperature": 0.0, "margin": 2.0})
    assert len(own.policies) == 9 and own.temperature == 0 and own.margin == 0.02
