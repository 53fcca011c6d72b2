"""The training books against their manifests: order, what is held out, and what is refused."""

import hashlib
import lzma

import pytest

from quantlab.data.manifest import TESTING, TRAINING, Manifest, Text, load_manifest
from quantlab.errors import MissingAsset, RunError
from quantlab.models.zoo import corpus
from quantlab.models.zoo.corpus import load_corpus

BOOKS = [f"book {i} ".encode() * (20 + i) for i in range(40)]


def text(raw, **fields):
    digest = hashlib.sha256(raw).hexdigest()
    return Text(title=digest[:8], author="A", source="", bytes=len(raw), sha256=digest, **fields)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    (tmp_path / "train.xz").write_bytes(lzma.compress(b"".join(BOOKS[:39])))
    (tmp_path / "test.xz").write_bytes(lzma.compress(BOOKS[39]))
    common = {"summary": "", "kind": "local", "licence": ""}
    manifests = {
        TRAINING: Manifest(
            name=TRAINING,
            split="train",
            file="train.xz",
            texts=tuple(text(raw) for raw in BOOKS[:39]),
            **common,
        ),
        TESTING: Manifest(
            name=TESTING, split="test", texts=(text(BOOKS[39], file="test.xz"),), **common
        ),
    }
    monkeypatch.setattr(corpus, "load_manifest", manifests.__getitem__)
    return tmp_path


def raw(books):
    return [bytes(book.text.tolist()) for book in books]


def test_books_keep_their_order_and_the_least_hashes_are_held_out(directory):
    found = load_corpus(directory)
    held = raw(found.validation)
    assert raw(found.test) == BOOKS[39:]
    assert raw(found.train) == [b for b in BOOKS[:39] if b not in held]
    by_hash = sorted(BOOKS[:39], key=lambda b: hashlib.sha256(b).hexdigest())
    assert sorted(held) == sorted(by_hash[: len(held)])
    # The least number of whole books that hold 5 % of the bytes.
    quota = 0.05 * sum(map(len, BOOKS[:39]))
    assert sum(map(len, held)) >= quota > sum(map(len, by_hash[: len(held) - 1]))


def test_missing_and_damaged_books_are_named(directory):
    whole = (directory / "train.xz").read_bytes()
    changed = b"".join(BOOKS[:39]).replace(b"book 7", b"book 8")
    for content, says in (
        (whole[:50], "is damaged"),
        (b"not xz", "is damaged"),
        (lzma.compress(changed), "another sha256"),
    ):
        (directory / "train.xz").write_bytes(content)
        with pytest.raises(RunError, match=says):
            load_corpus(directory)
    (directory / "train.xz").write_bytes(whole)
    (directory / "test.xz").unlink()
    with pytest.raises(MissingAsset, match=r"test\.xz does not exist: data_manifests/books-test"):
        load_corpus(directory)


def test_training_and_test_books_have_nothing_in_common():
    train, test = load_manifest(TRAINING), load_manifest(TESTING)
    assert not {t.author for t in train.texts} & {t.author for t in test.texts}
    assert all(t.file for t in test.texts) and train.file and train.sha256
    streams = {t.source for t in load_manifest("books").texts}
    assert streams <= {t.source for t in test.texts}
