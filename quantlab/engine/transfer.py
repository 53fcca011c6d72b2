"""Numbers to a device and back without waiting for it.

On CUDA an ordinary copy between the host's memory and the device's waits for all that was started
before. From and to pinned memory it is only queued. Elsewhere both are plain copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """Return numbers on a device; those given can be changed at once.

    Args:
        values: a tensor on the host, or (nested) integers, which become int64.
        device: where to.
    """
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda":
        return values.to(device, copy=True)
    # the allocator of pinned memory keeps a block until the copies from it are over
    return values.pin_memory().to(device, non_blocking=True)


class Reading:
    """Tensors as they are when what was started before is over, on their way to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._over: Any = None
        if not tensors[0].is_cuda:
            self._found = [x.to("cpu", copy=True) for x in tensors]
            return
        self._found = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
        for host, x in zip(self._found, tensors, strict=True):
            host.copy_(x, non_blocking=True)
        self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._over.record()

    def get(self) -> list[Tensor]:
        """Return them on the host; waits until they are there."""
        if self._over is not None:
            self._over.synchronize()
        return self._found
