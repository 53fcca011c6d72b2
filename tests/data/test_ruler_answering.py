"""RULER's question answering, on made-up data laid out as the public ones."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quantlab.data.ruler import ANSWERING, answering, ruler_items, ruler_tasks
from quantlab.errors import MissingAsset, RunError, UsageError
from quantlab.study.accuracy_rows import _graded
from quantlab.study.accuracy_spec import Asked

SQUAD = [
    {
        "id": f"{a}{p}{q}",
        "title": f"Article {a}",
        "context": f"Paragraph {p} of {a} says that its {{word}} is w{a}{p}.",
        "question": f"What is the word of {p} in {a}? ",
        # the second question of a paragraph has no answer
        "answers": {"text": [f"w{a}{p}", f" w{a}{p}", f"its w{a}{p}"] if q == 0 else []},
    }
    for a in range(4)
    for p in range(5)
    for q in range(2)
]
HOTPOT = [
    {
        "question": f"Who wrote the song of film {i}?",
        "answer": f"Writer {i}",
        "context": {
            "title": [f"Song {i}", f"Film {i}", f"Elsewhere {i // 2}"],
            "sentences": [
                [f"Song {i} is by Writer {i}.", " It is old."],
                [f"It has Song {i}."],
                ["."],
            ],
        },
    }
    for i in range(6)
]
ROWS = {"ruler-squad": SQUAD, "ruler-hotpotqa": HOTPOT}


@pytest.fixture
def local(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def download(repository, revision, file, *, otherwise):
        (task,) = [t for t, own in ruler_tasks().items() if own.get("repository") == repository]
        path = tmp_path / f"{task}.parquet"
        pq.write_table(pa.Table.from_pylist(ROWS[task]), path)
        return path

    monkeypatch.setattr(answering, "download", download)


def documents(item):
    return re.findall(r"Document \d+:\n(.*?)\n\n", item.prompt, re.S)


@pytest.mark.parametrize("task", ANSWERING)
def test_own_documents_are_there_at_any_length(task, local):
    for index, item in enumerate(ruler_items(task, 5)):
        kept = None
        for room in (700, 1100, 3000):
            fitted = item.fitted(room, len)
            assert room - 150 < len(fitted.prompt) <= room
            found = documents(fitted)
            said = [d for d in found if fitted.references[0] in d]
            assert said  # the answer can be read
            if task == "ruler-hotpotqa":
                own = [f"Song {index}\n", f"Film {index}\n", f"Elsewhere {index // 2}\n"]
                assert [sum(d.startswith(o) for d in found) >= 1 for o in own] == [True] * 3
            # a longer context has what a shorter one has, and its numbers go up
            assert kept is None or set(kept) <= set(found)
            numbers = re.findall(r"Document (\d+):", fitted.prompt)
            assert numbers == [str(i) for i in range(1, len(found) + 1)]
            kept = found


def test_paragraphs_of_the_same_article_come_first(local):
    item = ruler_items("ruler-squad", 1)[0]
    four = item.build(4)[0]
    assert len(re.findall("of 0 says", four)) == 5 and "of 1 says" not in four
    assert len(re.findall("Document", item.build(19)[0])) == 20
    items = [i.fitted(900, len) for i in ruler_items("ruler-squad", 9)]
    places = {next(n for n, d in enumerate(documents(i)) if i.references[0] in d) for i in items}
    assert len(places) > 3


def test_any_answer_is_right(local):
    # those without an answer are not asked; equal answers count once
    item = ruler_items("ruler-squad", 20)[7].fitted(900, len)
    assert item.references == ("w12", "its w12") and "{word}" in item.prompt
    asked = Asked(id=0, task="ruler-squad", question=7, source=item)
    assert _graded("It is W12.", asked, None)[1:] == ("right", 1.0)
    assert _graded("It is w1.", asked, None)[1:] == ("none", 0.0)
    with pytest.raises(UsageError, match="--limit 21: ruler-squad has 20 questions"):
        ruler_items("ruler-squad", 21)


def test_other_data_are_refused():
    settings = ruler_tasks()["ruler-hotpotqa"]
    with pytest.raises(RunError, match="ruler-hotpotqa: the data have no 'context'"):
        answering.read_queries(settings, [{"question": "?"}])


@pytest.mark.parametrize("task", ANSWERING)
def test_missing_data_are_named(task, monkeypatch):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "dataset_info", refuse)
    repository = ruler_tasks()[task]["repository"]
    with pytest.raises(MissingAsset, match=f"the data set {repository} at revision main") as found:
        ruler_items(task, 1)
    assert found.value.exit_code == 5


@pytest.mark.parametrize("task", ANSWERING)
def test_manifests_say_everything(task):
    settings = ruler_tasks()[task]
    assert {"licence", "revision", "prompt", "scored", "budget", "summary"} <= set(settings)
    assert settings["prompt"].count("{documents}") == settings["prompt"].count("{question}") == 1
    assert settings["source"] == f"{settings['repository']}@main"
