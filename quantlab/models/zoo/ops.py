"""The two operations that a training forward leaves to kernels, on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quantlab import dispatch
from quantlab.models.zoo.scan import sequential_scan

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Conv(Protocol):
    """Signature of `quantlab_kernels.chunk_train_conv.conv_silu`."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        steps: int,
        head: int,
        sizes: Sequence[int],
        scales: Sequence[float | None],
    ) -> tuple[Tensor, ...]:
        """Convolve, apply SiLU, split, normalise."""
        ...


def torch_conv_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    steps: int,
    head: int,
    sizes: Sequence[int],
    scales: Sequence[float | None],
) -> tuple[Tensor, ...]:
    """Do what `quantlab_kernels.chunk_train_conv.conv_silu` does, in plain torch."""
    rows = x.view(-1, steps, x.shape[1]).transpose(1, 2)
    w = weight.to(x.dtype)[:, None]
    pre = F.conv1d(
        rows, w, None if bias is None else bias.to(x.dtype), padding=3, groups=x.shape[1]
    )
    parts = torch.split(F.silu(pre[..., :steps]).transpose(1, 2).reshape(x.shape), list(sizes), 1)
    out = []
    for part, scale in zip(parts, scales, strict=True):
        if scale is not None:
            heads = part.reshape(len(x), -1, head).float()
            heads = scale * heads * (heads.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            part = heads.flatten(1).to(x.dtype)
        out.append(part)
    return tuple(out)


def training_ops(device: torch.device) -> tuple[Scan, Conv]:
    """Pick the recurrence and the convolution: Triton's on a GPU, plain torch elsewhere."""
    if device.type == "cuda":
        return dispatch.training_kernels()
    return sequential_scan, torch_conv_silu
