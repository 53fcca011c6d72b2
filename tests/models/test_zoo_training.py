"""The zoo's recipe on tiny models: parity with transformers, resuming, splits, schedule, optimiser.

Models here have the zoo's architectures at a hidden size of 32 and dk = 16, so that a step takes a
fraction of a second on one core.
"""

import dataclasses
import json
import math
import time
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F

from quantlab.errors import RunError, UsageError
from quantlab.models.zoo import TRAINABLE
from quantlab.models.zoo import train as training
from quantlab.models.zoo.corpus import Book, Corpus, Crops, unwrap, windows
from quantlab.models.zoo.evaluate import evaluate
from quantlab.models.zoo.forward import Forward
from quantlab.models.zoo.initialise import (
    channel_factors,
    half_lives,
    hf_model,
    initial_weights,
    save_checkpoint,
)
from quantlab.models.zoo.ops import training_ops
from quantlab.models.zoo.optimiser import orthogonalise
from quantlab.models.zoo.recipe import Phase
from quantlab.models.zoo.schedule import Budget, phase_at, rate_at
from tests.models import small_kda

CPU = torch.device("cpu")
SMALL = {
    "tiny-gdn": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "tiny-mamba2": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
    "tiny-kda": small_kda.CONFIG,
}


def small(name):
    phases = (Phase(share=0.5, length=32, rows=4), Phase(share=0.5, length=64, rows=2))
    entry = TRAINABLE[name]
    return dataclasses.replace(
        entry,
        config=MappingProxyType(dict(entry.config) | SMALL[name]),
        training=dataclasses.replace(entry.training, phases=phases, warmup_steps=2),
    )


def books(count, size=600, seed=0):
    gen = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(32, 120, (size,), generator=gen, dtype=torch.uint8)  # noqa: E731
    return tuple(Book(title=str(i), text=draw()) for i in range(count))


CORPUS = Corpus(train=books(3), validation=books(2, seed=1), test=books(2, seed=2))


def first_weights(model):
    """First weights made less bland: decays and norms drawn, so that no part is an identity."""
    shapes = {k: v.shape for k, v in hf_model(model).state_dict().items()}
    weights = initial_weights(model, shapes)
    gen = torch.Generator().manual_seed(5)
    for name, w in weights.items():
        if w.dim() == 1 or "in_proj" in name:
            w += 0.3 * torch.randn(w.shape, generator=gen)
    return weights


