"""Self-test of a loaded model: its state survives, and our op is the model's own.

Several transformers versions lose a hybrid model's history without an error, and a wrong cache
keyword or wrong positions do the same. Every check compares logits of one model under two ways of
running it, on random tokens, two rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quantlab.models import forward
from quantlab.models.check_report import CheckReport, CheckRow
from quantlab.models.dispatch import OpCall, counted, replaced
from quantlab.models.load import load_model, quiet_transformers
from quantlab.models.loaded import LoadedModel
from quantlab.models.precision import full_fp32
from quantlab.recurrence.sequence import exact_scan

ROWS = 2
PREFILL = 66  # more than one chunk of the delta rules' chunked forms (64)
STEP_SIZES = (1, 3, 7)
STEPS_EACH = 2
# Agreement of prefill + steps with the full forward, of the largest logit.
HISTORY_BOUND = 1e-4
# A lost history must move the logits by this many bounds, or the check could not see it.
POWER = 4.0
_CHUNK = 64


def exact_op(call: OpCall) -> tuple[Tensor, Tensor]:
    """Our own op, nothing rounded; the handler of the checks."""
    return exact_scan(call.inputs, call.initial_state)


def op_bound(m: LoadedModel) -> float:
    """Bound for two orders of the same products, relative to the largest logit.

    FP32: an output sums about chunk · dk rounded products, whose errors of u = 2⁻²⁴ each add up
    like a random walk, and the layers' like another: 4 u √(64 dk layers). 16-bit activations also
    round the output and what follows it, about 16 roundings a layer: 2 u' √(16 layers) with
    u' = 2⁻⁹ (BF16) or 2⁻¹² (FP16). The seen values are 5 to 20 times smaller; a tiled head, a
    transposed state or a missing skip exceed the bounds 100 times and more in FP32, 5 times in
    BF16. Where transformers bound another package's kernels, those may multiply in TF32, with a
    unit of 2⁻¹¹ for every product of a read-out: 4 · 2⁻¹¹ √layers (fla 0.6.0 in FP32 on an H200
    is 1e-3 off over 3 layers).
    """
    dk = max(shape[2] for shape in m.recurrent_shapes)
    summed = 4 * 2.0**-24 * math.sqrt(_CHUNK * dk * m.layers)
    if m.identity.get("op_implementation") != "torch":
        summed += 4 * 2.0**-11 * math.sqrt(m.layers)
    if m.activation_dtype.itemsize > 2:
        return summed
    depth = int(m.model.config.get_text_config().num_hidden_layers)
    unit = torch.finfo(m.activation_dtype).eps / 2
    return summed + 2 * unit * math.sqrt(16 * depth)


def _history_bound(m: LoadedModel, lost: float) -> float:
    """1e-4; for 16-bit models their noise, but never so much that a lost history would pass."""
    if m.activation_dtype.itemsize > 2:
        return HISTORY_BOUND
    return min(op_bound(m), lost / POWER)


def _distance(m: LoadedModel, a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest logit; another measure for 16-bit models.

    There a routed expert that flips on a tie changes one token's logits altogether, so it is the
    median over tokens of the root mean square difference, relative to that of the logits.
    """
    if a.shape != b.shape:
        raise RuntimeError(f"logits of shape {tuple(a.shape)} where {tuple(b.shape)} was due")
    a, b = a.double(), b.double()
    if m.activation_dtype.itemsize > 2:
        return float((a - b).abs().max() / b.abs().max())
    error, size = (torch.linalg.vector_norm(x, dim=-1) for x in (a - b, b))
    return float((error / size).median())


def _row(name: str, bound: float, measure: Callable[[], float], detail: str = "") -> CheckRow:
    """Measure; a model that cannot even run this way fails the check with its error."""
    try:
        value = measure()
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return CheckRow(
            name=name, value=float("nan"), bound=bound, passed=False, detail=str(error)[:200]
        )
    return CheckRow(name=name, value=value, bound=bound, passed=value <= bound, detail=detail)


def _stepped(m: LoadedModel, tokens: Tensor, size: int) -> Tensor:
    """Logits of the tokens after the prefill, `size` tokens a forward, positions explicit."""
    cache = forward.new_cache(m)
    forward.forward_hidden(m, tokens[:, :PREFILL], cache=cache)
    parts = []
    for start in range(PREFILL, PREFILL + STEPS_EACH * size, size):
        piece = tokens[:, start : start + size]
        parts.append(forward.head(m, forward.forward_hidden(m, piece, cache=cache, start=start)))
    return torch.cat(parts, dim=1)


def _state_dtypes(m: LoadedModel, tokens: Tensor) -> set[torch.dtype]:
    cache = forward.new_cache(m)
    forward.forward_hidden(m, tokens[:, :PREFILL], cache=cache)
    mixers: Sequence[Any] = m.recurrent_modules
    return {cache.layers[mixer.layer_idx].recurrent_states[0].dtype for mixer in mixers}


