"""Full FP32 products while a model is studied or checked: TF32 keeps 10 fraction bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_fp32() -> Iterator[None]:
    """Switch TF32 off for matrix products and convolutions, and restore the caller's settings.

    cuDNN convolutions use TF32 unless told otherwise, also where matrix products do not; the
    short convolution in front of every recurrence would then differ between CPU and GPU by 1e-3.
    """
    matmul = torch.backends.cuda.matmul.allow_tf32
    cudnn = torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = cudnn