@pytest.mark.parametrize("name", SMALL)
def test_forward_agrees_with_transformers(name):
    model = small(name)
    weights = first_weights(model)
    reference = hf_model(model).eval()
    reference.load_state_dict(weights)
    ids = torch.randint(3, 259, (2, 97), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = reference(ids[:, :-1]).logits
        want = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        got = Forward(model, *training_ops(CPU), compiled=False).losses(
            weights, ids[:, :-1], ids[:, 1:]
        )
    # FP32 sums of 32 to 96 terms through a few layers: 5e-7 was measured. Leaving out the 1 rad
    # rotation moves a loss by 0.05, the query scale by 0.12, the decay by 0.2, the D skip by 0.45.
    assert (got.flatten() - want).abs().max() < 2e-5


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_gradient(name):
    model = small(name)
    leaves = {k: v.requires_grad_() for k, v in first_weights(model).items()}
    ids = torch.randint(3, 259, (1, 65), generator=torch.Generator().manual_seed(0))
    forward = Forward(model, *training_ops(CPU), compiled=False)
    forward.losses(leaves, ids[:, :-1], ids[:, 1:]).mean().backward()
    idle = [k for k, v in leaves.items() if v.grad is None or not v.grad.any()]
    assert not idle


def run_of(model, out, tokens, resume=False):
    run = training.Run(model, CORPUS, out, CPU, Budget(tokens=tokens), begun=time.monotonic())
    if resume:
        run.load(out / "stable.pt")
    run.loop()
    return run


@pytest.mark.parametrize("name", SMALL)
def test_a_resumed_run_repeats_an_unbroken_one(name, tmp_path):
    model = small(name)
    step = 128
    # A budget of 4 saves its stable state after 3 steps, at p = 0.75; 3 + 5 = 8 in all.
    run_of(model, tmp_path / "cut", 4 * step)
    resumed = run_of(model, tmp_path / "cut", 5 * step, resume=True)
    whole = training.Run(model, CORPUS, tmp_path / "whole", CPU, Budget(tokens=8 * step), begun=0.0)
    # Its first three steps are those of the short budget.
    short = Budget(tokens=4 * step)
    whole.budget, long = short, whole.budget
    whole._warm = None
    for _ in range(3):
        p = whole._progress()
        phase = phase_at(whole.hyper, p)
        whole._one(phase, rate_at(whole.hyper, p, whole.step))
    whole.budget = long
    whole.loop()
    assert (resumed.step, resumed.tokens) == (whole.step, whole.tokens) == (8, 8 * step)
    for key, value in whole.optimiser.masters.items():
        assert torch.equal(value, resumed.optimiser.masters[key]), key


def test_a_run_learns_and_writes_a_checkpoint_that_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "LOG_EVERY", 5)
    model = small("tiny-gdn")
    run = run_of(model, tmp_path, 20 * 128)
    test = evaluate(
        run.forward, run.rounded(), CORPUS.test, contexts=(64, 128), scored=16, tokens=256
    )
    run.finish(test)
    # 88 symbols are log2(88) = 6.46 bits; the first logits spread over 384 ids, 8.58 bits.
    assert run.rows[-1]["loss_bits"] < 8.3
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, run.optimiser.masters[key].bfloat16().float()), key
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["tokens"] == 20 * 128
    assert (tmp_path / "card.md").read_text().startswith("# tiny-gdn")


def test_a_run_with_decays_per_channel_learns_and_writes_its_card(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "LOG_EVERY", 5)
    run = run_of(small("tiny-kda"), tmp_path, 20 * 128)
    test = evaluate(
        run.forward, run.rounded(), CORPUS.test, contexts=(64, 128), scored=16, tokens=256,
        unwrapped=True,
    )  # fmt: skip
    run.finish(test)
    assert run.rows[-1]["loss_bits"] < 8.3
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, run.optimiser.masters[key].bfloat16().float()), key
    # Random bytes have no lines to join.
    assert test.unwrapped == pytest.approx(test.bits[64])
    result = json.loads((tmp_path / "result.json").read_text())
    lives = torch.tensor(result["test"]["half_lives"])
    assert lives.shape == (2, 2, 16)
    card = (tmp_path / "card.md").read_text()
    assert "fastest, median, slowest channel" in card
    assert f"of {lives.numel()} above 1,000" in card
    assert "30% of the time with the lines" in card
    # A checkpoint of the recipe goes through quantlab's own parity check.
    from quantlab.models import check_model, load_model

    report = check_model(load_model(str(tmp_path)))
    assert report.passed, report


def test_unwrapping_joins_paragraphs_and_keeps_verse_and_length():
    long = b"It was the opening of the season of eighteen hundred and thirty-two, at"
    text = b"\n".join([b"CHAPTER I.", b"", long, long, b"the end.", b"", b"  " + long, long, b"x",
                       b"Rose-cheeked Laura, come", b"Sing thou smoothly", b"", b"y"])  # fmt: skip
    want = b"\n".join([b"CHAPTER I.", b"", long + b" " + long + b" the end.", b"", b"  " + long
                       + b" " + long + b" x", b"Rose-cheeked Laura, come", b"Sing thou smoothly",
                       b"", b"y"])  # fmt: skip
    (got,) = unwrap((Book(title="", text=torch.tensor(list(text), dtype=torch.uint8)),))
    assert bytes(got.text.tolist()) == want


