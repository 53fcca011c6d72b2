"""What a reasoner's card states: the chance that it writes a whole solution, by task and length.

Generation that has written the worked solution so far sees what teacher forcing feeds. So one
forward over problem and solution gives, exactly, the chance that sampling writes the solution
without a wrong token (a product over its tokens) and whether greedy decoding does. An answer can
also come out right after a wrong line, so accuracy is this or more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantlab.data.tasks import TASKS
from quantlab.models.zoo.forward import Forward
from quantlab.models.zoo.problems import ProblemSource
from quantlab.models.zoo.source import Batch

TOP_P = 0.95
"""Of sampling at temperature 1, the settings that `quantlab eval` has by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """Figures on held-out problems.

    Args:
        problems: of each task and width.
        chance: task → width → mean chance of the whole solution at temperature 1, top-p 0.95.
        greedy: task → width → share of problems that greedy decoding writes out.
        tokens: task → width → mean tokens of the solution.
        bits: mean bits per byte of solutions.
        half_lives: [layers][heads] tokens: ln 2 / mean(−log decay) over the widest problems.
    """

    problems: int
    chance: Mapping[str, Mapping[int, float]]
    greedy: Mapping[str, Mapping[int, float]]
    tokens: Mapping[str, Mapping[int, float]]
    bits: float
    half_lives: list[list[float]]

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""

        def plain(table: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, float]]:
            return {task: {str(k): v for k, v in row.items()} for task, row in table.items()}

        return {
            "problems": self.problems,
            "chance": plain(self.chance),
            "greedy": plain(self.greedy),
            "tokens": plain(self.tokens),
            "bits": self.bits,
            "half_lives": self.half_lives,
        }


@torch.no_grad()
def chances(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log chance of every row's solution, and whether greedy decoding writes it.

    Args:
        logits: [rows, T, V] FP32.
        batch: whose targets count where the solution is.

    Returns:
        [rows] FP64 and [rows] bool.
    """
    assert batch.counted is not None
    rows = torch.arange(len(logits), device=logits.device)[:, None].expand(batch.counted.shape)
    rows, target = rows[batch.counted], batch.targets[batch.counted, None]
    p, order = logits[batch.counted].double().softmax(-1).sort(-1, descending=True)
    kept = p * (p.cumsum(-1) - p < TOP_P)
    right = order == target
    log_chance = ((kept * right).sum(-1) / kept.sum(-1)).log()
    zeros = log_chance.new_zeros(len(logits))
    wrong = zeros.index_add(0, rows, (~right[:, 0]).double())
    return zeros.index_add(0, rows, log_chance), wrong == 0


def evaluate_problems(
    forward: Forward, weights: Mapping[str, Tensor], source: ProblemSource
) -> Solved:
    """Measure a model on the held-out problems.

    Runs with gradients recorded and discarded, in batches of the training's size, so that the
    compiled parts of training are used as they are instead of being compiled again.

    Args:
        forward: the model's forward.
        weights: by transformers' names.
        source: its held-out problems.
    """
    names = list(TASKS)
    chance, greedy, tokens = ({name: {} for name in names} for _ in range(3))  # type: ignore[var-annotated]
    counted = bits = 0.0
    decays: list[Tensor] = []
    problems = 0
    for width, rows in source.held_out.items():
        tasks = torch.from_numpy(source.corpus.held_out[width].tasks)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        size = source.tokens // width
        for first in range(0, len(rows), size):
            decays = []

            def record(log_decay: Tensor, into: list[Tensor] = decays) -> None:
                into.append(-log_decay.detach().double().mean((0, 1)).cpu())

            batch = rows.batch(torch.arange(first, first + size) % len(rows))
            logits = forward.logits(weights, batch.ids, record).detach()
            log_chance, all_right = chances(logits, batch)
            left = len(rows) - first
            assert batch.counted is not None
            length = batch.counted.sum(1)[:left]
            found.append((log_chance[:left].exp().cpu(), all_right[:left].cpu(), length.cpu()))
            nll = -logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
            bits += (nll * batch.counted).double().sum().item() / math.log(2.0)
            counted += batch.counted.sum().item()
        p, g, n = (torch.cat(column).double() for column in zip(*found, strict=True))
        for i, name in enumerate(names):
            mine = tasks == i
            problems = int(mine.sum())
            chance[name][width] = p[mine].mean().item()
            greedy[name][width] = g[mine].mean().item()
            tokens[name][width] = n[mine].mean().item()
    return Solved(
        problems=problems,
        chance=chance,
        greedy=greedy,
        tokens=tokens,
        bits=bits / counted,
        half_lives=(math.log(2.0) / torch.stack(decays)).tolist(),
    )
