"""What a prediction is made of: gates, write errors and sensitivities on a stretch of text.

No policy is run on the model here. Op inputs are recorded from exact decoding and every policy
decodes those, layer by layer; the model itself only ever sees noise in single heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantlab.analysis.expected import expected_errors
from quantlab.analysis.pullback import gains, windows_of
from quantlab.analysis.sensitivity import InjectedScan, Injection, Shape
from quantlab.analysis.write_errors import WriteErrors, write_errors
from quantlab.metrics.divergence import compare
from quantlab.metrics.positions import window as positions_of
from quantlab.recurrence import OpInputs, exact_scan
from quantlab.replay.policy import DEFAULT_WINDOW, Policy

if TYPE_CHECKING:
    from quantlab.models import LoadedModel

# Injections begin after so many tokens and last so many more, KL taken over the last 256.
INJECTION_PROMPT, INJECTION_TOKENS = 256, 384
# Rows of a batch of injections.
ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One layer's exact decoding of one text.

    Attributes:
        state: [1, H, dv, dk] after the prompt, unrounded.
        inputs: one row, the steps after the prompt.
    """

    state: Tensor
    inputs: OpInputs


class _Recorder:
    """An exact scan that keeps its inputs."""

    def __init__(self, policies: Sequence[Policy], streams: Tensor, *, layer: int, seed: int):
        self.pieces: list[OpInputs] = []
        self.diverged_at = torch.full((len(policies),), -1, device=streams.device)
        self._start = self._state = torch.empty(0)

    def prefill(self, inputs: OpInputs) -> Tensor:
        o, self._state = exact_scan(inputs)
        self._start = self._state
        return o

    def __call__(self, inputs: OpInputs) -> Tensor:
        self.pieces.append(inputs)
        o, self._state = exact_scan(inputs, self._state)
        return o

    def recording(self) -> Recording:
        names = ("q", "k", "v", "log_decay", "beta", "dt")
        parts = {name: [getattr(piece, name) for piece in self.pieces] for name in names}
        joined = {n: None if x[0] is None else torch.cat(x, 1) for n, x in parts.items()}
        first = self.pieces[0]
        inputs = OpInputs(**joined, activation_dtype=first.activation_dtype)  # type: ignore[arg-type]
        return Recording(state=self._start, inputs=inputs)


def record(m: LoadedModel, tokens: Tensor, *, prompt: int, segment: int) -> list[Recording]:
    """Record every recurrent layer's op inputs.

    Args:
        m: the model.
        tokens: [1, prompt + T + 1].
        prompt: tokens before the recorded ones.
        segment: tokens of a forward.
    """
    from quantlab.engine import TeacherForcing

    built: list[_Recorder] = []

    def build(policies: Any, streams: Any, **keys: Any) -> _Recorder:
        built.append(_Recorder(policies, streams, **keys))
        return built[-1]

    forcing = TeacherForcing(
        m, tokens, policies=[], stream_ids=[0], positions=[tokens.shape[1] - prompt - 1],
        prompt=prompt, segment=segment, seed=0, scan=build,
    )  # fmt: skip
    for _ in forcing.run():
        pass
    with torch.inference_mode():
        return [recorder.recording() for recorder in built]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEstimate:
    """One layer of one text.

    Attributes:
        kept: [policies, lengths, H] expected squared output error over the mean square of the
            output, mean over the window of N.
        fresh: [policies, H] that of the read copy's own cast.
        here: [policies, H] the same expectation over the calibration text itself, kept and fresh.
        decoded: [policies, H] what `here` is to come to.
        errors: what was measured on it.
        half_life: [H] of the mean gate, steps.
    """

    kept: Tensor
    fresh: Tensor
    here: Tensor
    decoded: Tensor
    errors: WriteErrors
    half_life: Tensor


