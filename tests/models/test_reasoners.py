"""Recipe entries of the reasoners: they train on made problems, in the zoo's own loop."""

import json

import pytest
import torch

from quantlab.data.tasks import END_ID, TASKS
from quantlab.errors import UsageError
from quantlab.models.zoo import TRAINABLE, ZOO
from quantlab.models.zoo import recipe as recipe_module
from quantlab.models.zoo.corpus import Crops
from quantlab.models.zoo.problems import problem_corpus
from quantlab.models.zoo.recipe import END_OF_PROBLEM, REASONERS, Problems
from quantlab_cli.main import main


def test_entries():
    assert END_OF_PROBLEM == END_ID
    assert not set(REASONERS) & set(ZOO) and set(TRAINABLE) == set(ZOO) | set(REASONERS)
    for name, entry in REASONERS.items():
        assert entry.name == name and entry.config["eos_token_id"] == END_ID
        assert entry.kind == ZOO[name.replace("reasoner-", "")].kind
        longest = max(len(TASKS[t].problem(1, i).text) for t in TASKS for i in range(300))
        # the last phase sees whole problems, and several
        assert entry.training.phases[-1].length > longest


def test_books_do_not_depend_on_the_processes():
    small = Problems(books=3, size=5_000)
    one, two = problem_corpus(small, workers=1), problem_corpus(small, workers=2)
    for part in ("train", "validation", "test"):
        for a, b in zip(getattr(one, part), getattr(two, part), strict=True):
            assert a.title == b.title and torch.equal(a.text, b.text)
    titles = [b.title for p in ("train", "validation", "test") for b in getattr(one, p)]
    assert len(set(titles)) == len(titles) == 7
    ids = Crops(one.train, torch.device("cpu")).draw(seed=1, step=2, rows=3, length=4096)
    assert ids.shape == (3, 4097) and (ids == END_ID).any()


def test_a_reasoner_learns_in_the_zoos_loop(tmp_path, monkeypatch):
    """A few steps of the real loop on a small copy; the loss falls and the checkpoint loads."""
    from dataclasses import replace

    from quantlab.models.zoo import train as train_module
    from quantlab.models.zoo.recipe import Phase, Training

    entry = TRAINABLE["tiny-reasoner-gdn"]
    config = dict(entry.config) | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    small = replace(
        entry, config=config, problems=Problems(books=2, size=20_000),
        training=Training(phases=(Phase(share=1.0, length=128, rows=4),), warmup_steps=5),
    )  # fmt: skip
    monkeypatch.setattr(train_module, "TRAINABLE", {entry.name: small})
    monkeypatch.setattr(train_module, "LOG_EVERY", 20)
    monkeypatch.setattr(train_module, "VALIDATION_LENGTH", 256)
    monkeypatch.setattr(train_module, "VALIDATION_WINDOWS", 2)
    monkeypatch.setattr(train_module, "problem_corpus", lambda p: problem_corpus(p, workers=1))

    class Reached(Exception):
        pass

    def stop(*args, **kwargs):
        raise Reached  # the evaluation's contexts are too long for a test

    monkeypatch.setattr(train_module, "evaluate", stop)
    with pytest.raises(Reached):
        train_module.train(entry.name, data=None, out=tmp_path, device="cpu", tokens=40 * 128 * 4)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == END_ID
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor(list(TASKS["chain"].problem(0, 1).text[:200].encode()))[None] + 3
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    assert loss < 4.5  # an untrained head gives log 384 = 5.95
    assert recipe_module.TRAINABLE[entry.name] is entry


def test_data_and_model_must_fit(tmp_path, capsys):
    from quantlab.models.zoo.train import train

    with pytest.raises(UsageError, match="give no data"):
        train("tiny-reasoner-gdn", data=tmp_path, out=tmp_path, seconds=1)
    with pytest.raises(UsageError, match="books"):
        train("tiny-gdn", data=None, out=tmp_path, seconds=1)
    out = ["--out", str(tmp_path / "o"), "--seconds", "1"]
    arguments = ["tiny-reasoner-gdn", "--data", str(tmp_path), *out]
    assert main(["zoo", "train", *arguments]) == 2
    assert "which are made" in capsys.readouterr().err
    assert main(["zoo", "train", "tiny-gdn", *out]) == 2
    assert "Missing option '--data'" in capsys.readouterr().err
