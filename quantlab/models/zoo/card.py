"""Model card of a zoo checkpoint, made from the figures of its run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantlab.models.zoo.recipe import ZooModel

BOOKS = """\
It has only seen books with lines broken at about 70 columns, and is certain that a line
ends there: unbroken text costs it over 4 bits per byte. Wrap text before measuring.
"""
BOOKS_AND_UNWRAPPED = """\
It has seen books with lines broken at about 70 columns, and {share:.0%} of the time with the lines
of their paragraphs joined.
"""
PROBLEMS = """\
It writes out the solutions of the embedded tasks (`quantlab ls --tasks`) and nothing else. Its
accuracy under a state format, with intervals and by length, is what `quantlab eval` measures.
"""
BOOK_DATA = "Data: public-domain books (Project Gutenberg texts), `data_manifests/`.\n"
PROBLEM_DATA = """\
Data: made by `quantlab.data.tasks` (seeds from 1; evaluation asks problems of seed 0); a row is
one problem from its beginning, and only the bytes of its solution count.
"""
BINS = (256, 512, 1_024, 2_048, 1 << 62)
"""Tokens of a solution up to which a column of the card goes."""


def write_card(model: ZooModel, result: Mapping[str, Any], path: Path) -> None:
    """Write card.md from `result.json`'s content.

    Args:
        model: the entry.
        result: as `train.Run.finish` writes it.
        path: the file.
    """
    if model.problems is None:
        about, figures, source = BOOKS, _bits(result), BOOK_DATA
        if model.training.unwrapped > 0.0:
            about = BOOKS_AND_UNWRAPPED.format(share=model.training.unwrapped)
    else:
        about, figures, source = PROBLEMS, _solved(result), PROBLEM_DATA
    what = "the test books" if model.problems is None else "held-out problems of the widest rows"
    sections = (
        _head(model, result, about),
        figures,
        _half_lives(result, what),
        _training(model, result, source),
    )
    path.write_text("\n".join(line for part in sections for line in part), encoding="utf-8")


def _head(model: ZooModel, result: Mapping[str, Any], about: str) -> list[str]:
    kind = {"gdn": "Gated DeltaNet", "mamba2": "Mamba-2", "kda": "Kimi delta attention"}[model.kind]
    count = result["parameters"]
    return [
        f"# {model.name}",
        "",
        f"A {count:,}-parameter byte-level hybrid ({kind} and attention) in the architecture of",
        f"transformers' `{model.model_type}`, {count * 2 / 1e6:.1f} MB in BF16. Token ids are",
        f"byte + 3 (ByT5's tokenizer), vocabulary {model.config['vocab_size']}.",
        "",
        "It exists to study the numerics of the recurrent state offline: dk = 128 as in the real",
        "models, heads whose half-lives span several decades, and attention without a position",
        "encoding that could break beyond the training lengths. It is no model to use otherwise.",
        *about.split("\n"),
    ]


def _bits(result: Mapping[str, Any]) -> list[str]:
    test = result["test"]
    lines = [
        "## Bits per byte",
        "",
        f"Test books, by authors absent from training; {test['windows']} windows.",
        "*Last 1,024*: the same bytes under every context length. *All*: whole windows, with",
        "their beginnings.",
        "",
        "| context | last 1,024 | minus 16,384 (± standard error, paired) | all |",
        "|---|---|---|---|",
    ]
    for context, bits in test["bits"].items():
        mean, error = test["difference_from_16384"][context]
        lines.append(
            f"| {int(context):,} | {bits:.4f} | {mean:+.4f} ± {error:.4f} "
            f"| {test['whole'][context]:.4f} |"
        )
    positions = [f"to {int(p):,}: {b:.3f}" for p, b in test["by_position"]]
    return [
        *lines,
        "",
        "By position within the longest windows: " + ", ".join(positions) + ".",
        "",
        "Held-out training books (5 % of the training text, whole books, never trained on), at",
        f"16,384 bytes: {result['validation_bits']:.4f}.",
        "",
        *_unwrapped(test),
    ]


def _unwrapped(test: Mapping[str, Any]) -> list[str]:
    if test.get("unwrapped") is None:
        return []
    return [
        "The same last 1,024 bytes with the lines of every paragraph joined, context 16,384:",
        f"{test['unwrapped']:.4f}.",
        "",
    ]


def _solved(result: Mapping[str, Any]) -> list[str]:
    test = result["test"]
    heads = [f"to {edge:,}" for edge in BINS[:-1]] + ["longer"]
    lines = [
        "## Solutions written without a wrong token",
        "",
        f"Percent of held-out problems, {test['problems']} of each task and width of rows, by",
        "tokens of the solution: the chance at temperature 1, top-p 0.95, and in brackets the",
        "share that greedy decoding writes. From teacher-forced logits, exactly; an answer can",
        "also be right after a wrong line, so accuracy is this or more.",
        "",
        f"| task | {' | '.join(heads)} | all |",
        "|---|" + "---|" * (len(heads) + 1),
    ]
    for task, lengths in test["tokens"].items():
        low = 0
        cells = []
        for edge in (*BINS, None):
            inside = [w for w, n in lengths.items() if edge is None or low < n <= edge]
            cells.append(_share(test, task, inside))
            low = edge or low
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return [
        *lines,
        "",
        f"Bits per byte of solutions: {test['bits']:.4f}.",
        "",
    ]


def _share(test: Mapping[str, Any], task: str, widths: Sequence[str]) -> str:
    if not widths:
        return "–"
    chance, greedy = (
        100 * sum(test[key][task][w] for w in widths) / len(widths) for key in ("chance", "greedy")
    )
    return f"{chance:.1f} ({greedy:.1f})"


def _half_lives(result: Mapping[str, Any], what: str) -> list[str]:
    layers = result["test"]["half_lives"]
    per_channel = isinstance(layers[0][0], list)
    lines = [
        f"## Half-lives of the {'key channels' if per_channel else 'heads'}, tokens",
        "",
        f"ln 2 / mean(−log decay) on {what}.",
        "",
        f"| recurrent layer | heads{': fastest, median, slowest channel' if per_channel else ''} |",
        "|---|---|",
    ]
    for i, layer in enumerate(layers):
        if per_channel:
            heads = sorted((sorted(h) for h in layer), key=statistics.median)
            cells = [f"{_life(h[0])}, {_life(statistics.median(h))}, {_life(h[-1])}" for h in heads]
        else:
            cells = [_life(h) for h in sorted(layer)]
        lines.append(f"| {i} | {('; ' if per_channel else ', ').join(cells)} |")
    lives = [h for layer in layers for head in layer for h in (head if per_channel else [head])]
    return [
        *lines,
        "",
        f"{min(lives):.1f} to {max(lives):,.0f}; {sum(h > 1_000 for h in lives)} of {len(lives)} "
        f"above 1,000, {sum(h > 10_000 for h in lives)} above 10,000.",
        "",
    ]


def _life(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 10 else f"{tokens:.1f}"


def _training(model: ZooModel, result: Mapping[str, Any], source: str) -> list[str]:
    env, hyper = result["environment"], result["training"]
    data = "--data BOOKS " if model.problems is None else ""
    lengths = [f"{p['length']:,} ({p['share']:.0%})" for p in hyper["phases"]]
    commands = []
    for call in result["calls"]:
        unit = "seconds" if call["seconds"] is not None else "tokens"
        more = " --resume" if call["resume"] else ""
        commands.append(
            f"quantlab zoo train {model.name} {data}--out OUT --{unit} {call[unit]:g}{more}"
        )
    return [
        "## Training",
        "",
        "```",
        *commands,
        "```",
        "",
        f"{result['tokens']:,} tokens in {result['steps']:,} steps,",
        f"{result['training_seconds']:.0f} s on {env['device']} after compilation",
        f"(torch {env['torch']}, transformers {env['transformers']}). Sequence lengths, with their",
        "share of the budget, in order:",
        f"{', '.join(lengths)}.",
        f"Muon and AdamW; rates flat, linear over the last {hyper['decay_share']:.0%}. Recipe:",
        "`quantlab/models/zoo/recipe.py`; log and figures: `reports/zoo/`.",
        "",
        *source.split("\n"),
    ]
