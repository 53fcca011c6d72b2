"""RULER's two tasks on public data: a question among documents of which few say the answer.

A question's own documents lie at places drawn for it among others, those of the same article first
where the data have articles. A longer context has the documents of a shorter one and more; once
all others are there they begin again.

Source: Hsieh et al. 2024, arXiv 2404.06654, section 3 ("question answering").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantlab.data.documents import download
from quantlab.data.ruler.draws import among, generator_of
from quantlab.data.ruler.item import Builder, Built, RulerItem
from quantlab.errors import RunError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One question of the data.

    Attributes:
        text: the question.
        answers: any of which is right; each once.
        own: documents that belong to it, as indices.
        near: others of the same article.
    """

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


def answering_items(task: str, count: int, settings: Mapping[str, Any]) -> list[RulerItem]:
    """Make the first questions of a task, not yet of any length.

    Args:
        task: its name; keys draws.
        count: how many.
        settings: its manifest.

    Raises:
        MissingAsset: the data are neither cached nor reachable.
        RunError: they are not what the manifest says.
        UsageError: they have fewer questions.
    """
    documents, queries = read_queries(settings, _rows(settings))
    if count > len(queries):
        raise UsageError(f"--limit {count:,}: {task} has {len(queries):,} questions")
    return [
        RulerItem(
            id=index, build=_builder(task, index, settings, documents, query), any_answer=True
        )
        for index, query in enumerate(queries[:count])
    ]


def read_queries(
    settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[Query]]:
    """Documents, sorted and each once, and the questions that have an answer, in their order.

    Raises:
        RunError: a column is missing.
    """
    read = {"squad": _squad, "hotpotqa": _hotpotqa}[settings["layout"]]
    try:
        found = [read(row) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{settings['name']}: the data have no {error}") from error
    documents = sorted({text for own, _, _, _ in found for text in own})
    place = {text: i for i, text in enumerate(documents)}
    of_article: dict[str, dict[int, None]] = {}
    for own, article, _, _ in found:
        if article:
            of_article.setdefault(article, {}).update((place[text], None) for text in own)
    queries = []
    for own, article, question, answers in found:
        kept = tuple(dict.fromkeys(a.strip() for a in answers if a.strip()))
        if kept:
            mine = tuple(place[text] for text in dict.fromkeys(own))
            near = tuple(i for i in of_article.get(article, ()) if i not in mine)
            queries.append(Query(text=question.strip(), answers=kept, own=mine, near=near))
    return documents, queries


_Read = tuple[list[str], str, str, list[str]]
"""Own documents, article, question, answers."""


def _squad(row: Mapping[str, Any]) -> _Read:
    return [row["context"]], row["title"], row["question"], list(row["answers"]["text"])


def _hotpotqa(row: Mapping[str, Any]) -> _Read:
    context = row["context"]
    pairs = zip(context["title"], context["sentences"], strict=True)
    return [f"{t}\n{''.join(s)}" for t, s in pairs], "", row["question"], [row["answer"]]


def _builder(
    task: str, index: int, settings: Mapping[str, Any], documents: Sequence[str], query: Query
) -> Builder:
    near = generator_of(task, index, 0).permutation(query.near).astype(int).tolist()
    taken = {*query.own, *query.near}
    drawn = generator_of(task, index, 1).permutation(len(documents)).tolist()
    others = near + [i for i in drawn if i not in taken]

    def build(units: int) -> Built:
        crowd = [documents[others[i % len(others)]] for i in range(units)] if others else []
        own = [documents[i] for i in query.own]
        mixed = among(generator_of(task, index, 2), crowd, own)
        text = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(mixed, 1))
        prompt = str(settings["prompt"]).strip()
        # in one go: what is put in may hold braces
        head, rest = prompt.split("{documents}")
        between, tail = rest.split("{question}")
        return f"{head}{text}{between}{query.text}{tail}", query.answers

    return build


def _rows(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    paths = [
        str(
            download(
                settings["repository"],
                settings["revision"],
                file,
                otherwise="then run the same command again",
            )
        )
        for file in settings["files"]
    ]
    import datasets

    split = settings["split"]
    return list(datasets.load_dataset("parquet", data_files={split: paths}, split=split))