def _write_gate(m: LoadedModel, tokens: Tensor) -> float:
    """Largest relative difference between our FP32 beta and the one transformers passes."""
    worst = 0.0

    def compare(call: OpCall) -> tuple[Tensor, Tensor]:
        nonlocal worst
        given, formed = seen.sites[call.layer].given_beta, call.inputs.beta
        assert given is not None and formed is not None
        worst = max(worst, float(((formed - given).abs() / formed.abs().clamp(min=1e-6)).max()))
        return exact_op(call)

    with replaced(m, compare) as seen:
        forward.forward_hidden(m, tokens[:, :PREFILL])
    return worst


def check_model(m: LoadedModel, *, seed: int = 0) -> CheckReport:
    """Run every check of a loaded model; a few dozen short forwards.

    Args:
        m: the loaded model.
        seed: of the random tokens.

    Returns:
        The report; nothing is raised for a failed check.
    """
    generator = torch.Generator().manual_seed(seed)
    length = PREFILL + STEPS_EACH * max(STEP_SIZES)
    tokens = torch.randint(0, m.vocab_size, (ROWS, length), generator=generator).to(m.device)
    with torch.inference_mode(), quiet_transformers(), full_fp32():
        rows = tuple(_checks(m, tokens))
    return CheckReport(model=str(m.identity.get("name", m.family.model_type)), rows=rows)


def _checks(m: LoadedModel, tokens: Tensor) -> Iterator[CheckRow]:
    wide = m.activation_dtype.itemsize > 2
    unit = "of the largest logit" if wide else "of the logits, median over tokens"
    own = forward.call(m.model, tokens).logits
    with counted(m) as seen:
        same = forward.call(m.model, tokens).logits
    wrong = sum(calls != 1 for calls in seen.calls)
    yield CheckRow(
        name="one op call per recurrent layer",
        value=wrong,
        bound=0,
        passed=wrong == 0,
        detail=f"layers of {m.layers} with another count",
    )
    yield _row(
        "pass-through changes no bit",
        0.0,
        lambda: float((same.double() - own.double()).abs().max()),
        "largest difference",
    )
    if wrong:
        # The op is bypassed (a whole-layer kernel): nothing below would mean anything.
        return
    plain = forward.head(m, forward.forward_hidden(m, tokens))
    with replaced(m, exact_op):
        full = forward.head(m, forward.forward_hidden(m, tokens))
    yield _row("our op in its place", op_bound(m), lambda: _distance(m, full, plain), unit)
    lost = _lost(m, tokens, full)
    bound = _history_bound(m, lost)
    for size in STEP_SIZES:
        due = full[:, PREFILL : PREFILL + STEPS_EACH * size]

        def history(size: int = size, due: Tensor = due) -> float:
            with replaced(m, exact_op):
                return _distance(m, _stepped(m, tokens, size), due)

        yield _row(f"prefill + {size}-token steps = full forward", bound, history, unit)
    yield CheckRow(
        name="a lost history would show",
        value=lost,
        bound=POWER * bound,
        passed=lost >= POWER * bound,
        detail="at least",
    )
    yield _row(
        "the cache keeps the state in FP32",
        0.0,
        lambda: float(len(_state_dtypes(m, tokens) - {torch.float32, torch.float64})),
        "other dtypes",
    )
    if m.family.op != "mamba2":
        # Half a unit of the dtype beta was rounded to, and as much for the sigmoid's own error.
        gate = 2 * max(torch.finfo(m.activation_dtype).eps / 2, 2.0**-23)
        yield _row(
            "write gate formed in FP32 is the model's",
            gate,
            lambda: _write_gate(m, tokens),
            "relative",
        )


def _lost(m: LoadedModel, tokens: Tensor, full: Tensor) -> float:
    """Distance of the same tokens' logits without their history: what the checks must see."""
    size = max(STEP_SIZES)
    with replaced(m, exact_op):
        bare = forward.head(m, forward.forward_hidden(m, tokens[:, PREFILL : PREFILL + size]))
    return _distance(m, bare, full[:, PREFILL : PREFILL + size])


def load_checked(
    name: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    time_step_limit: tuple[float, float] | None = None,
) -> tuple[LoadedModel, CheckReport]:
    """Load a model and require its self-test, as a study does.

    Args:
        name: see `load_model`.
        device: see `load_model`.
        dtype: see `load_model`.
        time_step_limit: see `load_model`.

    Raises:
        QuantlabError: what `load_model` raises; RunError with the table if a check fails.
    """
    loaded = load_model(name, device=device, dtype=dtype, time_step_limit=time_step_limit)
    report = check_model(loaded)
    report.raise_if_failed()
    return loaded, report