def test_the_share_of_unwrapped_crops_leaves_the_places_as_they_are():
    line = b"a" * 60 + b"\n" + b"b" * 60 + b"\n"
    book = Book(title="", text=torch.tensor(list(line * 20), dtype=torch.uint8))
    plain = Crops((book,), CPU).draw(seed=1, step=2, rows=256, length=200)
    mixed = Crops((book,), CPU, unwrapped=0.3).draw(seed=1, step=2, rows=256, length=200)
    joined = torch.where(plain == ord("\n") + 3, ord(" ") + 3, plain)
    wrapped = (mixed == plain).all(1)
    assert ((mixed == joined).all(1) | wrapped).all()
    # 256 draws of 0.3: a standard deviation of 2.9 %.
    assert 0.2 < (~wrapped).double().mean() < 0.4


def test_evaluation_scores_the_same_bytes_under_every_context():
    model = small("tiny-gdn")

    class Position:
        """A model whose loss is the byte itself: equal tails for equal bytes."""

        def losses(self, weights, ids, targets, decays):
            decays(-torch.full((*ids.shape, 2), math.log(2) / 100))
            return targets.float()

    out = evaluate(
        Position(), {"lm_head.weight": torch.zeros(1)}, CORPUS.test, contexts=(64, 256), scored=32
    )
    assert model.config["hidden_size"] == 32
    assert out.bits[64] == pytest.approx(out.bits[256])
    assert out.difference[256] == pytest.approx((0.0, 0.0))
    assert out.half_lives == [[pytest.approx(100.0)] * 2]


def test_crops_stay_in_one_book_and_depend_on_the_step_alone():
    parts = tuple(
        Book(title=str(i), text=torch.full((100 + 50 * i,), i, dtype=torch.uint8)) for i in range(3)
    )
    crops = Crops(parts, CPU)
    ids = crops.draw(seed=1, step=7, rows=64, length=100)
    assert (ids == ids[:, :1]).all()
    # The first book has 100 bytes, too few for 100 + 1.
    assert set(ids[:, 0].tolist()) == {4, 5}
    crops.draw(seed=1, step=8, rows=64, length=20)
    assert torch.equal(ids, crops.draw(seed=1, step=7, rows=64, length=100))
    with pytest.raises(ValueError, match="no book"):
        crops.draw(seed=1, step=0, rows=1, length=200)


def test_windows_end_a_stride_apart():
    text = torch.arange(100, dtype=torch.uint8)
    cut = windows((Book(title="", text=text),), longest=40, stride=20)
    assert cut.shape == (3, 41)
    assert (cut[:, -1] - 3).tolist() == [40, 60, 80]


def test_schedule():
    hyper = TRAINABLE["tiny-gdn"].training
    assert rate_at(hyper, 0.5, 10_000) == 1.0
    assert rate_at(hyper, 1.0, 10_000) == pytest.approx(hyper.final_lr)
    assert rate_at(hyper, 0.0, 0) == pytest.approx(1 / hyper.warmup_steps)
    lengths = [phase_at(hyper, p).length for p in (0.0, 0.6, 0.8, 0.95, 1.0)]
    assert lengths == [4_096, 16_384, 65_536, 131_072, 131_072]


def test_orthogonalise_brings_singular_values_near_one():
    for shape in ((2, 24, 40), (2, 40, 24)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalise(x))
        # The quintic's fixed interval is about [0.7, 1.2] by design.
        assert values.min() > 0.6
        assert values.max() < 1.3


def initial_lives(model, shapes):
    """Half-lives that the recipe begins with, [layers, all channels of a layer]."""
    heads = next(s for k, s in shapes.items() if k.endswith("A_log")).numel()
    layers = sum(k.endswith("A_log") for k in shapes)
    lives = half_lives(model.half_lives, layers, heads)
    if model.kind == "kda":
        factors = channel_factors(model.half_lives, model.config["linear_head_dim"])
        lives = (lives[..., None] / factors).flatten(1)
    return lives


