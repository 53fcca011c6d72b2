"""From names to a spec: defaults by model, and every check that needs no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantlab.data.documents import check_data
from quantlab.data.manifest import load_manifest
from quantlab.errors import UsageError
from quantlab.models.source import resolve
from quantlab.replay.policy import DEFAULT_WINDOW, SUITES, Policy, parse_policy
from quantlab.study.spec import KlSpec

ZOO_DATA = "books"
OTHER_DATA = "pg19"


def build_spec(
    model: str,
    policies: Sequence[str | Policy] | str,
    *,
    floor: bool = True,
    data: str | None = None,
    device: str = "auto",
    **fields: Any,
) -> KlSpec:
    """Build the spec of a KL study.

    Args:
        model: zoo name, preset, directory or hub id.
        policies: policies or their names, or the name of a suite; repeated ones count once.
        floor: put shared:fp32, the noise floor, first if it is not among them.
        data: "books", "pg19" or a path; None for the books with the zoo and PG-19 otherwise.
        device: "auto" for the GPU if there is one.
        fields: the other fields of `KlSpec`.

    Raises:
        UsageError: for a name that does not exist, a size that cannot be, or too long a study.
    """
    chosen = list_policies(policies)
    if floor and not any(p.kind == "shared" and p.recur.is_exact for p in chosen):
        windows = [p.window for p in chosen if p.kind != "conventional"] or [DEFAULT_WINDOW]
        chosen.insert(0, parse_policy("shared:fp32", window=max(windows)))
    source = resolve(model)
    zoo = source.origin == "zoo"
    data = data or (ZOO_DATA if zoo else OTHER_DATA)
    check_data(data)
    named = "cpu" if device == "auto" else device
    spec = KlSpec(model=model, policies=tuple(chosen), data=data, device=named, **fields)
    if zoo and data == ZOO_DATA:
        _check_length(spec)
    if device == "auto":  # looked for last: it takes torch
        import torch

        spec = replace(spec, device="cuda" if torch.cuda.is_available() else "cpu")
    return spec


def list_policies(policies: Sequence[str | Policy] | str) -> list[Policy]:
    """Parse names, or look a suite up; each policy once, in order.

    Raises:
        UsageError: for an unknown name.
    """
    if isinstance(policies, str):
        if policies in SUITES:
            return list(SUITES[policies])
        policies = [policies]
    try:
        found = [p if isinstance(p, Policy) else parse_policy(p) for p in policies]
    except ValueError as error:
        raise UsageError(str(error)) from error
    return list({str(p): p for p in found}.values())


def default_directory(spec: KlSpec) -> Path:
    """`runs/kl-MODEL-N-HASH`: the same study finds its own run again."""
    model = Path(spec.model).name.lower()
    return Path("runs") / f"kl-{model}-{spec.tokens}-{spec.digest()}"


def _check_length(spec: KlSpec) -> None:
    """Refuse too long a study of the zoo on its books at once: a byte is a token there."""
    lengths = sorted((text.bytes for text in load_manifest(ZOO_DATA).texts), reverse=True)
    streams = spec.streams or 1
    if streams > len(lengths):
        raise UsageError(
            f"--streams {streams}: {spec.data} has {len(lengths)} documents, and each stream "
            "takes one"
        )
    longest = lengths[streams - 1] - spec.prompt - 1
    if spec.tokens > longest:
        raise UsageError(
            f"--tokens {spec.tokens:,}: a stream of N tokens needs prompt + N + 1; the longest N "
            f"possible with {streams} stream{'s' if streams > 1 else ''} of {spec.data} is "
            f"{longest:,}"
        )
