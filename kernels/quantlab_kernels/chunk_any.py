"""The training recurrence whatever the decay: per head or per key channel."""

from torch import Tensor

from quantlab_kernels.chunk_kda import chunk_kda
from quantlab_kernels.chunk_train import chunk_scan


def chunk_any(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None = None
) -> Tensor:
    """Run `chunk_scan`, or `chunk_kda` for log decays [rows, T, H, dk].

    Raises:
        ValueError: shapes or dtypes that do not fit, or a decay per key channel without the delta
            rule.
    """
    if log_decay.dim() != 4:
        return chunk_scan(q, k, v, log_decay, beta)
    if beta is None:
        raise ValueError("training with a decay per key channel needs the delta rule: give beta")
    return chunk_kda(q, k, v, log_decay, beta)
