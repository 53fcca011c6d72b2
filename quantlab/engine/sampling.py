"""Choose tokens by Gumbel-max, with noise that belongs to a place in a generation.

token = argmax over the kept tokens of logit / T + g, g = −log(−log u), which draws from their
softmax. u is one word of the counter generator:

    key      the 64-bit sampling seed
    counter  (token // 4, step, question, repetition + 2^24 · 255), word token % 4

Copy index 255 keeps these counters apart from those of state rounding (copies 0 and 1; see
`quantlab.formats.philox`). So two policies, batch sizes or devices see the same noise, and two runs
that have the same logits choose the same token.

Source: Gumbel 1954; Maddison, Tarlow and Minka, "A* sampling", NIPS 2014, section 2. Order of the
filters (penalty, temperature, top-k, top-p) as in vLLM's sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.errors import UsageError
from quantlab.formats.philox import COPY_STRIDE, philox4x32, seed_key

SAMPLING = 255
"""Copy index of sampling noise in the counter."""
QUESTIONS = 1 << 20
REPETITIONS = 1 << 12
"""Bounds that keep (question, repetition) within one 32-bit stream id (`stream_id`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: T; 0 is greedy: the most likely token, the least id among equals, no noise.
        top_p: keep the most likely tokens until their probabilities sum to this.
        top_k: keep this many; 0 for all.
        presence_penalty: subtracted from the logit of every token that the output already has.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"the temperature is 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p lies in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise UsageError(f"top-k is 0 (all tokens) or more, got {self.top_k}")


def stream_id(question: int, repetition: int) -> int:
    """Id that keys the state rounding of one generation: question + 2^20 · repetition.

    Raises:
        UsageError: more questions or repetitions than the id has room for.
    """
    if not 0 <= question < QUESTIONS or not 0 <= repetition < REPETITIONS:
        raise UsageError(
            f"at most {QUESTIONS:,} questions and {REPETITIONS:,} repetitions, got question "
            f"{question}, repetition {repetition}"
        )
    return question + QUESTIONS * repetition


def gumbel(
    *, seed: int, question: Tensor, repetition: Tensor, step: Tensor, vocabulary: int
) -> Tensor:
    """Noise of one step of every row.

    Args:
        seed: 64-bit sampling seed.
        question: [rows] ids.
        repetition: [rows].
        step: [rows] tokens of output before this one.
        vocabulary: V.

    Returns:
        [rows, V] FP64 standard Gumbel values, on the device of `question`.
    """
    device = question.device
    quads = torch.arange(-(-vocabulary // 4), device=device)[None]
    words = philox4x32(
        (
            quads,
            step.to(device)[:, None],
            question[:, None],
            repetition.to(device)[:, None] + COPY_STRIDE * SAMPLING,
        ),
        seed_key(seed),
    )
    u = torch.stack(words, dim=-1).flatten(1)[:, :vocabulary].double()
    # the middle of each of 2^32 equal cells: never 0 or 1
    return -torch.log(-torch.log((u + 0.5) * 2.0**-32))


def gumbel_rows(
    *, seed: Tensor, question: Tensor, repetition: Tensor, step: Tensor, vocabulary: int
) -> Tensor:
    """Noise of one step of rows that each have a seed of their own (see `gumbel`).

    Args:
        seed: [rows] int64, the bit patterns of 64-bit seeds.
        question: [rows] ids.
        repetition: [rows].
        step: [rows].
        vocabulary: V.

    Returns:
        [rows, V] FP64.
    """
    noise = torch.empty((len(seed), vocabulary), dtype=torch.float64, device=seed.device)
    for own in sorted(set(seed.tolist())):
        inside = seed == own
        noise[inside] = gumbel(
            seed=own,
            question=question[inside],
            repetition=repetition[inside],
            step=step[inside],
            vocabulary=vocabulary,
        )
    return noise


def scores(logits: Tensor, sampling: Sampling, *, seen: Tensor | None = None) -> Tensor:
    """Log-probabilities up to a constant of the tokens that may be chosen.

    Args:
        logits: [rows, V] FP32.
        sampling: the settings; temperature 0 leaves the logits as they are.
        seen: [rows, V] bool, tokens that the output already has; needed for a penalty alone.

    Returns:
        [rows, V] FP64, −inf for tokens that the filters leave out.
    """
    x = logits.double()
    if sampling.presence_penalty and seen is not None:
        x = x - sampling.presence_penalty * seen
    if sampling.temperature == 0:
        return x
    x = x / sampling.temperature
    if not sampling.top_k and sampling.top_p == 1:
        return x
    # a stable sort: equal logits in the order of their ids, whatever the device
    ordered, index = x.sort(dim=-1, descending=True, stable=True)
    if 0 < sampling.top_k < x.shape[-1]:
        ordered[:, sampling.top_k :] = -torch.inf
    if sampling.top_p < 1:
        p = ordered.softmax(-1)
        # a token stays while those before it hold less than top-p: the first always does
        ordered = ordered.masked_fill(p.cumsum(-1) - p >= sampling.top_p, -torch.inf)
    return torch.empty_like(x).scatter_(-1, index, ordered)


def choose(kept: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose a token in every row.

    Args:
        kept: [rows, V] from `scores`.
        noise: [rows, V] from `gumbel`, or None for greedy.

    Returns:
        Tokens [rows] int64, and by how many nats each beat the runner-up (inf without one).
    """
    x = kept if noise is None else kept + noise
    # argmax is free to take any of equal values; the least id is taken here
    best = x.amax(-1, keepdim=True)
    token = (x == best).int().argmax(-1)
    rest = x.scatter(-1, token[:, None], -torch.inf).amax(-1)
    return token, best[:, 0] - rest
