"""One recurrent layer's op inputs over a long text, without running what comes after the layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantlab.engine.attention import lower_right
from quantlab.models.precision import full_fp32
from quantlab.recurrence import OpInputs, exact_scan

if TYPE_CHECKING:
    from quantlab.models import LoadedModel, OpCall


class _Enough(Exception):
    """The layer has been reached."""


def tapped(
    m: LoadedModel, tokens: Tensor, *, layer: int, prompt: int, segment: int
) -> Iterator[tuple[Tensor, OpInputs]]:
    """Decode exactly up to a layer, and yield its inputs segment by segment.

    A forward ends where the layer's op is called: later layers have no part in its inputs.

    Args:
        m: the model.
        tokens: [1, prompt + T].
        layer: ordinal of the recurrent layer.
        prompt: tokens before the first that are yielded.
        segment: tokens at once.

    Yields:
        The layer's unrounded state after the prompt [1, H, dv, dk], and inputs of one row.
    """
    from quantlab.models import forward_hidden, new_cache, replaced

    states: dict[int, Tensor] = {}
    reached: list[OpInputs] = []
    tokens = tokens.to(m.device)

    def handle(call: OpCall) -> tuple[Tensor, Tensor | None]:
        if call.layer == layer:
            reached.append(call.inputs)
            raise _Enough
        o, states[call.layer] = exact_scan(call.inputs, states.get(call.layer))
        return o, None

    def inputs_of(start: int, stop: int) -> OpInputs:
        with torch.inference_mode(), full_fp32(), lower_right(m.model), replaced(m, handle):
            try:
                forward_hidden(m, tokens[:, start:stop], cache=cache, start=start)
            except _Enough:
                return reached.pop()
        raise RuntimeError(f"the forward ended without reaching recurrent layer {layer}")

    cache = new_cache(m)
    with torch.inference_mode():
        _, state = exact_scan(inputs_of(0, prompt))
    for start in range(prompt, tokens.shape[1], segment):
        yield state, inputs_of(start, min(tokens.shape[1], start + segment))
