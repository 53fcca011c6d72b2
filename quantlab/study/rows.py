"""The rows of a KL study: one a policy, stream and measured position.

`rows.parquet` follows `SCHEMA`, sorted by policy (in the spec's order), stream and position. Its
metadata has the schema's version and the spec. A column's meaning is in its field metadata.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from quantlab.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from quantlab.metrics.divergence import TokenMetrics
    from quantlab.study.spec import KlSpec

SCHEMA_VERSION = "2"
_NAMES = pa.dictionary(pa.int32(), pa.string())


def _field(name: str, kind: pa.DataType, meaning: str) -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"meaning": meaning})


SCHEMA = pa.schema(
    [
        _field("model", _NAMES, "model as asked for; its hash and revision are in spec.json"),
        _field("policy", _NAMES, "policy in its long form; parse_policy reads it"),
        _field("stream", pa.int32(), "index of the stream in the study, as the draws count it"),
        _field("stream_name", _NAMES, "document the stream was cut from"),
        _field("position", pa.int32(), "tokens consumed after the prompt when predicting, from 1"),
        _field("kl", pa.float64(), "nats, KL(FP32 state || policy) over the full vocabulary"),
        _field("nll", pa.float64(), "nats, of the next token under the policy"),
        _field("nll_reference", pa.float64(), "nats, of the next token under the FP32 state"),
        _field("top1_agrees", pa.bool_(), "the most likely token is the reference's"),
        _field("diverged", pa.bool_(), "a stored state was not finite at or before the position"),
        _field(
            "kl_of_mean",
            pa.float64(),
            "nats, KL(FP32 state || mean logits over the seeds of the policy); NaN with one seed",
        ),
    ]
)


def chunk_rows(
    spec: KlSpec,
    metrics: TokenMetrics,
    *,
    kl_of_means: Tensor,
    positions: Tensor,
    diverged_at: Tensor,
    streams: Sequence[int],
    stream_names: Sequence[str],
) -> pa.Table:
    """Rows of one measured chunk.

    Args:
        spec: the study.
        metrics: of its policies, [policies, streams, n].
        kl_of_means: [policies, streams, n], see `quantlab.metrics.repetitions`.
        positions: [n], 1-based after the prompt.
        diverged_at: [policies, streams] first position with a non-finite stored state, -1 if none.
        streams: indices of the batch's streams in the study.
        stream_names: their names.

    Returns:
        A table of `SCHEMA`. From the position where a state diverged on, `kl` and `nll` are NaN
        and `top1_agrees` is False, whatever the logits happened to be; logits that are NaN count
        as diverged too. `kl_of_mean` is NaN from where any seed of the policy diverged.
    """
    kl, nll = metrics.kl.cpu().numpy().copy(), metrics.nll.cpu().numpy().copy()
    agrees = metrics.top1_agrees.cpu().numpy().copy()
    at = diverged_at.cpu().numpy()[:, :, None]
    where = positions.cpu().numpy()
    diverged = ((at >= 0) & (where[None, None] >= at)) | np.isnan(kl)
    kl[diverged] = nll[diverged] = np.nan
    agrees[diverged] = False
    of_mean = kl_of_means.cpu().numpy().copy()
    for group in map(list, spec.repetitions):
        of_mean[group] = np.where(diverged[group].any(axis=0), np.nan, of_mean[group])
    policies, batch = kl.shape[:2]
    reference = np.broadcast_to(metrics.nll_reference.cpu().numpy()[None], kl.shape)

    def column(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.broadcast_to(values, kl.shape).ravel()

    def named(values: npt.NDArray[Any], names: Sequence[str]) -> pa.Array:
        codes = pa.array(column(values), pa.int32())
        return pa.DictionaryArray.from_arrays(codes, pa.array(list(names), pa.string()))

    arrays = [
        named(np.zeros((1, 1, 1), np.int32), [spec.model]),
        named(np.arange(policies)[:, None, None], [str(p) for p in spec.policies]),
        pa.array(column(np.asarray(streams)[None, :, None]), pa.int32()),
        named(np.arange(batch)[None, :, None], list(stream_names)),
        pa.array(column(where[None, None]), pa.int32()),
        pa.array(kl.ravel()),
        pa.array(nll.ravel()),
        pa.array(reference.ravel()),
        pa.array(agrees.ravel()),
        pa.array(diverged.ravel()),
        pa.array(of_mean.ravel()),
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def merge(parts: Sequence[pa.Table], spec: KlSpec) -> pa.Table:
    """All rows of a run in their final order, with the metadata of `rows.parquet`.

    Raises:
        RunError: if a (policy, stream, position) occurs twice.
    """
    metadata = {"quantlab.schema": SCHEMA_VERSION, "quantlab.spec": json.dumps(spec.to_json())}
    schema = SCHEMA.with_metadata(metadata)
    if not parts:
        return schema.empty_table()
    table = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
    policy = [str(p) for p in spec.policies]
    rank = pc.index_in(table["policy"].cast(pa.string()), pa.array(policy))
    order = np.lexsort((table["position"].to_numpy(), table["stream"].to_numpy(), rank.to_numpy()))
    keys = np.stack([rank.to_numpy(), table["stream"].to_numpy(), table["position"].to_numpy()])[
        :, order
    ]
    if (keys[:, 1:] == keys[:, :-1]).all(axis=0).any():
        raise RunError("the parts of this run overlap: a position was measured twice")
    table = table.take(pa.array(order))
    # One dictionary in a fixed order, so that the file does not depend on how parts were cut.
    names = {
        "model": [spec.model],
        "policy": policy,
        "stream_name": list(dict.fromkeys(table["stream_name"].to_pylist())),
    }
    for name, known in names.items():
        codes = pc.index_in(table[name].cast(pa.string()), pa.array(known)).combine_chunks()
        array = pa.DictionaryArray.from_arrays(codes, pa.array(known, pa.string()))
        table = table.set_column(table.schema.get_field_index(name), SCHEMA.field(name), array)
    return table.combine_chunks().replace_schema_metadata(metadata).cast(schema)
