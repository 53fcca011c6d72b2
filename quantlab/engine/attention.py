"""Causal attention of a segment behind a long cache, without a mask of rows × segment × length.

transformers builds a full mask as soon as a forward continues a cache, which at 40 rows, segments
of 4,096 and 131,072 tokens is 21 GB of FP32 bias. All rows of a study have equal lengths and no
padding, so the mask is always the lower-right causal one, which the fused kernels know by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

NAME = "quantlab_lower_right"


def lower_right_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from the last T positions of a sequence to all of it.

    Args:
        module: the attention layer, unused (part of transformers' attention interface).
        query: [rows, heads, T, d].
        key: [rows, key heads, length, d]; key heads divides heads.
        value: [rows, key heads, length, dv].
        attention_mask: None; a study has no padding.
        scaling: factor on the scores; d**-0.5 when None.
        dropout: must be 0 (no training here).
        _: options of transformers' attention interface that have no bearing on plain causal
            attention.

    Returns:
        (output [rows, T, heads, dv], None).

    Raises:
        ValueError: if a mask or dropout is given.
    """
    if attention_mask is not None or dropout:
        raise ValueError("lower-right attention takes no mask and no dropout")
    steps, length = query.shape[2], key.shape[2]
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if steps == 1:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    elif steps == length:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
    elif query.is_cuda:
        bias: Any = causal_lower_right(steps, length)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=scaling
        )
    else:
        # One mask [T, length] for all rows and heads: the CPU kernel has no lower-right form.
        mask = torch.ones(steps, length, dtype=torch.bool).tril(length - steps)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling
        )
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def lower_right(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Have `model` use this attention inside the block, and its own one afterwards."""
    return attention(model, NAME, lower_right_attention)


@contextmanager
def attention(
    model: torch.nn.Module, name: str, function: Callable[..., tuple[Tensor, None]]
) -> Iterator[None]:
    """Have `model` use an attention function, without a mask, inside the block.

    Args:
        model: a transformers model.
        name: to register the function under.
        function: of transformers' attention interface.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, _no_mask)
    found: list[Any] = [m.config for m in model.modules() if hasattr(m, "config")]
    configs = {id(config): config for config in found}
    saved = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = saved[key]
