"""Case D07: at most one BOS, none without a BOS token, exact ids."""

import numpy as np
import pytest

from quantlab.data import encoder_of, load_streams
from quantlab.errors import UsageError


def make_tokenizer(*, bos: bool, adds_bos: bool):
    """A real fast tokenizer of characters, Llama-like (adds a BOS) or Qwen-like (has none)."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1} | {c: i for i, c in enumerate("abcdefgh<>s ", 2)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    extra = {"bos_token": "<s>"} if bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **extra)


def test_D07_tokenizer_that_adds_a_bos_gives_one():
    encoder = encoder_of(make_tokenizer(bos=True, adds_bos=True))
    ids = encoder.encode("abab")
    assert encoder.bos_id == 1
    assert ids.tolist() == [1, 2, 3, 2, 3]
    assert np.count_nonzero(ids == 1) == 1


def test_D07_spelled_out_bos_in_the_text_is_text():
    # "<s>" in a book is three characters; parsed as a special token it would be a second BOS
    ids = encoder_of(make_tokenizer(bos=True, adds_bos=True)).encode("<s>a")
    assert ids[0] == 1 and np.count_nonzero(ids == 1) == 1


def test_D07_tokenizer_with_a_bos_that_it_does_not_add_gets_none():
    encoder = encoder_of(make_tokenizer(bos=True, adds_bos=False))
    assert encoder.bos_id is None and encoder.encode("ab").tolist() == [2, 3]


def test_D07_qwen_like_tokenizer_without_bos():
    encoder = encoder_of(make_tokenizer(bos=False, adds_bos=False))
    assert encoder.bos_id is None and encoder.encode("ab").tolist() == [2, 3]


def test_never():
    encoder = encoder_of(make_tokenizer(bos=True, adds_bos=True), bos="never")
    assert encoder.bos_id is None and encoder.encode("ab").tolist() == [2, 3]


def test_no_end_token_is_added():
    transformers = pytest.importorskip("transformers")
    ids = encoder_of(transformers.ByT5Tokenizer()).encode("ab")
    assert ids.tolist() == [100, 101]


def test_D07_exact_ids_are_logged(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefgh", "utf-8")
    got = load_streams(
        str(path),
        tokenizer=make_tokenizer(bos=True, adds_bos=True),
        streams=1,
        tokens=4,
        prompt=4,
    )
    assert got.provenance()["bos_id"] == 1
    assert got.provenance()["streams"][0]["first_ids"] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_bos_inside_the_text_is_refused():
    class Odd:
        bos_token_id = 7

        def __call__(self, text, **_):
            return {"input_ids": [5, 7]}

    with pytest.raises(UsageError, match=r"beginning-of-sequence token \(id 7\) at token 1"):
        encoder_of(Odd()).encode("x")
