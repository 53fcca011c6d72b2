"""Choose how many streams ride in one batch and how many tokens one forward takes.

The reference and all policies of a stream stay in one batch, so memory splits a study by stream,
never by policy. This module imports no torch until memory is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from quantlab.errors import UsageError

if TYPE_CHECKING:
    from quantlab.models import LoadedModel
    from quantlab.replay import Policy

Engine = Literal["windowed", "stepwise"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

# Segments are multiples of this, so that windows of 2, 4, … 64 end with them. Others are carried
# over a boundary, which changes no rounding but runs the cut window in two parts.
SEGMENT_QUANTUM = 64
# Tokens of all rows in one forward. Larger ones run no faster (two cores: 28 rows x 512 tokens
# took 33 s, x 1,152 42 s) but hold more activations.
TOKENS_PER_FORWARD = {"cpu": 16_384, "cuda": 262_144}
# Tokens of one row in one forward at the most. Progress is told, and a state can be saved, between
# forwards: with few rows a CPU would otherwise be silent for minutes, and a kill cost all of it.
SEGMENT_MOST = {"cpu": 1_024, "cuda": 262_144}
# Live FP32-equivalent activations of one token in one layer, in units of its widest layer input:
# measured as peak memory of segments of 512 and 1,152 tokens (1.2 and 1.6 GB at 28 rows).
ACTIVATION_COPIES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stream batches of a study, and the memory each is expected to take.

    Attributes:
        stream_batches: indices of the streams that share a batch, in order.
        segment: tokens of each row in one forward, a multiple of 64 (1 for the stepwise engine).
        rows: rows of the largest batch, the reference's included.
        bytes: expected peak of caches, states and activations of the largest batch.
    """

    stream_batches: list[list[int]]
    segment: int
    rows: int
    bytes: int


def memory_budget(device: str) -> int:
    """Bytes a batch may take: half of what is free on a CPU, 85 % of it on a GPU."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return int(0.85 * free)
    return int(0.5 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _bytes_per_row(m: LoadedModel, tokens: int) -> int:
    """KV cache of a whole stream, and three copies of each recurrent state, of one row."""
    config = m.model.config.get_text_config()
    width = m.activation_dtype.itemsize
    layer_types = list(getattr(config, "layer_types", None) or [])
    attention = sum("attention" in t and "linear" not in t for t in layer_types)
    if not layer_types:
        attention = max(0, config.num_hidden_layers - m.layers)
    heads = int(
        getattr(config, "num_key_value_heads", None)
        or getattr(config, "num_attention_heads", None)
        or 0
    )
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // max(1, getattr(config, "num_attention_heads", 1))
    )
    # transformers' cache grows by concatenation: the old and the new copy live side by side.
    cache = 2 * attention * 2 * heads * head_dim * tokens * width
    states = sum(3 * 4 * h * dv * dk for h, dv, dk in m.recurrent_shapes)
    return int(cache + states)


def _bytes_per_token(m: LoadedModel) -> int:
    config = m.model.config.get_text_config()
    recurrent = max((h * (dv + dk) for h, dv, dk in m.recurrent_shapes), default=0)
    widest = max(config.hidden_size, getattr(config, "intermediate_size", 0) or 0, recurrent)
    return int(ACTIVATION_COPIES * widest * 4)


def check_sizes(
    policies: int,
    *,
    tokens: int,
    batch_rows: int | None,
    segment: int | None,
    engine: str,
) -> None:
    """Refuse sizes that no model could make right.

    Args:
        policies: how many there are, without the reference.
        tokens: positions measured to, N.
        batch_rows: rows a batch may hold, if given.
        segment: tokens of a row in one forward, if given.
        engine: "windowed" or "stepwise" (whose segment is 1, whatever is given).

    Raises:
        UsageError: with what would be right.
    """
    for name, value in (("--batch-rows", batch_rows), ("--segment", segment)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be positive (got {value})")
    if batch_rows is not None and batch_rows < policies + 1:
        raise UsageError(
            f"--batch-rows must hold a stream with the reference and all policies, "
            f"{policies + 1} rows (got {batch_rows})"
        )
    cut = segment is not None and 1 < segment < tokens and engine != "stepwise"
    if segment is not None and cut and segment % SEGMENT_QUANTUM:
        nearest = max(1, round(segment / SEGMENT_QUANTUM)) * SEGMENT_QUANTUM
        raise UsageError(
            f"--segment must be a multiple of {SEGMENT_QUANTUM} (got {segment}; nearest {nearest})"
        )


def plan(
    m: LoadedModel,
    policies: Sequence[Policy],
    *,
    streams: int,
    tokens: int,
    prompt: int = 512,
    batch_rows: int | None = None,
    segment: int | None = None,
    engine: str = "windowed",
    device: str = "cpu",
) -> Plan:
    """Split `streams` into batches that fit, and choose the segment.

    Args:
        m: the loaded model.
        policies: without the reference, which is added.
        streams: number of streams.
        tokens: positions measured to, N.
        prompt: tokens of the prompt.
        batch_rows: rows a batch may hold instead of what memory allows.
        segment: tokens of a row in one forward instead of what the planner chooses; a multiple
            of 64 unless it covers the stream.
        engine: "windowed" or "stepwise" (whose segment is 1).
        device: "cpu", "cuda" or "cuda:i".

    Returns:
        The plan; batches differ by at most one stream.

    Raises:
        UsageError: if one stream with all its policies does not fit, or a size is not positive.
    """
    check_sizes(len(policies), tokens=tokens, batch_rows=batch_rows, segment=segment, engine=engine)
    per_stream = len(policies) + 1
    if engine == "stepwise":
        segment = 1
    row_bytes = _bytes_per_row(m, prompt + tokens)
    token_bytes = _bytes_per_token(m)
    budget = memory_budget(device)
    if batch_rows is None:
        # Room for the smallest segment, or for the prompt, which goes in one forward.
        floor_bytes = row_bytes + max(prompt, SEGMENT_QUANTUM) * token_bytes
        per_batch = budget // (per_stream * floor_bytes)
        if per_batch < 1:
            raise UsageError(
                f"one stream with {per_stream} policies (the reference included) needs "
                f"{per_stream * floor_bytes / 2**30:.1f} GiB on {device}, which has "
                f"{budget / 2**30:.1f} GiB to spare: use fewer policies or fewer --tokens"
            )
    else:
        per_batch = batch_rows // per_stream
    batches = -(-streams // min(per_batch, streams))
    split = [
        list(range(i * streams // batches, (i + 1) * streams // batches)) for i in range(batches)
    ]
    rows = per_stream * max(len(batch) for batch in split)
    if segment is None:
        kind = "cuda" if device.startswith("cuda") else "cpu"
        room = (budget - rows * row_bytes) // token_bytes
        per_forward = min(min(TOKENS_PER_FORWARD[kind], room) // rows, SEGMENT_MOST[kind])
        segment = max(1, per_forward // SEGMENT_QUANTUM) * SEGMENT_QUANTUM
    segment = min(segment, tokens)
    live = max(prompt, segment) * token_bytes
    return Plan(stream_batches=split, segment=segment, rows=rows, bytes=rows * (row_bytes + live))
