"""What was loaded and what runs it, as plain JSON values for a study's provenance."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from quantlab.errors import UsageError
from quantlab.models.adapters import time_step_limit
from quantlab.models.checkpoint import Checkpoint, weights_digest
from quantlab.models.dispatch import original
from quantlab.models.registry import Family
from quantlab.models.source import Source, public_name

if TYPE_CHECKING:
    from quantlab.models.loaded import LoadedModel

# What must be equal in two runs before their logits may be compared.
COMPARED = (
    "sha256",
    "revision",
    "model_type",
    "dtype",
    "device_type",
    "torch",
    "transformers",
    "op_implementation",
    "time_step_limit",
)


def op_implementation(family: Family) -> str:
    """Name what transformers bound its ops to: "torch", or a package such as "fla 0.6.0".

    transformers chooses at import, by what is installed, so "transformers' own logits" mean
    another program on another machine.
    """
    found = set()
    for name in family.functions:
        function: Any = original(family, name)
        if inspect.isfunction(function):
            function = inspect.getclosurevars(function).nonlocals.get("implementation", function)
        package = str(getattr(function, "__module__", type(function).__module__)).split(".")[0]
        found.add("torch" if package == "transformers" else _with_version(package))
    return " + ".join(sorted(found))


def _with_version(package: str) -> str:
    names = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm"}
    try:
        return f"{package} {metadata.version(names.get(package, package))}"
    except metadata.PackageNotFoundError:
        return package


def limit_of(loaded: LoadedModel) -> list[float | str] | None:
    """Return the Δ limit in force as JSON values (infinity as "inf"); None without Mamba-2."""
    if loaded.family.op != "mamba2":
        return None
    limits = {time_step_limit(mixer) for mixer in loaded.recurrent_modules}
    if len(limits) != 1:
        raise UsageError(f"recurrent layers disagree on their time-step limit: {sorted(limits)}")
    return [x if x < float("inf") else "inf" for x in limits.pop()]


def set_time_step_limit(loaded: LoadedModel, limit: tuple[float, float]) -> None:
    """Give every Mamba-2 layer another limit of Δ, for prefill and decode, and record it.

    Raises:
        UsageError: if the model has no such limit, or the limit is not an interval of ≥ 0.
    """
    if loaded.family.op != "mamba2":
        raise UsageError(f"{loaded.family.model_type} has no time step to limit")
    low, high = limit
    if not 0 <= low < high:
        raise UsageError(f"a time-step limit is an interval 0 ≤ low < high (got {limit})")
    for mixer in loaded.recurrent_modules:
        setattr(mixer, "time_step_limit", (low, high))  # noqa: B010 - not declared on nn.Module
    loaded.identity["time_step_limit"] = limit_of(loaded)


def source_identity(source: Source, checkpoint: Checkpoint) -> dict[str, Any]:
    """Where the weights came from and which they are."""
    return {
        "name": public_name(source.name),
        "origin": source.origin,
        "hub_id": source.hub_id,
        "revision": source.revision,
        # A hub commit pins the bytes; a directory's bytes pin themselves.
        "sha256": None if source.revision else weights_digest(checkpoint),
        "parameters": checkpoint.parameters,
    }


def describe(loaded: LoadedModel) -> dict[str, Any]:
    """Say what runs the model: family, dtype, versions, op implementation, Δ limit."""
    return {
        "model_type": loaded.family.model_type,
        "op": loaded.family.op,
        "recurrent_layers": loaded.layers,
        "dtype": str(loaded.activation_dtype).removeprefix("torch."),
        "device_type": loaded.device.type,
        "torch": str(torch.__version__),  # with its CUDA build, which the package version lacks
        "transformers": metadata.version("transformers"),
        "op_implementation": op_implementation(loaded.family),
        "time_step_limit": limit_of(loaded),
    }


def refuse_mixed(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Raise where two identities may not be the two arms of one comparison.

    Raises:
        UsageError: naming every entry that differs: a difference of engines, versions or weights
            would be read as an effect of the state's format.
    """
    differing = [key for key in COMPARED if a.get(key) != b.get(key)]
    if differing:
        table = "; ".join(f"{key}: {a.get(key)} against {b.get(key)}" for key in differing)
        raise UsageError(f"these runs are not comparable ({table})")
