"""How a recurrent state evolves: Mamba-2, GDN and KDA as one gated linear recurrence.

B batch, T steps, H value heads, dk (= N) key width, dv (= P) value width; the state of one head is
S [dv, dk] everywhere.
"""

from quantlab.recurrence.inputs import OpInputs
from quantlab.recurrence.sequence import exact_scan
from quantlab.recurrence.step import RECURRENCES, Recurrence, step, textbook, zero_state

__all__ = [
    "RECURRENCES",
    "OpInputs",
    "Recurrence",
    "exact_scan",
    "step",
    "textbook",
    "zero_state",
]
