"""The manifests are complete, and what they list is what ships."""

import hashlib
import lzma

import pytest

from quantlab.data.manifest import (
    MANIFESTS,
    STREAMS_DIRECTORY,
    TESTING,
    TRAINING,
    load_manifest,
)
from quantlab.data.streams import tokens_needed


@pytest.mark.parametrize("name", [*MANIFESTS, TRAINING, TESTING])
def test_every_manifest_states_licence_and_split(name):
    manifest = load_manifest(name)
    assert manifest.name == name
    assert manifest.licence and manifest.summary
    assert manifest.split in {"train", "test"}
    for text in manifest.texts:
        assert len(text.sha256) == 64 and text.source.startswith("https://") and text.author


def test_packaged_streams_match_their_hashes_and_are_long_enough():
    manifest = load_manifest("books")
    assert len(manifest.texts) == 4
    assert len({text.author for text in manifest.texts}) == 3
    for text in manifest.texts:
        data = lzma.decompress((STREAMS_DIRECTORY / text.file).read_bytes())
        assert hashlib.sha256(data).hexdigest() == text.sha256
        assert len(data) == text.bytes >= tokens_needed(prompt=512, tokens=131_072)
        data.decode("utf-8")


def test_no_training_author_is_measured():
    train = {text.author for text in load_manifest("books-train").texts}
    assert not train & {text.author for text in load_manifest("books").texts}


def test_hub_data_set_is_pinned_to_a_commit():
    hub = load_manifest("pg19").hub
    assert len(hub["revision"]) == 40 and hub["file"].endswith(".parquet")
