"""Recipe entries of the reasoners: they train on made problems, in the zoo's own loop."""

import json
from dataclasses import replace

import pytest
import torch

from quantlab.data.tasks import END, END_ID, TASKS
from quantlab.data.tasks.corpus import WIDTHS as ALL_WIDTHS
from quantlab.engine.sampling import Sampling, choose, scores
from quantlab.errors import UsageError
from quantlab.models import load_model
from quantlab.models.zoo import SHIPPED, TRAINABLE, ZOO
from quantlab.models.zoo import train as train_module
from quantlab.models.zoo.problems import ProblemSource, Rows, problem_corpus
from quantlab.models.zoo.recipe import END_OF_PROBLEM, REASONERS, Phase, Problems
from quantlab.models.zoo.solved import TOP_P, chances
from quantlab.models.zoo.source import Batch
from quantlab_cli.main import main


def test_entries():
    assert END_OF_PROBLEM == END_ID
    assert not set(REASONERS) & set(ZOO) and set(TRAINABLE) >= set(ZOO) | set(REASONERS)
    assert set(SHIPPED) == set(ZOO) | set(REASONERS)
    for name, entry in REASONERS.items():
        assert entry.name == name and entry.config["eos_token_id"] == END_ID
        assert entry.kind == ZOO[name.replace("reasoner-", "")].kind


