"""What a KL study is: everything that decides its rows, and nothing else. Imports no torch."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from quantlab.engine.planner import ENGINES, Engine, check_sizes
from quantlab.errors import RunError, UsageError
from quantlab.models.device import check_device_name
from quantlab.replay.policy import Policy, parse_policy

SPEC_VERSION = 1
# As `quantlab.models.load` has them, which imports torch; a test holds them equal.
DTYPES = ("fp32", "bf16", "fp16")
DEFAULT_TOKENS = 4096
DEFAULT_PROMPT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class KlSpec:
    """A KL study.

    Attributes:
        model: zoo name, preset, directory or hub id.
        policies: what is compared with FP32-state decoding, in order. A shared FP32 one, the
            noise floor, is part of a study when it is listed here.
        data: "books", "pg19", or a path to .txt, .jsonl or a folder of them.
        tokens: positions measured to, N.
        streams: how many; None for four, or as many as the data have.
        prompt: tokens before position 1, consumed in full precision.
        engine: "windowed", or "stepwise", the oracle.
        seed: 64-bit seed of the stochastic rounding.
        device: "cpu", "cuda" or "cuda:i".
        dtype: of weights and activations; None for the checkpoint's own (FP32 for the zoo on a
            CPU).
        batch_rows: rows in a batch, instead of what memory allows.
        segment: tokens of a row in one forward, instead of what the planner chooses.
    """

    model: str
    policies: tuple[Policy, ...]
    data: str = "books"
    tokens: int = DEFAULT_TOKENS
    streams: int | None = None
    prompt: int = DEFAULT_PROMPT
    engine: Engine = "windowed"
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None
    batch_rows: int | None = None
    segment: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "streams", "prompt"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be positive (got {value})")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"--seed must be in 0 … 2^64 - 1 (got {self.seed})")
        if self.engine not in ENGINES:
            raise UsageError(_unknown("engine", self.engine, ENGINES))
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(_unknown("dtype", self.dtype, DTYPES))
        if not self.policies:
            raise UsageError("a study needs at least one policy, such as shared:nvfp4-sr")
        names = [str(policy) for policy in self.policies]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"policy given twice: {', '.join(twice)}")
        check_device_name(self.device)
        check_sizes(
            len(self.policies),
            tokens=self.tokens,
            batch_rows=self.batch_rows,
            segment=self.segment,
            engine=self.engine,
        )

    @property
    def floor(self) -> Policy | None:
        """The policy whose KL is the noise floor: a replay that stores FP32 as it is."""
        for policy in self.policies:
            if policy.kind == "shared" and policy.recur.is_exact:
                return policy
        return None

    @property
    def repetitions(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the policies that differ only in their seeds, two or more in a group."""
        groups: dict[str, list[int]] = {}
        for index, policy in enumerate(self.policies):
            groups.setdefault(str(replace(policy, seed=None)), []).append(index)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def to_json(self) -> dict[str, Any]:
        """JSON values; formats and policies by their long names."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "policies": [str(policy) for policy in self.policies]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> KlSpec:
        """Read what `to_json` wrote.

        Raises:
            RunError: if it is something else.
        """
        try:
            policies = tuple(parse_policy(text) for text in values["policies"])
            return cls(**{**values, "policies": policies})
        except (TypeError, KeyError, ValueError, UsageError) as error:
            raise RunError(f"not the spec of a KL study: {error}") from error

    def digest(self) -> str:
        """Eight hex digits that tell specs apart, for names of run directories."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def differences(recorded: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = "") -> str:
    """Say where two JSON objects differ, as `field: recorded → asked`; empty when nowhere."""
    found = []
    for key in dict.fromkeys([*recorded, *asked]):
        a, b = recorded.get(key), asked.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            inner = differences(a, b, f"{prefix}{key}.")
            if inner:
                found.append(inner)
        elif a != b:
            found.append(f"{prefix}{key}: {json.dumps(a)} there, {json.dumps(b)} now")
    return "; ".join(found)


def _unknown(kind: str, name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"unknown {kind} {name!r}: {hint}known: {', '.join(known)}"
