"""How much of a stored state's error a later output sees: read-outs pulled back through windows.

A deviation D of a state [dv, dk] obeys the recurrence that nothing is written into,

    D ← D A_t,    A_t = diag(α_t)(I − β_t k_t k_tᵀ)    (no delta rule: diag(α_t)),    D ← D + e at a
                                                                                      store,

because decays, keys and write strengths come from the tokens and not from the state. With P_w the
product of A_t over window w and r_m = A_1 … A_m q_m a read-out of its step m pulled back to its
start, what step m of window w gets wrong is

    D_w r_m  =  Σ_{n ≥ 0} e_{w−n} y_n,    y_0 = r_m,   y_{n+1} = P_{w−1−n} y_n,

e_{w−n} the error of the store n stores before the last. This is exact. Errors of different stores
and elements that are independent with mean squares Q_k by key channel, and means b, then give

    E‖D_w r_m‖² = dv Σ_k Q_k Σ_n y_{n,k}²  +  ‖b Σ_n y_n‖² ,

so two moments of the y say all about every format: `Gains`. Steps 1 … L − 1 and step L are kept
apart, since with two copies they read different ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantlab.analysis.shadow import in_double, nothing_written
from quantlab.recurrence import OpInputs, exact_scan

# Windows whose read-outs are pulled back, spread evenly; each brings L of them.
READ_WINDOWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Transitions and read-outs of W windows of one sequence.

    Attributes:
        transitions: [W, H, dk, dk], rows before times it are rows after; [W, H, dk] where it is a
            diagonal (no delta rule).
        readouts: [W, H, dk, L] the r_m of every step as columns.
    """

    transitions: Tensor
    readouts: Tensor

    def before(self, columns: Tensor, which: Tensor) -> Tensor:
        """Pull columns [n, H, dk, c] back through windows `which` [n]."""
        step = self.transitions[which]
        return step @ columns if step.ndim == 4 else step.unsqueeze(-1) * columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Moments of the pulled-back read-outs, means over the read windows and their L steps.

    Three sums over stores: of steps 1 … L − 1 over the last n stores, of these steps over all of
    them but the very last (what a read copy shares with the recurrence copy), and of step L over
    the last n. The first and third together are a mean over all steps.

    Attributes:
        window: L.
        stores: n of each entry, ascending.
        squares: [entries, 3, H, dk] Σ_n y².
        products: [entries, 3, H, dk, dk] (Σ_n y)(Σ_n y)ᵀ, or None where they were not asked for.
    """

    window: int
    stores: tuple[int, ...]
    squares: Tensor
    products: Tensor | None


def windows_of(inputs: OpInputs, window: int) -> Windows:
    """Form transitions and read-outs of the whole windows of one sequence.

    Args:
        inputs: one row, T ≥ L steps after the prompt; the last T mod L are left out.
        window: L.

    Raises:
        ValueError: more than one row, or less than a window.
    """
    count = inputs.steps // window
    if inputs.n_rows != 1 or count == 0:
        raise ValueError(f"one row of at least {window} steps, got {inputs.n_rows}, {inputs.steps}")
    heads, dk = inputs.heads, inputs.dk
    cut = inputs.slice(0, count * window)._map(lambda x: x.reshape(count, window, *x.shape[2:]))
    if not inputs.is_delta:
        log = cut.log_decay.double()
        log = log if inputs.per_channel else log.unsqueeze(-1)  # [W, L, H, dk or 1]
        kept = log.cumsum(1).exp().expand(-1, -1, -1, dk)
        q = cut.q.double().repeat_interleave(heads // cut.q.shape[2], 2)
        return Windows(transitions=kept[:, -1], readouts=(kept * q).permute(0, 2, 3, 1))
    # value rows of the state are the unit vectors: what is left of each is a row of the product
    unit = torch.eye(dk, dtype=torch.float64, device=inputs.v.device)
    v = inputs.v.new_zeros(()).expand(count, window, heads, dk)
    o, state = exact_scan(
        in_double(replace(nothing_written(cut), v=v)), unit.expand(count, heads, dk, dk)
    )
    return Windows(transitions=state, readouts=o.permute(0, 2, 3, 1))


def gains(windows: Windows, stores: Sequence[int], *, window: int, products: bool = False) -> Gains:
    """Pull read-outs back over as many stores as asked for.

    The windows are taken as a ring: what lies before the first is like what lies before any other.

    Args:
        windows: of the calibration text.
        stores: numbers of stores to sum over, ≥ 1.
        window: L.
        products: whether the moments that a bias needs are formed.
    """
    count = windows.readouts.shape[0]
    at = torch.arange(0, count, max(1, count // READ_WINDOWS), device=windows.readouts.device)
    y = windows.readouts[at]
    n_windows, heads, dk, length = y.shape
    steps = n_windows * length
    wanted = set(stores)
    square = y.new_zeros((3, heads, dk))
    newest, total = y, torch.zeros_like(y)
    squares, outer = [], []
    for n in range(1, max(wanted) + 1):
        by_step = y.square().sum(0)  # [H, dk, L]
        early, last = by_step[..., :-1].sum(-1), by_step[..., -1]
        square = square + torch.stack([early, early if n > 1 else torch.zeros_like(early), last])
        if products:
            total = total + y
        if n in wanted:
            squares.append(square / steps)
            if products:
                sums = (total[..., :-1], (total - newest)[..., :-1], total[..., -1:])
                outer.append(torch.stack([_second(x) for x in sums]) / steps)
        at = (at - 1) % count
        y = windows.before(y, at)
    return Gains(
        window=window,
        stores=tuple(sorted(wanted)),
        squares=torch.stack(squares),
        products=torch.stack(outer) if products else None,
    )


def _second(columns: Tensor) -> Tensor:
    """Sum columns' outer products over windows and columns: [n, H, dk, c] to [H, dk, dk]."""
    together = columns.permute(1, 2, 0, 3).flatten(2)
    return together @ together.mT
