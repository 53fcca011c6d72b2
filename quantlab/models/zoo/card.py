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
    test = result["test"]
    lives = [h for layer in test["half_lives"] for h in layer]
    slow = sum(h > 1_000 for h in lives)
    kind = {"gdn": "Gated DeltaNet", "mamba2": "Mamba-2"}[model.kind]
    size = result["parameters"] * 2 / 1e6
    lines = [
        f"# {model.name}",
        "",
        f"A {result['parameters']:,}-parameter byte-level hybrid ({kind} and attention) in the architecture of "
        f"transformers' `{model.model_type}`, {size:.1f} MB in BF16. Token ids are byte + 3 (ByT5's tokenizer), "
        f"vocabulary {model.config['vocab_size']}.",
        "",
        "It exists to study the numerics of the recurrent state offline: dk = 128 as in the real models, heads "
        "whose half-lives span several decades, attention without a position encoding that could break beyond "
        "the training lengths. It is no language model to use for anything else.",
        "",
        "## Test books: bits per byte",
        "",
        f"Eight books by authors absent from training; {test['windows']} windows. *Last 1,024 bytes*: the same "
        "bytes under every context length. *All bytes*: mean over the whole windows, their beginnings included.",
        "",
        "| context | last 1,024 bytes | minus 16,384 (± standard error, paired) | all bytes |",
        "|---|---|---|---|",
    ]
    for context, bits in test["bits"].items():
        mean, error = test["difference_from_16384"][context]
        lines.append(
            f"| {int(context):,} | {bits:.4f} | {mean:+.4f} ± {error:.4f} | {test['whole'][context]:.4f} |"
        )
    lines += [
        "",
        f"By position within the longest windows: "
        + ", ".join(f"to {int(p):,}: {b:.3f}" for p, b in test["by_position"])
        + ".",
        "",
        f"Held-out training books (5 % of the text, whole books, never trained on), 16,384 bytes: "
        f"{result['validation_bits']:.4f}.",
        "",
        "## Half-lives of the heads, tokens",
        "",
        "ln 2 / mean(−log decay) on the test books.",
        "",
        "| recurrent layer | heads |",
        "|---|---|",
    ]
    for i, layer in enumerate(test["half_lives"]):
        lines.append(
            f"| {i} | "
            + ", ".join(f"{h:,.0f}" if h >= 10 else f"{h:.1f}" for h in sorted(layer))
            + " |"
        )
    env = result["environment"]
    lines += [
        "",
        f"{min(lives):.1f} to {max(lives):,.0f}; {slow} of {len(lives)} above 1,000, "
        f"{sum(h > 10_000 for h in lives)} above 10,000.",
        "",
        "## Training",
        "",
        f"`quantlab zoo train {model.name}`: {result['tokens']:,} tokens in {result['steps']:,} steps, "
        f"{result['training_seconds']:.0f} s of {env['device']} after compilation (torch {env['torch']}, "
        f"transformers {env['transformers']}). Sequence lengths "
        + ", ".join(f"{p['length']:,} ({p['share']:.0%})" for p in result["training"]["phases"])
        + " in that order. Muon and AdamW, rates flat then decayed linearly over the last "
        f"{result['training']['decay_share']:.0%}. Recipe: `quantlab/models/zoo/recipe.py`; log: `reports/zoo/`.",
        "",
        "Data: public-domain books (Project Gutenberg texts, English, 163 books for training). Weights: CC0-1.0.",
        "",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
