"""Under what a study ran: versions, revision of the code, machine. Nothing here decides a row."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("quantlab", "torch", "transformers", "triton", "numpy", "pyarrow", "datasets")
_ROOT = Path(__file__).parents[2]


def provenance(device: str) -> dict[str, Any]:
    """Versions, code revision and machine, as JSON values."""
    return {
        "versions": versions(),
        "git": git_revision(_ROOT),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "threads": _threads(),
        "device": device_name(device),
    }


def versions() -> dict[str, str | None]:
    """Version of every package that has a say in the numbers, None where absent."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_revision(root: Path) -> dict[str, Any] | None:
    """Commit of the source tree and whether tracked files differ from it; None outside one."""
    if not (root / ".git").exists():
        return None  # an installed package, perhaps inside somebody else's repository
    try:
        commit = _git(root, "rev-parse", "HEAD")
        dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": dirty}


def _git(root: Path, *arguments: str) -> str:
    run = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return run.stdout.strip()


def device_name(device: str) -> str:
    """Name of the GPU, or the device as given."""
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(torch.device(device)))
    return device


def _threads() -> int:
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
