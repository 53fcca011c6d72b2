"""Memory splits a study by stream; a batch always holds the reference and all policies."""

from types import SimpleNamespace

import pytest
import torch

from quantlab.engine import plan
from quantlab.engine.planner import SEGMENT_MOST, TOKENS_PER_FORWARD
from quantlab.errors import UsageError
from quantlab.replay import parse_policy


class Config(SimpleNamespace):
    def get_text_config(self):
        return self


def model(**changes):
    config = Config(
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_hidden_layers=4,
        num_key_value_heads=2,
        num_attention_heads=4,
        head_dim=64,
        hidden_size=256,
        intermediate_size=640,
        **changes,
    )
    return SimpleNamespace(
        model=SimpleNamespace(config=config),
        layers=3,
        vocab_size=384,
        activation_dtype=torch.float32,
        recurrent_shapes=[(4, 128, 128)] * 3,
    )


POLICIES = [parse_policy("shared:fp16-sr"), parse_policy("nvfp4/fp32")]


def test_every_stream_once_and_in_order():
    p = plan(model(), POLICIES, streams=7, tokens=1024, batch_rows=9)
    assert [i for batch in p.stream_batches for i in batch] == list(range(7))
    assert all(len(batch) * 3 <= 9 for batch in p.stream_batches)
    assert p.rows == 9


def test_segment_is_a_window_boundary():
    p = plan(model(), POLICIES, streams=4, tokens=100_000)
    assert p.segment % 64 == 0
    assert p.rows * p.segment <= TOKENS_PER_FORWARD["cpu"]
    # Few rows: still short enough that progress is told every few seconds on two cores.
    assert plan(model(), POLICIES, streams=1, tokens=100_000).segment == SEGMENT_MOST["cpu"]
    assert plan(model(), POLICIES, streams=4, tokens=10).segment == 10
    assert plan(model(), POLICIES, streams=4, tokens=1024, engine="stepwise").segment == 1


def test_memory_is_counted_per_row_and_token():
    small = plan(model(), POLICIES, streams=1, tokens=1024, segment=64)
    large = plan(model(), POLICIES, streams=1, tokens=2048, segment=64)
    # One attention layer, old and new copy of K and V, 2 heads of 64, FP32, three rows.
    assert large.bytes - small.bytes == 3 * 2 * 2 * 2 * 64 * 1024 * 4
    assert plan(model(), POLICIES, streams=2, tokens=1024, segment=64).bytes == 2 * small.bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_rows": 2}, "3 rows"),
        ({"batch_rows": 0}, "positive"),
        ({"segment": -1}, "positive"),
        ({"segment": 100}, "nearest 128"),
    ],
)
def test_clear_errors(arguments, message):
    with pytest.raises(UsageError, match=message):
        plan(model(), POLICIES, streams=2, tokens=4096, **arguments)


def test_what_does_not_fit_is_said_before_anything_runs(monkeypatch):
    monkeypatch.setattr("quantlab.engine.planner.memory_budget", lambda device: 1 << 20)
    with pytest.raises(UsageError, match="fewer policies"):
        plan(model(), POLICIES, streams=2, tokens=4096)
