"""Prompts consumed in full precision, before a decoder's rows go on behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantlab.engine.attention import lower_right
from quantlab.engine.teacher_forcing import conv_states
from quantlab.engine.transfer import on_device
from quantlab.models.precision import full_fp32
from quantlab.recurrence import exact_scan

if TYPE_CHECKING:
    from quantlab.models import LoadedModel, OpCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Sequences that were consumed.

    Attributes:
        attended: by cache layer that attends, keys and values [n, heads, T, width]; those of
            shorter sequences have zeros behind them.
        convolved: by cache layer, its convolution states [n, ...] in the order of its slots.
        states: by recurrent layer, [n, H, dv, dk] FP32 (FP64), unrounded.
        lengths: tokens of each sequence.
        logits: [n, V] after the last token of each.
    """

    attended: dict[int, tuple[Tensor, Tensor]]
    convolved: list[list[Tensor]]
    states: list[Tensor]
    lengths: tuple[int, ...]
    logits: Tensor


def prefill(m: LoadedModel, tokens: Tensor) -> Prompt:
    """Consume prompts in one forward, nothing rounded.

    Args:
        m: the loaded model.
        tokens: [n, T] int64, T ≥ 1, without padding.
    """
    from quantlab.models import forward_hidden, head, new_cache, replaced

    states: list[Tensor] = []

    def keep(call: OpCall) -> tuple[Tensor, None]:
        o, state = exact_scan(call.inputs)
        states.append(state)
        return o, None

    ids = tokens if tokens.device == m.device else on_device(tokens, m.device)
    cache = new_cache(m)
    with torch.inference_mode(), full_fp32(), lower_right(m.model), replaced(m, keep):
        hidden = forward_hidden(m, ids, cache=cache, start=0)
        logits = head(m, hidden[:, -1:])[:, 0]
    attended = {}
    for index, layer in enumerate(cache.layers):
        keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
        if isinstance(keys, Tensor) and isinstance(values, Tensor):
            attended[index] = (keys, values)
    return Prompt(
        attended=attended,
        convolved=[[conv for _, conv in conv_states(layer)] for layer in cache.layers],
        states=states,
        lengths=(tokens.shape[1],) * len(tokens),
        logits=logits,
    )


@torch.inference_mode()
def gathered(places: Sequence[tuple[Prompt, int]]) -> Prompt:
    """Put sequences of several prompts side by side.

    Args:
        places: prompts, and which of their sequences.
    """
    lengths = tuple(prompt.lengths[i] for prompt, i in places)
    longest = max(lengths)

    def rows(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([x[i : i + 1] for x, (_, i) in zip(parts, places, strict=True)])

    def tokens(parts: Sequence[Tensor]) -> Tensor:
        cut = [x[i : i + 1, :, :longest] for x, (_, i) in zip(parts, places, strict=True)]
        pad = torch.nn.functional.pad
        return torch.cat([pad(x, (0, 0, 0, longest - x.shape[2])) for x in cut])

    first, prompts = places[0][0], [prompt for prompt, _ in places]
    return Prompt(
        attended={
            index: (
                tokens([p.attended[index][0] for p in prompts]),
                tokens([p.attended[index][1] for p in prompts]),
            )
            for index in first.attended
        },
        convolved=[
            [rows([p.convolved[layer][slot] for p in prompts]) for slot in range(len(given))]
            for layer, given in enumerate(first.convolved)
        ],
        states=[rows([p.states[layer] for p in prompts]) for layer in range(len(first.states))],
        lengths=lengths,
        logits=rows([p.logits for p in prompts]),
    )
