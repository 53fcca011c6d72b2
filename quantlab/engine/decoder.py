"""One token of many rows at a time, rows replaced one by one: what decoding stands on.

    decoder = Decoder(m, policies, rows=8, capacity=4096, seed=0)
    prompt = prefill(m, ids)                       # ids [n, T], in full precision
    decoder.start([0, 1], prompt, of=[0, 0], policies=[0, 2], streams=[5, 5])
    logits = decoder.step(tokens)                  # tokens [rows] -> logits [rows, V]
    decoder.stop([0])                              # row 0 is free; `start` may take it again

Every row has its own policy, stream, length and open window. What a row computes depends on nothing
in the other rows but, through the order of additions in matrix products, on how many there are;
free rows are carried along. On CUDA the states are stored by the decode kernels, nothing of a step
waits for the host, and one captured graph serves rows at any positions. Elsewhere the same step
runs eagerly on `quantlab.replay.RowwiseCache`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quantlab import dispatch
from quantlab.engine.fixed_cache import FixedCache
from quantlab.engine.prompt import Prompt, prefill
from quantlab.errors import RunError
from quantlab.models.precision import full_fp32
from quantlab.recurrence import OpInputs
from quantlab.replay import Policy

if TYPE_CHECKING:
    from quantlab.models import LoadedModel, OpCall

__all__ = ["Decoder", "Prompt", "RowStates", "prefill"]


class RowStates(Protocol):
    """The recurrent states of a decoder's rows; see `dispatch.decode_states`."""

    def start(
        self,
        rows: Sequence[int],
        states: Sequence[Tensor],
        *,
        of: Sequence[int],
        policies: Sequence[int],
        streams: Sequence[int],
    ) -> None:
        """Store unrounded states, by layer [n, H, dv, dk], as flush 0 of these rows.

        What the rows held is dropped; `of` says by row which of the n it continues.
        """

    def stop(self, rows: Sequence[int]) -> None:
        """Free rows."""

    def compile(self) -> None:
        """Launch what `start` launches, for compilation ahead; nothing without kernels."""

    def advance(self) -> None:
        """Begin a model step: before its first layer."""

    def step(self, layer: int, inputs: OpInputs) -> Tensor:
        """Take one token of every row in a layer: [rows, 1, H, dv]."""

    @property
    def diverged_at(self) -> Tensor:
        """[rows] int64: tokens after the prompt at the first store that was not finite, or −1."""

    def state_dict(self) -> dict[str, Tensor]:
        """All that later steps depend on; copies."""

    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of states with the same arguments."""


class Decoder:
    """A model and a fixed number of rows.

    Args:
        m: the loaded model.
        policies: that a row can have.
        rows: of every step; decides the order of additions, so it is part of a study.
        capacity: most tokens of a row, prompt included.
        seed: 64-bit seed of the stochastic rounding of policies that bring none.
        places: by policy, how many rows can have it at once; all of them if None. On CUDA each
            place takes memory for a state of every layer.
        graphs: whether steps are captured; on CUDA if None.
        implementation: of the states: "auto" by device, "torch" or "triton".

    Raises:
        ValueError: no policy, a size below 1, or what the decode kernels do not have (a format, a
            window or a key width; the message says which they have).
    """

    def __init__(
        self,
        m: LoadedModel,
        policies: Sequence[Policy],
        *,
        rows: int,
        capacity: int,
        seed: int,
        places: Sequence[int] | None = None,
        graphs: bool | None = None,
        implementation: dispatch.Implementation = "auto",
    ) -> None:
        if not policies or rows < 1 or capacity < 1:
            raise ValueError(f"a decoder needs policies, rows and capacity, got {rows}, {capacity}")
        places = [rows] * len(policies) if places is None else list(places)
        if len(places) != len(policies) or min(places) < 1:
            raise ValueError(f"places: one positive number a policy, got {places}")
        on_cuda = m.device.type == "cuda"
        if graphs and not on_cuda:
            raise ValueError(f"a step is captured on a CUDA device, the model is on {m.device}")
        self.m = m
        self.rows = rows
        self.policies = tuple(policies)
        self.graphs = on_cuda if graphs is None else graphs
        build = dispatch.decode_states(m.device, implementation)
        with torch.inference_mode(), full_fp32():
            self.cache = FixedCache(m, rows, capacity)
            self.states: RowStates = build(
                self.policies, self.cache.examples, rows=rows, places=places, seed=seed
            )
            self._tokens = torch.zeros((rows, 1), dtype=torch.int64, device=m.device)
        self.implementation = dispatch.implementation_name(build)
        self._conv = dispatch.decode_conv() if on_cuda else None
        self._graph: Any = None
        self._warm = False
        self._logits: Tensor | None = None
        if on_cuda:
            self._compile()

    @property
    def lengths(self) -> Tensor:
        """[rows] int64 on the host: tokens of each row, prompt included; 0 of free ones."""
        return self.cache.host_lengths

    @property
    def diverged_at(self) -> Tensor:
        """[rows] int64: tokens after the prompt at the first store that was not finite, or −1."""
        return self.states.diverged_at

    @torch.inference_mode()
    def start(
        self,
        rows: Sequence[int],
        prompt: Prompt,
        *,
        of: Sequence[int],
        policies: Sequence[int],
        streams: Sequence[int],
    ) -> None:
        """Begin rows behind prompts; whatever they held is dropped. The device is not waited for.

        Args:
            rows: which; each once.
            prompt: of `prefill`; `gathered` has several of them in one.
            of: by row, which of the prompt's sequences it continues.
            policies: by row, index into the policies.
            streams: by row, the id that keys its random draws, in [0, 2^32).

        Raises:
            ValueError: a row outside the decoder or given twice, a prompt beyond the capacity, or
                more rows of a policy than it has places.
        """
        self._check_rows(rows)
        if not len(rows) == len(of) == len(policies) == len(streams):
            raise ValueError("rows, of, policies and streams are of one length")
        self.cache.fill(rows, prompt, of=of)
        self.states.start(rows, prompt.states, of=of, policies=policies, streams=streams)

    @torch.inference_mode()
    def stop(self, rows: Sequence[int]) -> None:
        """Free rows."""
        self._check_rows(rows)
        self.states.stop(rows)
        self.cache.clear(rows)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Feed every row a token.

        Args:
            tokens: [rows] int64, on any device; those of free rows are run and mean nothing.

        Returns:
            Logits [rows, V] FP32 (FP64), valid until the next step. On CUDA the step may still be
            under way: nothing here waits for it.

        Raises:
            ValueError: another number of tokens, or a row that is full.
            RunError: the model's forward cannot be captured.
        """
        if tokens.shape != (self.rows,):
            raise ValueError(f"one token a row, [{self.rows}], got {tuple(tokens.shape)}")
        self.cache.check_room()
        self._tokens.copy_(tokens[:, None], non_blocking=True)
        if self._graph is not None:
            self._graph.replay()
        elif self.graphs and self._warm:
            self._graph = self._capture()
            self._graph.replay()
        else:
            # the first step is a plain one: it compiles kernels and sets up libraries
            self._logits = self._forward()
            self._warm = True
        self.cache.count()
        assert self._logits is not None
        return self._logits

    def state_dict(self) -> dict[str, Tensor]:
        """All that later steps depend on; copies."""
        parts = {"cache": self.cache.state_dict(), "states": self.states.state_dict()}
        return {f"{part}.{name}": x for part, named in parts.items() for name, x in named.items()}

    @torch.inference_mode()
    def load_state_dict(self, named: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of a decoder with the same arguments."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): x for k, x in named.items() if k.startswith(prefix)}

        self.cache.load_state_dict(under("cache."))
        self.states.load_state_dict(under("states."))

    def _check_rows(self, rows: Sequence[int]) -> None:
        if len(set(rows)) < len(rows) or any(not 0 <= row < self.rows for row in rows):
            raise ValueError(f"rows are in 0 … {self.rows - 1}, each once; got {list(rows)}")

    @contextmanager
    def _ready(self) -> Iterator[None]:
        from quantlab.models import replaced

        with ExitStack() as stack:
            stack.enter_context(full_fp32())
            stack.enter_context(self.cache.attending())
            stack.enter_context(replaced(self.m, self._handle))
            if self._conv is not None:
                stack.enter_context(_convolved(self.m, self._conv))
            yield

    def _forward(self) -> Tensor:
        from quantlab.models import forward_hidden, head

        with self._ready():
            self.states.advance()
            hidden = forward_hidden(
                self.m,
                self._tokens,
                cache=self.cache.cache,
                position_ids=self.cache.lengths[:, None],
            )
            self.cache.advance()
            return head(self.m, hidden)[:, 0]

    def _handle(self, call: OpCall) -> tuple[Tensor, Tensor | None]:
        return self.states.step(call.layer, call.inputs), None

    @torch.inference_mode()
    def _compile(self) -> None:
        """Compile all kernels side by side: a step of free rows in which no kernel runs.

        What its other operations leave in the cache is overwritten when a row starts.
        """
        with dispatch.compiling():
            self.states.compile()
            self._forward()
        self.cache.clear(range(self.rows))

    def _capture(self) -> Any:
        graph: Any = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._logits = self._forward()
        except RuntimeError as error:
            raise RunError(
                f"one step of this {self.m.family.model_type} model cannot be captured in a CUDA "
                f"graph: {error}. Run without graphs (graphs=False)"
            ) from error
        return graph


@contextmanager
def _convolved(m: LoadedModel, step: Callable[..., Tensor]) -> Iterator[None]:
    """Have a model's family take one token's short convolution by `step` inside the block."""
    module = importlib.import_module(m.family.module)
    own = module.causal_conv1d_update
    module.causal_conv1d_update = step  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.causal_conv1d_update = own  # type: ignore[attr-defined]
