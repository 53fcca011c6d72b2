"""The shipped checkpoints: size, loading, what their cards promise, on a paragraph of
public-domain text.

The figures of the cards come from 6.8 MB of books on a GPU; here one paragraph shows that the
weights in the package are the trained ones and read the same through transformers and through the
recipe's forward.
"""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from quantlab.models.zoo import ZOO
from quantlab.models.zoo.corpus import Book, unwrap
from quantlab.models.zoo.forward import Forward
from quantlab.models.zoo.ops import training_ops

# Wilkie Collins, Armadale (1866), one of the test books, with its line breaks: tiny-gdn and
# tiny-mamba2 have seen no other text, and take a line of 100 bytes for an impossibility.
TEXT = """It was the opening of the season of eighteen hundred and thirty-two, at
the Baths of Wildbad.

The evening shadows were beginning to gather over the quiet little
German town, and the diligence was expected every minute. Before the
door of the principal inn, waiting the arrival of the first visitors
of the year, were assembled the three notable personages of Wildbad,
accompanied by their wives--the mayor, representing the inhabitants;
the doctor, representing the waters; the landlord, representing his own
establishment.
"""


@pytest.fixture(scope="module", params=ZOO)
def shipped(request):
    from transformers import AutoModelForCausalLM

    entry = ZOO[request.param]
    loaded, info = AutoModelForCausalLM.from_pretrained(
        entry.path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    return entry, loaded.eval()


def text_ids():
    return torch.tensor(list(TEXT.encode()))[None] + 3


def test_size_and_files(shipped):
    entry, _ = shipped
    assert (entry.path / "model.safetensors").stat().st_size < 16e6
    config = json.loads((entry.path / "config.json").read_text())
    assert config["model_type"] == entry.model_type
    for key, value in entry.config.items():
        assert config[key] == value, key
    assert (entry.path / "card.md").read_text().startswith(f"# {entry.name}\n")


def test_it_predicts_english_as_trained(shipped):
    entry, model = shipped
    ids = text_ids()
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0]
    want = F.cross_entropy(logits, ids[0, 1:], reduction="none")
    bits = want.mean().item() / math.log(2)
    # Measured 1.29, 1.29, 1.39. Untrained weights give 8.5; the trained ones with decays left out
    # 3.0, 3.4 and 2.0, with the recurrence left out 10, 3.1 and 5.3.
    assert bits < 1.5
    got = Forward(entry, *training_ops(torch.device("cpu")), compiled=False).losses(
        model.state_dict(), ids[:, :-1], ids[:, 1:]
    )
    # FP32 sums in another order, through 8 (16) layers and logits up to 30.
    assert (got[0] - want).abs().max() < 2e-3


def test_a_model_that_saw_unwrapped_text_reads_it(shipped):
    entry, model = shipped
    (book,) = unwrap((Book(title="", text=torch.tensor(list(TEXT.encode()), dtype=torch.uint8)),))
    ids = book.text.long()[None] + 3
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0]
    bits = F.cross_entropy(logits, ids[0, 1:]).item() / math.log(2)
    # Measured 1.35 where it is in the recipe, 4.2 and 3.7 where it is not.
    assert (bits < 1.5) == (entry.training.unwrapped > 0.0)


def test_heads_span_the_half_lives_the_study_needs(shipped):
    entry, model = shipped
    ids = text_ids()
    decays = []
    with torch.no_grad():
        Forward(entry, *training_ops(torch.device("cpu")), compiled=False).losses(
            model.state_dict(), ids[:, :-1], ids[:, 1:], lambda g: decays.append(g.mean((0, 1)))
        )
    lives = math.log(2) / -torch.cat(decays)
    assert lives.min() < 5
    assert lives.max() > 10_000
    assert (lives > 1_000).double().mean() > 0.1
