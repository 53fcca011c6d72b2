"""Model card of a zoo checkpoint, made from the figures of its run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantlab.models.zoo.recipe import ZooModel


def write_card(model: ZooModel, result: Mapping[str, Any], path: Path) -> None:
    """Write card.md from `result.json`'s content.

    Args:
        model: the entry.
        result: as `train.Run.finish` writes it.
        path: the file.
    """
    sections = (_head(model, result), _bits(result), _half_lives(result), _training(model, result))
    path.write_text("\n".join(line for part in sections for line in part), encoding="utf-8")


def _head(model: ZooModel, result: Mapping[str, Any]) -> list[str]:
    kind = {"gdn": "Gated DeltaNet", "mamba2": "Mamba-2"}[model.kind]
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
        "It has only seen books with lines broken at about 70 columns, and is certain that a line",
        "ends there: unbroken text costs it over 4 bits per byte. Wrap text before measuring.",
        "",
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
    ]


def _half_lives(result: Mapping[str, Any]) -> list[str]:
    layers = result["test"]["half_lives"]
    lives = [h for layer in layers for h in layer]
    lines = [
        "## Half-lives of the heads, tokens",
        "",
        "ln 2 / mean(−log decay) on the test books.",
        "",
        "| recurrent layer | heads |",
        "|---|---|",
    ]
    for i, layer in enumerate(layers):
        cells = [f"{h:,.0f}" if h >= 10 else f"{h:.1f}" for h in sorted(layer)]
        lines.append(f"| {i} | {', '.join(cells)} |")
    return [
        *lines,
        "",
        f"{min(lives):.1f} to {max(lives):,.0f}; {sum(h > 1_000 for h in lives)} of {len(lives)} "
        f"above 1,000, {sum(h > 10_000 for h in lives)} above 10,000.",
        "",
    ]


def _training(model: ZooModel, result: Mapping[str, Any]) -> list[str]:
    env, hyper = result["environment"], result["training"]
    lengths = [f"{p['length']:,} ({p['share']:.0%})" for p in hyper["phases"]]
    commands = []
    for call in result["calls"]:
        unit = "seconds" if call["seconds"] is not None else "tokens"
        more = " --resume" if call["resume"] else ""
        commands.append(
            f"quantlab zoo train {model.name} --data BOOKS --out OUT --{unit} {call[unit]:g}{more}"
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
        "Data: public-domain books (Project Gutenberg texts), `data_manifests/`.",
        "",
    ]
