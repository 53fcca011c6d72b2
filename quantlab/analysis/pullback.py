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
apart, since with two copies they read different ones. Where states grow, errors grow with them: the
y of older stores then enter by the size their states had beside that of the last.
"""

from __future__ import annotations

from bisect import bisect_right
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
    the last n. The first and third together are a mean over all steps. g is the size of a store's
    error over that of the last one: 1 where states do not grow.

    Attributes:
        window: L.
        stores: n of each entry, ascending.
        squares: [entries, 3, H, dk] Σ_n g² y².
        products: [entries, 3, H, dk, dk] (Σ_n g y)(Σ_n g y)ᵀ, or None where they were not asked
            for.
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


def gains(
    windows: Windows,
    stores: Sequence[int],
    *,
    window: int,
    products: bool = False,
    sizes: Tensor | None = None,
) -> Gains:
    """Pull read-outs back over as many stores as asked for.

    The windows are taken as a ring: what lies before the first is like what lies before any other.

    Args:
        windows: of the calibration text.
        stores: numbers of stores to sum over, ≥ 1.
        window: L.
        products: whether the moments that a bias needs are formed.
        sizes: [≥ most stores, H] RMS of the errors of every store from the first on, up to a
            factor; None where all are alike.
    """
    count = windows.readouts.shape[0]
    at = torch.arange(0, count, max(1, count // READ_WINDOWS), device=windows.readouts.device)
    y = windows.readouts[at]
    n_windows, heads, dk, length = y.shape
    steps = n_windows * length
    entries = sorted(set(stores))
    if sizes is None:
        sizes = y.new_ones(()).expand(entries[-1], heads)
    final = torch.tensor(entries, device=y.device) - 1  # the last store of each entry
    squares = y.new_zeros((len(entries), 3, heads, dk))
    totals = y.new_zeros((len(entries), *y.shape)) if products else None
    newest = y
    for n in range(entries[-1]):
        some = slice(bisect_right(entries, n), None)  # that have a store n before the last
        weight = sizes[final[some] - n] / sizes[final[some]]  # [entries, H]
        by_step = y.square().sum(0)  # [H, dk, L]
        early, last = by_step[..., :-1].sum(-1), by_step[..., -1]
        moments = torch.stack([early, early if n else torch.zeros_like(early), last])
        squares[some] += weight.square()[:, None, :, None] * moments
        if totals is not None:
            totals[some].addcmul_(weight[:, None, :, None, None], y)
        at = (at - 1) % count
        y = windows.before(y, at)
    outer = None
    if totals is not None:
        parts = ([x[..., :-1], (x - newest)[..., :-1], x[..., -1:]] for x in totals)
        outer = torch.stack([torch.stack([_second(x) for x in of]) for of in parts]) / steps
    return Gains(window=window, stores=tuple(entries), squares=squares / steps, products=outer)


def _second(columns: Tensor) -> Tensor:
    """Sum columns' outer products over windows and columns: [n, H, dk, c] to [H, dk, dk]."""
    together = columns.permute(1, 2, 0, 3).flatten(2)
    return together @ together.mT
