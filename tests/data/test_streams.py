"""Streams: ids, lengths, hashes and the errors of every bad `--data`."""

import hashlib
import json
import lzma

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import quantlab.data.documents as documents_module
from quantlab.data import ByteTokenizer, load_streams, tokens_needed
from quantlab.data.manifest import STREAMS_DIRECTORY
from quantlab.errors import MissingAsset, RunError, UsageError


def load(data, *, streams=None, tokens=8, prompt=4, tokenizer=None):
    return load_streams(
        str(data),
        tokenizer=tokenizer or ByteTokenizer(),
        streams=streams,
        tokens=tokens,
        prompt=prompt,
    )


def test_byte_tokenizer_is_byt5():
    transformers = pytest.importorskip("transformers")
    text = "Sulaco — “Nostromo”, 1904\n"
    ids = ByteTokenizer().encode(text)
    assert ids.tolist() == transformers.ByT5Tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert ByteTokenizer().decode(ids) == text


def test_books_give_prompt_plus_n_plus_one_tokens_and_their_hashes():
    got = load("books", tokens=131_072, prompt=512)
    assert got.tokens.shape == (4, 131_585)
    assert got.bos_id is None
    raw = lzma.decompress((STREAMS_DIRECTORY / "lord-jim.txt.xz").read_bytes())
    index = [s.name for s in got.streams].index("lord-jim")
    expected = np.frombuffer(raw[:131_585], np.uint8).astype("<i8") + 3
    assert got.tokens[index].tolist() == expected.tolist()
    assert got.streams[index].tokens_sha256 == hashlib.sha256(expected.tobytes()).hexdigest()
    assert got.streams[index].text_sha256 == hashlib.sha256(raw).hexdigest()


def test_provenance_is_json():
    assert json.loads(json.dumps(load("books").provenance()))["length"] == 13


def test_prefix_of_a_longer_study_is_the_shorter_study():
    short, long = load("books", tokens=100), load("books", tokens=1000)
    assert (long.tokens[:, : short.tokens.shape[1]] == short.tokens).all()


def test_local_txt_is_one_stream(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 13, "utf-8")
    assert load(path).tokens.shape == (1, 13)
    with pytest.raises(UsageError, match=r"--streams 2: .*a.txt has 1 document, and each"):
        load(path, streams=2)


def test_jsonl_takes_the_first_documents_that_are_long_enough(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["short", "b" * 20, "c" * 13, "d" * 40]
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts) + "\n\n", "utf-8")
    got = load(path, streams=2)
    assert [s.name for s in got.streams] == ["a:2", "a:3"]
    assert [s.name for s in load(path).streams] == ["a:2", "a:3", "a:4"]


def test_folder_reads_its_files_in_order(tmp_path):
    for name in "bac":
        (tmp_path / f"{name}.txt").write_text(name * 13, "utf-8")
    assert [s.name for s in load(tmp_path).streams] == ["a", "b", "c"]


@pytest.mark.parametrize("streams", [None, 1])
def test_too_short_says_the_longest_n(tmp_path, streams):
    path = tmp_path / "a.txt"
    path.write_text("x" * 12, "utf-8")
    with pytest.raises(UsageError, match=r"needs prompt \+ N \+ 1 = 13 .* longest N .* is 7"):
        load(path, streams=streams)
    assert load(path, tokens=7, streams=streams).tokens.shape == (1, 12)


def test_longest_n_is_that_of_the_wanted_number_of_streams():
    with pytest.raises(UsageError, match="longest N possible with 4 streams is 149,496"):
        load("books", streams=4, tokens=150_000, prompt=512)


def test_shorter_than_the_prompt(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("xxx", "utf-8")
    with pytest.raises(UsageError, match="not even the prompt of 4"):
        load(path)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(UsageError, match=r"no such data set or file .*did you mean 'books'"):
        load("bocks")


def test_other_suffix_and_empty_folder(tmp_path):
    (tmp_path / "a.csv").write_text("x", "utf-8")
    with pytest.raises(UsageError, match=r"\.csv is not supported"):
        load(tmp_path / "a.csv")
    with pytest.raises(UsageError, match=r"holds no \.txt or \.jsonl"):
        load(tmp_path)


@pytest.mark.parametrize("line", ["{", '{"txt": "a"}', '{"text": 1}', "[1]"])
def test_malformed_json_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "ok"}) + "\n" + line + "\n", "utf-8")
    with pytest.raises(UsageError, match=r"a\.jsonl, line 2: expected a JSON object"):
        load(path)


def test_binary_file_is_not_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UsageError, match="not UTF-8"):
        load(path)


def test_altered_packaged_stream_is_refused(tmp_path, monkeypatch):
    for file in STREAMS_DIRECTORY.glob("*.xz"):
        data = lzma.decompress(file.read_bytes())
        (tmp_path / file.name).write_bytes(lzma.compress(data[:-1] + b"!"))
    monkeypatch.setattr(documents_module, "STREAMS_DIRECTORY", tmp_path)
    with pytest.raises(RunError, match=r"not the file of the manifest books: sha256 \w+, expected"):
        load("books")


FILE = "data/test-00000-of-00001-29a571947c0b5ccc.parquet"


def hub_file(folder):
    path = folder / FILE
    path.parent.mkdir(parents=True)
    columns = {"short_book_title": ["A", "B"], "text": ["a" * 5, "b" * 50]}
    pq.write_table(pa.table(columns), path)
    return path


class ConnectError(Exception):
    """An HTTP library's own error: no OSError."""


@pytest.mark.parametrize("step", ["dataset_info", "hf_hub_download"])
@pytest.mark.parametrize("error", [LocalEntryNotFoundError, ConnectError])
def test_missing_hub_data_set_names_it_and_how_to_get_it(monkeypatch, step, error):
    def unreachable(*args, **kwargs):
        raise error("cannot find the file\nand a second line")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, step, unreachable)
    with pytest.raises(MissingAsset) as caught:
        load("pg19")
    assert caught.value.exit_code == 5
    for part in ("emozilla/pg19-test", "c5e39bf32e33", "hf download", "hub cache"):
        assert part in str(caught.value)


@pytest.mark.parametrize("cached", [False, True])
def test_hub_data_set_is_read_through_datasets(monkeypatch, tmp_path, cached):
    path = hub_file(tmp_path)
    asked = []

    def look(repository, file, **kwargs):
        asked.append((repository, file, kwargs["repo_type"], kwargs["revision"]))
        return str(path) if cached else None

    def request(*args, **kwargs):
        assert not cached, "a pinned file that is cached needs no request"
        assert kwargs["revision"] == asked[0][3]
        return str(path)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", look)
    monkeypatch.setattr(huggingface_hub, "dataset_info", request)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", request)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    got = load("pg19")
    assert [s.name for s in got.streams] == ["B"] and got.tokens.shape == (1, 13)
    revision = "c5e39bf32e33f9111323aa68d7d9000d22722035"
    assert asked == [("emozilla/pg19-test", FILE, "dataset", revision)]


def test_tokens_needed():
    assert tokens_needed(prompt=512, tokens=4096) == 4609
