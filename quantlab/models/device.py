"""Names of devices: cpu, cuda and cuda:<index>. Imports torch only to look whether one is here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from quantlab.errors import UsageError

if TYPE_CHECKING:
    import torch


def check_device_name(name: str) -> None:
    """Refuse what names no device of ours, without importing torch.

    Raises:
        UsageError: with the names there are.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UsageError(f"unknown device {name!r}: use cpu, cuda or cuda:<index>")


def parse_device(device: str | torch.device) -> torch.device:
    """Return the device.

    Raises:
        UsageError: if there is no such device here.
    """
    import torch

    check_device_name(str(device))
    parsed = torch.device(device)
    if parsed.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise UsageError(f"device {device}: no CUDA device here (torch {torch.__version__})")
        if parsed.index is not None and parsed.index >= count:
            raise UsageError(
                f"device {device}: this machine has {count} CUDA device{'s' if count > 1 else ''}"
            )
    return parsed
