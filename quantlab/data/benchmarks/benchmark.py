"""Public benchmarks: what their manifests say, and their questions in a fixed order."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from quantlab.data.benchmarks.extraction import last_box, last_letter
from quantlab.data.documents import download
from quantlab.data.manifest import manifest_path
from quantlab.errors import RunError, UsageError

BENCHMARKS = ("mmlu-pro", "gpqa-diamond", "math-level-5", "gsm8k", "aime")
"""Manifests of benchmarks."""
SAMPLING = "sampling"
"""Manifest of the sampling settings by model."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Kind = Literal["choice", "math"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark's manifest.

    Attributes:
        name: what `--task` calls it.
        summary: one line for lists.
        licence: of the questions.
        repository: hub data set.
        revision: commit of it, or "main" where the manifest says why.
        files: files of it, in order.
        split: of the data set.
        kind: how answers are found: "choice" (a letter) or "math" (a boxed expression).
        columns: of `question`, `answer`, and `options` (one column with a list) or `wrong`
            (columns of wrong options, which are shuffled with the right one).
        keep: column → value of the questions that belong to it.
        prompt: with `{question}`, and `{options}` for choices.
        budget: output tokens unless `--budget` says otherwise.
        repetitions: of the paper's protocol.
        questions: how many there should be.
        answer_after: the gold answer is what follows this in its column; empty for all of it.
        answer_boxed: the gold answer is the last box of its column.
    """

    name: str
    summary: str
    licence: str
    repository: str
    revision: str
    files: tuple[str, ...]
    split: str
    kind: Kind
    columns: Mapping[str, Any]
    prompt: str
    budget: int
    repetitions: int
    questions: int
    keep: Mapping[str, Any] = field(default_factory=dict)
    answer_after: str = ""
    answer_boxed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question.

    Attributes:
        id: index in the benchmark.
        prompt: the user's message.
        gold: letter, or LaTeX of the right answer.
        options: how many there are; 0 for mathematics.
    """

    id: int
    prompt: str
    gold: str
    options: int = 0

    def extract(self, text: str) -> str | None:
        """Answer of an output without its reasoning (`final_text`), or None."""
        return last_letter(text, self.options) if self.options else last_box(text)


def load_benchmark(name: str) -> Benchmark:
    """Read a manifest.

    Raises:
        UsageError: no such benchmark.
        RunError: the manifest is missing or malformed: the installation is broken.
    """
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"unknown benchmark {name!r}.{hint} Known: {', '.join(BENCHMARKS)}")
    raw = _read(name)
    try:
        fields = {key: raw[key] for key in Benchmark.__dataclass_fields__ if key in raw}
        return Benchmark(**{**fields, "files": tuple(raw["files"])})
    except (KeyError, TypeError) as error:
        raise RunError(f"{manifest_path(name)} is not a benchmark's manifest: {error}") from error


def paper_sampling(model: str) -> dict[str, float]:
    """Look up the paper's sampling settings for a model, by `Sampling`'s names; empty if unknown.

    Args:
        model: preset name.
    """
    return dict(_read(SAMPLING).get(model, {}))


def load_items(benchmark: Benchmark) -> list[Item]:
    """Questions of a benchmark in the order of its files.

    Raises:
        MissingAsset: the data are neither cached nor reachable.
        RunError: they are not what the manifest says.
    """
    import datasets

    paths = [
        str(
            download(
                benchmark.repository,
                benchmark.revision,
                file,
                otherwise="then run the same command again",
            )
        )
        for file in benchmark.files
    ]
    form = "csv" if benchmark.files[0].endswith(".csv") else "parquet"
    table = datasets.load_dataset(form, data_files={benchmark.split: paths}, split=benchmark.split)
    return make_items(benchmark, list(table))


def make_items(benchmark: Benchmark, rows: list[dict[str, Any]]) -> list[Item]:
    """Questions of rows as the data set has them.

    Raises:
        RunError: a column is missing, or the number of questions is not the manifest's.
    """
    items: list[Item] = []
    try:
        for row in rows:
            if all(row[column] == value for column, value in benchmark.keep.items()):
                items.append(_item(benchmark, row, len(items)))
    except (KeyError, IndexError) as error:
        raise RunError(f"{benchmark.name}: the data have no {error}") from error
    if len(items) != benchmark.questions:
        raise RunError(
            f"{benchmark.name} has {len(items):,} questions at revision {benchmark.revision}, its "
            f"manifest says {benchmark.questions:,}"
        )
    return items


def _item(benchmark: Benchmark, row: dict[str, Any], index: int) -> Item:
    columns = benchmark.columns
    question, gold = str(row[columns["question"]]).strip(), str(row[columns["answer"]]).strip()
    if benchmark.kind == "math":
        if benchmark.answer_after:
            gold = gold.split(benchmark.answer_after)[-1].strip().replace(",", "")
        if benchmark.answer_boxed:
            box = last_box(gold)
            if box is None:
                raise RunError(f"{benchmark.name}: question {index} has no boxed answer")
            gold = box
        return Item(id=index, prompt=_fill(benchmark.prompt, question=question), gold=gold)
    if "options" in columns:
        options = [str(option).strip() for option in row[columns["options"]]]
        letter = gold
    else:
        options = [gold, *(str(row[column]).strip() for column in columns["wrong"])]
        # the right answer is listed first in the data: shuffled by the question's index alone
        key = np.array([0x0971045, index], np.uint64)
        order = np.random.Generator(np.random.Philox(key=key)).permutation(len(options)).tolist()
        letter = LETTERS[order.index(0)]
        options = [options[i] for i in order]
    listed = "\n".join(f"{LETTERS[i]}. {option}" for i, option in enumerate(options))
    prompt = _fill(benchmark.prompt, question=question, options=listed)
    return Item(id=index, prompt=prompt, gold=letter, options=len(options))


def _fill(prompt: str, **values: str) -> str:
    """Put values in; braces of LaTeX are left alone, which `str.format` would not do."""
    for name, value in values.items():
        prompt = prompt.replace("{" + name + "}", value)
    return prompt.strip()


def _read(name: str) -> dict[str, Any]:
    path = manifest_path(name)
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{path} is damaged: {error}") from error
