"""Replace the recurrent op of a loaded model, and nothing else of it.

The op functions of a family are looked up in its module at call time, so each is set once to a
dispatcher. A pre-hook on every recurrent module of the model at hand names the layer in a context
variable, a hook clears it; where it is unset the dispatcher calls the saved original with the very
same arguments, so other models in the process, and this one outside `replaced`, are untouched.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from quantlab.errors import UsageError
from quantlab.models.registry import Family

if TYPE_CHECKING:
    from quantlab.models.loaded import LoadedModel
    from quantlab.recurrence.inputs import OpInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One call of a recurrent op, in canonical layout.

    Attributes:
        layer: ordinal among the model's recurrent layers, from 0.
        inputs: the op's inputs, T tokens of every row.
        initial_state: [rows, H, dv, dk] as transformers' cache holds it, or None at the start.
            Possibly a view of the live cache: read it, never write to it.
        wants_state: whether the caller stores the final state.
    """

    layer: int
    inputs: OpInputs
    initial_state: Tensor | None
    wants_state: bool


# Returns (o [rows, T, H, dv] in FP32, final state [rows, H, dv, dk] or None). With None where a
# state is wanted the cache slot keeps what it held (zeros at first): for handlers that carry
# their own state.
Handler = Callable[[OpCall], tuple[Tensor, Tensor | None]]


# How beta reaches the handler: its sigmoid formed in FP32, or as transformers formed it, in the
# activations' dtype (serving kernels differ in this; the error enters the state once a token).
WriteGate = Literal["fp32", "activation"]


@dataclass(slots=True, kw_only=True)
class Site:
    """One recurrent layer while its forward runs under `replaced` or `counted`."""

    layer: int
    mixer: nn.Module
    family: Family
    handler: Handler | None = None
    write_gate: WriteGate = "fp32"
    calls: int = 0
    # Of the forward in progress: the write gate's logits, the beta transformers made of them, and
    # the dtype op outputs are cast to.
    write_logits: Tensor | None = None
    given_beta: Tensor | None = None
    output_dtype: torch.dtype | None = None
    # Read-outs beyond the range of FP16 activations, counted lazily on the device.
    overflows: Tensor | None = field(default=None)


_ACTIVE: ContextVar[Site | None] = ContextVar("quantlab_recurrent_layer", default=None)
_ORIGINALS: dict[tuple[str, str], Callable[..., Any]] = {}


def original(family: Family, name: str) -> Callable[..., Any]:
    """Return transformers' own function `name` of a family, installing the dispatcher over it."""
    from quantlab.models.adapters import ADAPTERS

    key = (family.module, name)
    if key not in _ORIGINALS:
        module = importlib.import_module(family.module)
        found = getattr(module, name, None)
        if found is None:
            raise UsageError(
                f"the installed transformers has no {name} in {family.module}: this version of "
                f"{family.model_type} is not adapted"
            )
        _ORIGINALS[key] = found
        setattr(module, name, _dispatcher(found, ADAPTERS[name]))
    return _ORIGINALS[key]


def _dispatcher(own: Callable[..., Any], adapter: Callable[..., Any]) -> Callable[..., Any]:
    # transformers passes stray keywords (use_cache, output_router_logits) to its ops, hence the
    # catch-all signature here and in the adapters.
    @functools.wraps(own)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        site = _ACTIVE.get()
        if site is None:
            return own(*args, **kwargs)
        site.calls += 1
        if site.handler is None:
            return own(*args, **kwargs)
        return adapter(site, *args, **kwargs)

    return dispatch


def _refuse_right_padding(mask: Any) -> None:
    """Raise where a padding mask has a pad after a token: it would flow into the state for good."""
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > 1:
        kept = mask.bool()
        if bool((kept[:, :-1] & ~kept[:, 1:]).any()):
            raise UsageError(
                "right padding corrupts a recurrent state: pad on the left, or run the rows apart"
            )


def _enter(site: Site) -> Callable[..., None]:
    # Returns None: a value returned by a pre-hook becomes the module's arguments.
    def pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            raise UsageError(
                "call model.eval() first: in training a fused kernel may bypass the op"
            )
        _refuse_right_padding(kwargs.get("attention_mask"))
        site.write_logits = None
        site.output_dtype = None
        _ACTIVE.set(site)

    return pre_hook


def _leave(*_: Any) -> None:
    _ACTIVE.set(None)


def _keep_write_logits(site: Site) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        site.write_logits = output

    return hook


def _cast_after_norm(site: Site) -> Callable[..., Tensor | None]:
    # The read-out reaches the norm in FP32 (an FP16 activation would overflow at 65,504); what
    # follows the norm expects the activations' dtype.
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        dtype = site.output_dtype
        return None if dtype is None or output.dtype == dtype else output.to(dtype)

    return hook


@contextmanager
def _hooked(
    m: LoadedModel, handler: Handler | None, write_gate: WriteGate = "fp32"
) -> Iterator[list[Site]]:
    for name in m.family.functions:
        original(m.family, name)
    sites = [
        Site(layer=i, mixer=mixer, family=m.family, handler=handler, write_gate=write_gate)
        for i, mixer in enumerate(m.recurrent_modules)
    ]
    with ExitStack() as stack:
        for site in sites:
            handles = [
                site.mixer.register_forward_pre_hook(_enter(site), with_kwargs=True),
                site.mixer.register_forward_hook(_leave, always_call=True),
            ]
            if handler is not None and m.family.write_projection is not None:
                projection = getattr(site.mixer, m.family.write_projection)
                handles.append(projection.register_forward_hook(_keep_write_logits(site)))
            if handler is not None and m.family.norm is not None:
                norm = getattr(site.mixer, m.family.norm)
                handles.append(norm.register_forward_hook(_cast_after_norm(site)))
            for handle in handles:
                stack.callback(handle.remove)
        yield sites


@dataclass(frozen=True, slots=True)
class Replacement:
    """What `replaced` observed.

    Attributes:
        sites: one record per recurrent layer.
    """

    sites: list[Site]

    @property
    def calls(self) -> list[int]:
        """Op calls per recurrent layer."""
        return [site.calls for site in self.sites]

    @property
    def readout_overflows(self) -> list[int]:
        """Per layer, read-outs that FP16 activations could not hold (kept in FP32 here).

        Non-finite logits without a non-finite state are this, not an error of the state. BF16 has
        FP32's range, so only FP16 models are counted.
        """
        return [0 if s.overflows is None else int(s.overflows) for s in self.sites]


@contextmanager
def replaced(
    m: LoadedModel, handler: Handler, *, write_gate: WriteGate = "fp32"
) -> Iterator[Replacement]:
    """Run the recurrent layers of `m` with `handler` in the place of transformers' op.

    The D skip, the output gate inside the op, dtypes and layouts are handled here; the read-out
    stays in FP32 up to and including the family's own norm. Blocks nest: the innermost wins.

    Args:
        m: a loaded model in eval mode.
        handler: receives every op call; see `Handler`.
        write_gate: "fp32", or "activation" to study what rounding the write gate to 16 bits does.

    Yields:
        Counts of what happened, readable at any time.

    Raises:
        UsageError: inside, if the model is in training mode or a row is padded on the right.
    """
    with _hooked(m, handler, write_gate) as sites:
        yield Replacement(sites)


@contextmanager
def counted(m: LoadedModel) -> Iterator[Replacement]:
    """Leave transformers' op in place, called with the very same arguments, and count the calls."""
    with _hooked(m, None) as sites:
        yield Replacement(sites)