@pytest.mark.parametrize("name", SMALL)
def test_recipe_keeps_its_promises(name):
    model = TRAINABLE[name]
    shapes = {k: v.shape for k, v in hf_model(model).state_dict().items()}
    assert 2 * sum(math.prod(s) for s in shapes.values()) < 16e6
    lives = initial_lives(model, shapes)
    assert lives.min() < 5
    assert lives.max() > 10_000
    assert (lives > 1_000).double().mean() > 0.1
    # Interleaved: every layer holds fast and slow heads.
    assert (lives.min(1).values < 50).all()
    assert (lives.max(1).values > 5_000).all()


def test_initial_decays_have_the_half_lives_of_the_recipe():
    model = small("tiny-mamba2")
    weights = initial_weights(model, {k: v.shape for k, v in hf_model(model).state_dict().items()})
    a = weights["model.layers.0.mixer.A_log"].exp()
    dt = F.softplus(weights["model.layers.0.mixer.dt_bias"])
    want = half_lives(model.half_lives, 1, 4)[0]
    assert torch.allclose(math.log(2) / (a * dt), want.float(), rtol=1e-5)


def test_channels_of_a_head_begin_spread_and_mixed():
    model = TRAINABLE["tiny-kda"]
    weights = initial_weights(model, {k: v.shape for k, v in hf_model(model).state_dict().items()})
    gate = "model.layers.1.self_attn.forget_gate."
    dt = F.softplus(weights[gate + "dt_bias"]).view(4, 128)
    lives = math.log(2) / (weights[gate + "A_log"].exp().view(4, 1) * dt)
    heads = half_lives(model.half_lives, 6, 4)[1].float()
    # The middle of a head's channels in log is the head's; the ends 64 apart, less one step of 128.
    assert torch.allclose(lives.log().mean(1), heads.log(), atol=0.03)
    assert (lives.max(1).values / lives.min(1).values > 60).all()
    # A block of 16 neighbours, as formats have, holds channels a factor of 40 apart.
    blocks = lives.view(4, 8, 16)
    assert (blocks.max(2).values / blocks.min(2).values > 40).all()


def test_unknown_names_and_budgets_are_refused(tmp_path):
    with pytest.raises(UsageError, match="tiny-gdn"):
        training.train("tiny-gnd", data=tmp_path, out=tmp_path, seconds=1)
    with pytest.raises(ValueError, match="exactly one"):
        Budget(seconds=1.0, tokens=1)


def test_a_cut_run_goes_on_from_its_last_state_and_a_finished_one_from_its_stable_one(tmp_path):
    with pytest.raises(UsageError, match=r"neither last\.pt nor stable\.pt"):
        training.saved_state(tmp_path)
    (tmp_path / "stable.pt").touch()
    assert training.saved_state(tmp_path).name == "stable.pt"
    (tmp_path / "last.pt").touch()
    assert training.saved_state(tmp_path).name == "last.pt"


def test_a_kill_while_saving_leaves_the_state_before(tmp_path, monkeypatch):
    run = run_of(small("tiny-gdn"), tmp_path, 4 * 128)
    before = (tmp_path / "stable.pt").read_bytes()

    def half(state, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        run.save(tmp_path / "stable.pt")
    assert (tmp_path / "stable.pt").read_bytes() == before


def test_damaged_and_foreign_states_are_refused(tmp_path):
    run = run_of(small("tiny-gdn"), tmp_path, 4 * 128)
    path = tmp_path / "stable.pt"
    whole = path.read_bytes()
    with pytest.raises(UsageError, match="is a run of tiny-gdn, not of tiny-mamba2"):
        run_of(small("tiny-mamba2"), tmp_path, 128, resume=True)
    for cut in (b"", whole[:100], whole[: len(whole) // 2]):
        path.write_bytes(cut)
        with pytest.raises(RunError, match="is damaged"):
            run.load(path)


def test_checkpoint_is_complete(tmp_path):
    model = small("tiny-mamba2")
    weights = first_weights(model)
    save_checkpoint(model, weights, tmp_path)
    from transformers import AutoModelForCausalLM

    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert loaded.dtype == torch.bfloat16
