"""Two halves of a forward: hidden states of the base model, and logits of chosen positions.

The engine runs the base model over thousands of tokens and the language-model head at measured
positions only. The head's product is accumulated and kept in FP32: a BF16 logit carries an error
of 2⁻⁹ of its size, which is more than the effects under study.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantlab.errors import UsageError

if TYPE_CHECKING:
    from quantlab.models.loaded import LoadedModel

# Names the cache argument has had, newest first. A wrong one is swallowed by **kwargs: the history
# is dropped without an error, which is why it is read off the signature.
_CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")
# Weights of the head upcast at once on a CPU, elements: 256 MB in FP32.
_HEAD_CHUNK = 1 << 26


def cache_keyword(model: nn.Module) -> str:
    """Name of the argument through which `model.forward` takes a cache.

    Args:
        model: a transformers model, with or without its head.

    Raises:
        UsageError: if its forward names none that is known.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in _CACHE_KEYWORDS:
        if name in parameters:
            return name
    raise UsageError(
        f"{type(model).__name__}.forward names no cache argument among "
        f"{', '.join(_CACHE_KEYWORDS)}: this version of transformers is not supported"
    )


def takes_positions(model: nn.Module) -> bool:
    """Whether `model.forward` takes position_ids (Mamba-2 without attention does not)."""
    return "position_ids" in inspect.signature(model.forward).parameters


def new_cache(m: LoadedModel) -> Any:
    """Return an empty transformers cache for `m`."""
    from transformers import DynamicCache

    return DynamicCache(config=m.model.config)


def positions(start: int, input_ids: Tensor) -> Tensor:
    """Position ids [rows, T] counting from `start`."""
    rows, steps = input_ids.shape
    ids = torch.arange(start, start + steps, device=input_ids.device)
    return ids.expand(rows, steps)


def call(
    model: nn.Module, input_ids: Tensor, *, cache: Any = None, position_ids: Tensor | None = None
) -> Any:
    """Run a transformers model with the right cache keyword and, where it takes them, positions.

    Args:
        model: a causal language model or its base model.
        input_ids: [rows, T] int64, without padding.
        cache: from `new_cache`, updated in place; None for none.
        position_ids: [rows, T]; 0 .. T-1 when None.
    """
    kwargs: dict[str, Any] = {"use_cache": cache is not None}
    if cache is not None:
        kwargs[cache_keyword(model)] = cache
    if takes_positions(model):
        kwargs["position_ids"] = positions(0, input_ids) if position_ids is None else position_ids
    return model(input_ids=input_ids, **kwargs)


def forward_hidden(
    m: LoadedModel,
    input_ids: Tensor,
    *,
    cache: Any = None,
    start: int = 0,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Last hidden state, after the final norm, of T tokens of every row.

    Args:
        m: the loaded model.
        input_ids: [rows, T] int64, without padding.
        cache: from `new_cache`, updated in place; None for none.
        start: position of the first token; a continued forward must say it.
        position_ids: [rows, T] instead of start, start + 1, …

    Returns:
        [rows, T, hidden] in the activations' dtype.
    """
    if position_ids is None:
        position_ids = positions(start, input_ids)
    out = call(m.model.base_model, input_ids, cache=cache, position_ids=position_ids)
    hidden: Tensor = out.last_hidden_state
    return hidden


class _Given:
    """Stands for the base model's output; every optional field is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        if index != 0:
            raise IndexError(index)
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _patched(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def product_fp32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X · weightᵀ (+ bias), accumulated and kept in FP32 (FP64 for FP64).

    Args:
        x: [..., n].
        weight: [V, n]; x is cast to its dtype, as a linear layer's input would be.
        bias: [V] or None.

    Returns:
        [..., V] FP32. On CUDA 16-bit factors are multiplied as they are; elsewhere they are
        upcast first, which is exact.
    """
    x = x.to(weight.dtype)
    if weight.dtype in (torch.float32, torch.float64):
        return torch.nn.functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        product = torch.mm(flat, weight.t(), out_dtype=torch.float32)
    else:
        flat = flat.float()
        step = max(1, _HEAD_CHUNK // weight.shape[1])
        parts = [weight[i : i + step] for i in range(0, weight.shape[0], step)]
        product = torch.cat([flat @ part.float().t() for part in parts], dim=-1)
    out = product.reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias.float()


def head(m: LoadedModel, hidden: Tensor) -> Tensor:
    """Logits of given hidden states, the head's product accumulated and kept in FP32.

    The causal model's own forward runs, with its base model answering `hidden` and its head
    multiplying in FP32, so a family's logit scale (Granite's divisor, Falcon-H1's multiplier) is
    applied as it does, in FP32.

    Args:
        m: the loaded model.
        hidden: [rows, n, hidden], from `forward_hidden`.

    Returns:
        [rows, n, V] FP32 (FP64 for an FP64 model).
    """
    model: Any = m.model
    lm_head = model.get_output_embeddings()
    if not isinstance(lm_head, nn.Linear):
        raise UsageError(
            f"the head of {type(model).__name__} is a {type(lm_head).__name__}, not a plain "
            "linear layer: quantized heads are not supported"
        )
    ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)

    def base_forward(*_: Any, **__: Any) -> _Given:
        return _Given(hidden)

    def head_forward(x: Tensor) -> Tensor:
        return product_fp32(x, lm_head.weight, lm_head.bias)

    with _patched(model.base_model, base_forward), _patched(lm_head, head_forward):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits if logits.dtype == torch.float64 else logits.float()
