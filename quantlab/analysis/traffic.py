"""Bytes that decoding moves through device memory: the traffic model.

Per row, recurrent layer and step. States, records and the token's inputs and output are counted
once each; what a group of value heads shares (q, k and their records) once per key head. Nothing
here is measured and nothing is rounded: a benchmark divides these bytes by its times.

Over a window of L steps the paper's form, with an FP32 state and records of 2 dv + 2 dk + 4 bytes
per value head, is 4 (L + 1) dv dk + (L - 1)(L + 2) / 2 r; conventional decoding's is 8 L dv dk.
`paper_ratio` is that; `step_bytes` counts what this tree's kernels move, which differs where keys
are shared in a group and where a delta rule records v and beta as well.

Source: arXiv 2610.13778, appendix C.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from quantlab.formats import Format

SCALAR = 4
"""Bytes of a decay, a strength, a step size and of every output element: FP32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One recurrent layer, as the traffic model sees it.

    Attributes:
        name: of the model.
        heads: value heads.
        key_heads: key heads; divides `heads`.
        dv: value width.
        dk: key width.
        delta: a delta rule.
        per_channel: a decay per key channel.
        input_bytes: of one element of v (and of Mamba-2's B and C).
        query_bytes: of one element of q and k.
    """

    name: str
    heads: int
    key_heads: int
    dv: int
    dk: int
    delta: bool
    per_channel: bool = False
    input_bytes: int = 2
    query_bytes: int = 2

    def __post_init__(self) -> None:
        if self.heads < 1 or self.key_heads < 1 or self.heads % self.key_heads:
            raise ValueError(f"{self.key_heads} key heads do not divide {self.heads} value heads")

    def state_bytes(self, fmt: Format) -> Fraction:
        """Count one copy of all heads' states, scales included."""
        elements = self.heads * self.dv * self.dk
        return elements * fmt.bits_per_element(self.dv, self.dk) / 8

    @property
    def token_bytes(self) -> int:
        """q, k, v, decay and strength in, o out."""
        keys = 2 * self.key_heads * self.dk * self.query_bytes
        values = self.heads * self.dv * (self.input_bytes + SCALAR)
        decays = self.heads * (self.dk if self.per_channel else 1) * SCALAR
        return keys + values + decays + self.heads * SCALAR


PAPER_SHAPES = (
    LayerShape(name="Nemotron-3-Nano-4B", heads=96, key_heads=8, dv=80, dk=128, delta=False),
    LayerShape(name="Nemotron-3-Super-120B", heads=128, key_heads=8, dv=64, dk=128, delta=False),
    LayerShape(
        name="Qwen3.5-4B", heads=32, key_heads=16, dv=128, dk=128, delta=True, query_bytes=4
    ),
    LayerShape(
        name="Qwen3.5-122B-A10B", heads=64, key_heads=16, dv=128, dk=128, delta=True, query_bytes=4
    ),
)
"""Table 5 of the paper; a delta rule's q and k are FP32 after their norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBytes:
    """Bytes of one record of a whole layer.

    Attributes:
        read: by a step that does not flush.
        folded: by a flush.
        written: on append.
    """

    read: int
    folded: int
    written: int


def record_bytes(
    shape: LayerShape, *, key: int = 2, written: int = 2, rederive: bool = True
) -> RecordBytes:
    """Count one token's record.

    Args:
        shape: the layer.
        key: bytes of an element of k and v.
        written: bytes of an element of u; of x without a delta rule.
        rederive: a delta rule's flush derives corrections again, so v and beta are recorded too.
    """
    keys = shape.key_heads * shape.dk * key
    decays = shape.heads * (shape.dk if shape.per_channel else 1) * SCALAR
    values = shape.heads * shape.dv
    if not shape.delta:
        all_of_it = keys + decays + values * written + shape.heads * SCALAR
        return RecordBytes(read=all_of_it, folded=all_of_it, written=all_of_it)
    read = keys + decays + values * written
    if not rederive:
        return RecordBytes(read=read, folded=read, written=read)
    again = values * key + shape.heads * SCALAR
    return RecordBytes(read=read, folded=keys + decays + again, written=read + again)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes of one row's step in one layer.

    Attributes:
        state: of copies, read and written.
        records: read and written.
        token: inputs and outputs.
    """

    state: Fraction
    records: Fraction
    token: int

    @property
    def total(self) -> Fraction:
        """All of them."""
        return self.state + self.records + self.token


def conventional_bytes(shape: LayerShape, fmt: Format) -> StepBytes:
    """Count a conventional step: the state in and out."""
    return StepBytes(state=2 * shape.state_bytes(fmt), records=Fraction(0), token=shape.token_bytes)


def step_bytes(shape: LayerShape, read: Format, record: RecordBytes, *, count: int) -> StepBytes:
    """Count an output-only step behind `count` records: the read copy in, one record out."""
    if count < 0:
        raise ValueError(f"records are counted from 0, got {count}")
    records = Fraction(count * record.read + record.written)
    return StepBytes(state=shape.state_bytes(read), records=records, token=shape.token_bytes)


def flush_bytes(
    shape: LayerShape, recur: Format, read: Format | None, record: RecordBytes, *, window: int
) -> StepBytes:
    """Count a flush: the recurrence copy in and out, a read copy (if it is another) out."""
    state = 2 * shape.state_bytes(recur)
    if read is not None:
        state += shape.state_bytes(read)
    records = Fraction((window - 1) * record.folded)
    return StepBytes(state=state, records=records, token=shape.token_bytes)


def window_bytes(
    shape: LayerShape, recur: Format, read: Format | None, record: RecordBytes, *, window: int
) -> Fraction:
    """Count the L steps of a window."""
    if window < 1:
        raise ValueError(f"a window has at least one step, got {window}")
    if window == 1:
        return conventional_bytes(shape, recur).total
    copy = recur if read is None else read
    steps = [step_bytes(shape, copy, record, count=h).total for h in range(window - 1)]
    return sum(steps, Fraction(0)) + flush_bytes(shape, recur, read, record, window=window).total


def traffic_speedup(
    shape: LayerShape, recur: Format, read: Format | None, record: RecordBytes, *, window: int
) -> Fraction:
    """Bytes of L conventional steps in the recurrence format over those of a window: the bound."""
    conventional = window * conventional_bytes(shape, recur).total
    return conventional / window_bytes(shape, recur, read, record, window=window)


def paper_ratio(*, dv: int, dk: int, window: int) -> Fraction:
    """Form replay's bytes over conventional ones as the paper counts them, with an FP32 state.

    0.58 at dv = 64, dk = 128, L = 16.
    """
    record = 2 * dv + 2 * dk + 4
    replay = 4 * (window + 1) * dv * dk + Fraction((window - 1) * (window + 2), 2) * record
    return replay / (8 * window * dv * dk)
