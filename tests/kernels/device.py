"""Where kernel tests run: on a CUDA device if there is one, else under Triton's interpreter.

Import this before any kernel: the interpreter is chosen when a kernel is defined.
"""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

MARKS = [pytest.mark.gpu] if ON_GPU else []
"""`pytestmark` of a module whose tests run on either."""