@torch.inference_mode()
def estimate_layer(
    recording: Recording,
    policies: Sequence[Policy],
    lengths: Sequence[int],
    *,
    layer: int,
    seed: int,
    scan: Callable[..., Any],
) -> LayerEstimate:
    """Form expected errors of all policies in one layer.

    Args:
        recording: of the layer.
        policies: of any windows.
        lengths: N.
        layer: ordinal.
        seed: of the stochastic rounding.
        scan: constructor of the scan.
    """
    inputs = recording.inputs
    errors = write_errors(recording.state, inputs, policies, layer=layer, seed=seed, scan=scan)
    kept: list[Tensor] = [torch.empty(0)] * len(policies)
    fresh, here = list(kept), list(kept)
    for window in {p.window for p in policies}:
        chosen = [p for p, x in enumerate(policies) if x.window == window]
        of = [policies[p] for p in chosen]
        # stores, the post-prefill one among them, that each position's step has seen
        seen = [[(t - 1) // window + 1 for t in positions_of(n)] for n in lengths]
        wanted = sorted({n for of_length in seen for n in of_length})
        inside = _spread(errors.steps // window)
        growth = errors.growth(max(wanted + inside), window=window)
        moments = gains(
            windows_of(inputs, window), [1, *wanted, *inside], window=window,
            products=errors.bias is not None and any(_nearest(p) for p in of),
            sizes=growth.sqrt(),
        )  # fmt: skip
        found = expected_errors(errors.of(chosen), moments, of, inputs.dv)
        at = {n: i for i, n in enumerate(moments.stores)}
        # of a state as large as the text's mean, beside the outputs of such a state
        output = errors.step_output[chosen] * inputs.dv  # [chosen, H]
        relative, own = found.kept / output[:, None], found.fresh / output
        # stores are taken together as outputs are when decoded: the largest states weigh most
        weights = growth[[n - 1 for n in moments.stores]]
        together = torch.stack(
            [
                (weights[numbers] * relative[:, numbers]).mean(1) / weights[numbers].mean(0)
                for numbers in ([at[n] for n in some] for some in (*seen, inside))
            ],
            1,
        )  # [chosen, lengths + 1, H]
        for i, p in enumerate(chosen):
            kept[p], fresh[p], here[p] = together[i, :-1], own[i], together[i, -1] + own[i]
    gates = inputs.log_decay.double().mean((0, 1))
    gates = gates if gates.ndim == 1 else gates.mean(-1)
    return LayerEstimate(
        kept=torch.stack(kept), fresh=torch.stack(fresh), here=torch.stack(here),
        decoded=errors.step_error / errors.step_output, errors=errors,
        half_life=torch.log(torch.tensor(2.0, dtype=torch.float64)).to(gates.device) / -gates,
    )  # fmt: skip


def _spread(count: int, most: int = 32) -> list[int]:
    """Up to `most` numbers of stores, evenly over 1 … count: the middle of each part."""
    parts = min(count, most)
    return sorted({int((i + 0.5) * count / parts) + 1 for i in range(parts)})


def _nearest(policy: Policy) -> bool:
    return policy.recur.rounding == "rtn" and not policy.recur.is_exact


def sensitivities(
    m: LoadedModel,
    tokens: Tensor,
    shapes: Sequence[Shape],
    *,
    seed: int,
    progress: Callable[[int], None],
) -> dict[Shape, tuple[list[Tensor], list[Tensor]]]:
    """Inject noise into every head in turn.

    Args:
        m: the model, in FP32.
        tokens: [1, INJECTION_PROMPT + INJECTION_TOKENS + 1].
        shapes: of noise.
        seed: of the noise.
        progress: told the injections done.

    Returns:
        By shape, mean KL and relative mean squared output error of every head, [H] each, by layer.
    """
    heads = [shape[0] for shape in m.recurrent_shapes]
    injections = [
        Injection(layer, head, shape)
        for shape in shapes
        for layer, count in enumerate(heads)
        for head in range(count)
    ]
    kl, energy = [], []
    for begin in range(0, len(injections), ROWS):
        some = injections[begin : begin + ROWS]
        found = _inject(m, tokens, some, seed)
        kl.append(found[0])
        energy.append(found[1])
        progress(begin + len(some))
    out: dict[Shape, tuple[list[Tensor], list[Tensor]]] = {}
    total = sum(heads)
    for i, shape in enumerate(shapes):
        part = slice(i * total, (i + 1) * total)
        by_layer = [list(torch.split(torch.cat(x)[part], heads)) for x in (kl, energy)]
        out[shape] = (by_layer[0], by_layer[1])
    return out


def _inject(
    m: LoadedModel, tokens: Tensor, injections: Sequence[Injection], seed: int
) -> tuple[Tensor, Tensor]:
    from quantlab.engine import REFERENCE, TeacherForcing

    measured = positions_of(INJECTION_TOKENS)
    built: list[InjectedScan] = []

    def build(policies: Any, streams: Any, **keys: Any) -> InjectedScan:
        scan = InjectedScan(
            policies, streams, injections=injections, window=DEFAULT_WINDOW, first=measured[0],
            **keys,
        )  # fmt: skip
        built.append(scan)
        return scan

    forcing = TeacherForcing(
        m, tokens, policies=[REFERENCE] * len(injections), stream_ids=[0], positions=measured,
        prompt=INJECTION_PROMPT, segment=INJECTION_TOKENS, seed=seed, scan=build,
    )  # fmt: skip
    kl = [compare(x.logits, x.targets).kl[:, 0].cpu() for x in forcing.run()]
    energy, size = (
        torch.stack([getattr(scan, name) for scan in built]).sum(0)[1:].cpu()
        for name in ("energy", "size")
    )
    return torch.cat(kl, -1).mean(-1), energy / size
