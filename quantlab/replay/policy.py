"""Policies: which copies of a state are stored, in which formats, and when.

Text form, as on the command line (spaces around / allowed)::

    conventional[:FORMAT]      stored at every step (L = 1); FP32 unless said
    shared:FORMAT              one copy, stored once a window and read by every step
    READ / RECUR               two copies: steps 1 … L − 1 read READ, the flush step RECUR

followed, where they differ from the defaults, by `L=…`, `records=…`, `corrections=…`, `seed=…`, and
`only=…` or `except=…` (`part`), which name the heads that the formats apply to.
Source: arXiv 2610.13778, section 6.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from quantlab.errors import UsageError
from quantlab.formats import Format, parse_format
from quantlab.replay.part import Part, parse_part

Kind = Literal["conventional", "shared", "separate"]
Records = Literal["auto", "bf16", "fp32", "exact"]
Corrections = Literal["rederive", "fold"]

DEFAULT_WINDOW = 16
_OPTION = re.compile(r"(?P<key>\w+)=(?P<value>\S*)")
_OPTIONS = ("L", "records", "corrections", "seed", "only", "except")
_FP32 = parse_format("fp32")


class PolicyError(UsageError, ValueError):
    """A policy that does not exist or makes no sense; the message says what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When a state is stored, in which formats, and which copy a step reads.

    Attributes:
        kind: conventional and shared keep one copy, separate two.
        read: format of the copy that steps 1 … L − 1 read.
        recur: format of the copy that a flush replays from; equal to read unless separate.
        window: L, steps per store; 1 for conventional, whatever is given.
        records: types of the window's records: by the activations, or forced. `exact` leaves
            them unrounded.
        corrections: whether a delta rule's corrections are derived again from the recurrence copy
            at a flush, or the cached ones folded (the ablation).
        seed: 64-bit seed of this policy's stochastic rounding; None for the study's. Policies that
            differ in nothing else are repetitions of one measurement.
        part: heads that the formats apply to; all others are stored in FP32 at the same steps, as
            the reference stores them. None for all heads.

    Raises:
        PolicyError: L < 1, two copies at L = 1, different formats of a single copy, or a seed where
            nothing is drawn.
    """

    kind: Kind
    read: Format
    recur: Format
    window: int = DEFAULT_WINDOW
    records: Records = "auto"
    corrections: Corrections = "rederive"
    seed: int | None = None
    part: Part | None = None

    def __post_init__(self) -> None:
        _one_of("kind of policy", self.kind, get_args(Kind))
        _one_of("records", self.records, get_args(Records))
        _one_of("corrections", self.corrections, get_args(Corrections))
        if self.kind == "conventional":
            object.__setattr__(self, "window", 1)
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise PolicyError(f"the replay window is a whole number ≥ 1, got {self.window!r}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise PolicyError(f"a seed is in 0 … 2^64 - 1, got {self.seed}")
        if self.seed is not None and not self.is_stochastic:
            raise PolicyError(
                f"seed={self.seed}: nothing of {replace(self, seed=None).short} is rounded "
                "stochastically"
            )
        if self.kind != "separate" and self.read != self.recur:
            raise PolicyError(
                f"a {self.kind} policy has one copy and one format, got {self.read} and "
                f"{self.recur}; two copies are written '{self.read.short} / {self.recur.short}'"
            )
        if self.kind == "separate" and self.window == 1:
            raise PolicyError(
                f"'{self.read.short} / {self.recur.short}' at L = 1: every step is a flush, so "
                f"the read copy would never be read; use L ≥ 2 or conventional:{self.recur.short}"
            )

    def at(self, layer: int, heads: int) -> tuple[Policy, tuple[bool, ...] | None]:
        """Say what this policy is in one recurrent layer.

        Args:
            layer: its ordinal.
            heads: how many it has.

        Returns:
            A policy for all heads and None, or, where only some heads belong to the part, a policy
            and which heads its formats apply to.
        """
        if self.part is None:
            return self, None
        applies = self.part.heads(layer, heads)
        if any(applies):
            here = replace(self, part=None)
            return here, None if all(applies) else applies
        return replace(self, part=None, read=_FP32, recur=_FP32, seed=None), None

    @property
    def is_stochastic(self) -> bool:
        """Whether a copy is stored with stochastic rounding."""
        return self.read.needs_words or self.recur.needs_words

    @property
    def short(self) -> str:
        """Name for legends: `shared nvfp4-sr`, `nvfp4 / fp16-sr`, `conventional fp32`."""
        if self.kind == "separate":
            name = f"{self.read.short} / {self.recur.short}"
        else:
            name = f"{self.kind} {self.recur.short}"
        return name + self._options()

    def _options(self) -> str:
        text = ""
        if self.kind != "conventional" and self.window != DEFAULT_WINDOW:
            text += f" L={self.window}"
        if self.records != "auto":
            text += f" records={self.records}"
        if self.corrections != "rederive":
            text += f" corrections={self.corrections}"
        if self.seed is not None:
            text += f" seed={self.seed}"
        if self.part is not None:
            text += f" {self.part}"
        return text

    def __str__(self) -> str:
        if self.kind == "separate":
            name = f"{self.read} / {self.recur}"
        else:
            name = f"{self.kind}:{self.recur}"
        return name + self._options()


def parse_policy(
    text: str,
    *,
    window: int = DEFAULT_WINDOW,
    records: Records = "auto",
    corrections: Corrections = "rederive",
) -> Policy:
    """Read a policy; `parse_policy(str(p)) == p`.

    Args:
        text: `shared:nvfp4-sr`, `nvfp4/fp16-sr`, `conventional:fp8-sr`, `conventional`, …
        window: L where the text does not say it; conventional policies have L = 1 regardless.
        records: where the text does not say it.
        corrections: where the text does not say it.

    Raises:
        PolicyError: no such policy; with the nearest match where there is one.
        FormatError: no such format.
    """
    options: dict[str, str] = {}
    words = []
    for word in text.split():
        match = _OPTION.fullmatch(word)
        if match is None:
            words.append(word)
            continue
        key = match["key"]
        if key not in _OPTIONS:
            raise PolicyError(f"policy {text!r}: {_unknown('option', key, _OPTIONS)}")
        if key in options:
            raise PolicyError(f"policy {text!r}: {key} is given twice")
        options[key] = match["value"]
    kind, read, recur = _formats(text, " ".join(words))
    length = options.get("L", str(window))
    if not re.fullmatch(r"[+-]?\d+", length):
        raise PolicyError(f"policy {text!r}: L={length} is not a whole number")
    seed = options.get("seed")
    if seed is not None and not re.fullmatch(r"\d+", seed):
        raise PolicyError(f"policy {text!r}: seed={seed} is not a whole number")
    parts = [name for name in ("only", "except") if name in options]
    if len(parts) == 2:
        raise PolicyError(f"policy {text!r}: give only= or except=, not both")
    return Policy(
        kind=kind,
        read=read,
        recur=recur,
        window=int(length),
        records=cast(Records, options.get("records", records)),
        corrections=cast(Corrections, options.get("corrections", corrections)),
        seed=None if seed is None else int(seed),
        part=parse_part(parts[0], options[parts[0]]) if parts else None,
    )


def _formats(text: str, body: str) -> tuple[Kind, Format, Format]:
    if "/" in body:
        parts = [part.strip() for part in body.split("/")]
        if len(parts) != 2 or not all(parts):
            raise PolicyError(f"policy {text!r}: two copies are written READ / RECUR")
        return "separate", parse_format(parts[0]), parse_format(parts[1])
    forms = "conventional[:FORMAT], shared:FORMAT, READ / RECUR"
    if not body:
        raise PolicyError(f"empty policy {text!r}. Known forms: {forms}")
    head, colon, tail = (part.strip() for part in body.partition(":"))
    if head == "conventional":
        if colon and not tail:
            raise PolicyError(f"policy {text!r}: no format after ':'")
        fmt = parse_format(tail or "fp32")
        return "conventional", fmt, fmt
    if head == "shared":
        if not tail:
            raise PolicyError(f"policy {text!r}: a shared copy needs a format: shared:nvfp4-sr")
        fmt = parse_format(tail)
        return "shared", fmt, fmt
    near = difflib.get_close_matches(head.lower(), ("conventional", "shared"), n=1, cutoff=0.6)
    if near:
        hint = f" Did you mean {near[0]!r}?"
    else:
        fmt = parse_format(body)  # an unknown name stops here, with the known formats
        hint = f" One copy in that format is 'shared:{fmt.short}'."
    raise PolicyError(f"unknown policy {text!r}.{hint} Known forms: {forms}")


def _one_of(what: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PolicyError(_unknown(what, str(value), known))


def _unknown(what: str, value: str, known: tuple[str, ...]) -> str:
    near = [name for name in known if name.lower() == value.lower()]
    near = near or difflib.get_close_matches(value, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {value!r}.{hint} Known: {', '.join(known)}"


SUITES: Mapping[str, list[Policy]] = {
    # Shared formats and pairs of arXiv 2610.13778, appendix E.4.
    "replayssm": [
        parse_policy(text)
        for text in (
            "shared:fp32",
            "shared:fp16-sr",
            "shared:fp8-sr",
            "shared:nvfp4-sr",
            "fp8 / fp32",
            "nvfp4 / fp32",
            "fp8 / fp16-sr",
            "nvfp4 / fp16-sr",
            "nvfp4 / fp8-sr",
        )
    ],
}


def suite(
    name: str,
    *,
    window: int = DEFAULT_WINDOW,
    records: Records = "auto",
    corrections: Corrections = "rederive",
) -> list[Policy]:
    """Return a named suite with its policies' window and options set.

    Raises:
        PolicyError: no such suite.
    """
    _one_of("suite", name, tuple(SUITES))
    return [
        Policy(
            kind=p.kind,
            read=p.read,
            recur=p.recur,
            window=window,
            records=records,
            corrections=corrections,
        )
        for p in SUITES[name]
    ]