SMALL = {
    "tiny-reasoner-gdn": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "tiny-reasoner-mamba2": {
        "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "num_attention_heads": 2, "num_key_value_heads": 1, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    },
}  # fmt: skip
PROBLEMS = Problems(size=4_000, held_out=2)
WIDTHS = (128, 192)
CPU = torch.device("cpu")


def small(name):
    entry = TRAINABLE[name]
    phases = (Phase(share=0.5, length=128, rows=3), Phase(share=0.5, length=192, rows=2))
    return replace(
        entry,
        config=dict(entry.config) | SMALL[name],
        problems=PROBLEMS,
        training=replace(entry.training, phases=phases, warmup_steps=5),
    )


def test_problems_do_not_depend_on_the_processes():
    one, two = (problem_corpus(PROBLEMS, widths=WIDTHS, workers=n) for n in (1, 2))
    for part in ("train", "held_out"):
        for width in WIDTHS:
            a, b = (getattr(c, part)[width] for c in (one, two))
            assert a.text.tobytes() == b.text.tobytes()
            assert (a.begins == b.begins).all() and (a.ends == b.ends).all()
    texts = [bytes(t) for c in (one.train, one.held_out) for s in c.values() for t in s.text]
    assert len(set(texts)) == len(texts)


def test_only_the_solution_counts():
    corpus = problem_corpus(PROBLEMS, widths=WIDTHS, workers=1)
    rows = Rows(corpus.train[192], CPU)
    batch = rows.batch(torch.arange(6))
    for i in range(6):
        text = bytes((batch.ids[i][batch.ids[i] > 0] - 3).to(torch.uint8).tolist()).decode()
        _, solution = text.split(":\n")
        counted = (batch.targets[i][batch.counted[i]] - 3).to(torch.uint8).tolist()
        assert bytes(counted).decode() == solution and solution.endswith(END)
        # a target is the id one later
        assert torch.equal(batch.targets[i, :-1], batch.ids[i, 1:])
    losses = torch.where(batch.counted, 2.0, 1e9)
    assert batch.mean(losses) == 2.0


def test_widths_follow_the_phase_and_the_step_alone():
    entry = small("tiny-reasoner-gdn")
    corpus = problem_corpus(PROBLEMS, widths=WIDTHS, workers=1)
    source = ProblemSource(corpus, entry.training, CPU)
    first, second = entry.training.phases
    shapes = [tuple(source.batch(step, second).ids.shape) for step in range(40)]
    assert set(shapes) == {(3, 128), (2, 192)} and 10 < shapes.count((3, 128)) < 30
    assert {tuple(source.batch(step, first).ids.shape) for step in range(20)} == {(3, 128)}
    again = ProblemSource(corpus, entry.training, CPU)
    for a, b in zip(source.batch(7, second), again.batch(7, second), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(source.batch(7, first).ids, source.batch(8, first).ids)


def test_the_recipes_tokens_divide_by_every_width():
    for entry in REASONERS.values():
        tokens = {p.rows * p.length for p in entry.training.phases}
        assert tokens == {122_880} and entry.training.phases[-1].length == max(ALL_WIDTHS)
        assert all(p.length in ALL_WIDTHS for p in entry.training.phases)


def test_chances_are_those_of_sampling_and_of_greedy_decoding():
    """Against filters and choice of generation itself, token by token."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4, 5, 12, generator=generator)
    ids = torch.randint(0, 12, (4, 5), generator=generator)
    counted = torch.rand(4, 5, generator=generator) < 0.6
    counted[0] = True
    targets = torch.where(counted, logits.argmax(-1), ids)
    targets[1, counted[1].nonzero()[0]] = logits[1].argsort(-1)[counted[1].nonzero()[0], -2]
    targets[2, counted[2].nonzero()[0]] = logits[2].argmin(-1)[counted[2].nonzero()[0]]
    log_chance, greedy = chances(logits, Batch(ids, targets, counted))
    kept = scores(logits.flatten(0, 1), Sampling(top_p=TOP_P)).log_softmax(-1).view(4, 5, 12)
    for row in range(4):
        want = sum(kept[row, t, targets[row, t]] for t in range(5) if counted[row, t])
        assert log_chance[row] == pytest.approx(float(want), abs=1e-12)
        choice, _ = choose(scores(logits[row], Sampling(temperature=0)), None)
        assert greedy[row] == bool((choice == targets[row])[counted[row]].all())
    assert greedy.tolist() == [True, False, False, True]
    assert log_chance[2] == -torch.inf  # the filter leaves its token out


@pytest.mark.parametrize("name", SMALL)
def test_a_reasoner_learns_in_the_zoos_loop(name, tmp_path, monkeypatch):
    """The real loop on a small copy: the loss falls, the checkpoint loads, a run goes on."""
    entry = small(name)
    monkeypatch.setattr(train_module, "TRAINABLE", {name: entry})
    monkeypatch.setattr(train_module, "LOG_EVERY", 4)
    monkeypatch.setattr(
        train_module, "problem_corpus", lambda p: problem_corpus(p, widths=WIDTHS, workers=1)
    )
    train_module.train(name, data=None, out=tmp_path, device="cpu", tokens=12 * 384)
    first = json.loads((tmp_path / "result.json").read_text())
    train_module.train(name, data=None, out=tmp_path, device="cpu", tokens=4 * 384, resume=True)
    result = json.loads((tmp_path / "result.json").read_text())
    # 9 stable steps of the first call and the second's 4
    assert (first["steps"], result["steps"]) == (12, 13)
    # an untrained head gives log2 384 = 8.58 bits
    assert first["test"]["bits"] < 8.0
    assert set(result["test"]["chance"]) == set(TASKS)
    assert set(result["test"]["chance"]["chain"]) == {"128", "192"}
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == END_ID
    card = (tmp_path / "card.md").read_text()
    assert card.startswith(f"# {name}") and "books" not in card.lower()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.config.eos_token_id == END_ID


@pytest.mark.parametrize("name", REASONERS)
def test_the_shipped_checkpoint_solves_problems_of_every_task(name):
    entry = REASONERS[name]
    assert (entry.path / "model.safetensors").stat().st_size < 16e6
    config = json.loads((entry.path / "config.json").read_text())
    assert all(config[key] == value for key, value in entry.config.items())
    assert (entry.path / "card.md").read_text().startswith(f"# {name}\n")
    m = load_model(name)
    for task in TASKS.values():
        problem = task.problem(0, 1, steps=12)
        ids = torch.tensor(list(problem.text.encode()))[None] + 3
        begin = len(problem.prompt)
        with torch.inference_mode():
            logits = m.model(ids[:, :-1]).logits[0, begin - 1 :]
        # the cards promise 100 % at this length; each of some 150 tokens has 384 choices
        assert torch.equal(logits.argmax(-1), ids[0, begin:]), task.name


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
