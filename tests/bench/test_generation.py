"""The benchmark of generation: it runs, and says which outputs repeat."""

import torch

from quantlab.bench import generation
from quantlab.bench.engine import TINY, build_model
from quantlab.bench.measure import Bench
from quantlab.engine.generation import GenerationRun
from quantlab.replay import parse_policy

BENCH = Bench("cpu", repeats=1, warmup=0)
SMALL = {"batches": (2,), "budget": 6, "warm": 2}


def test_outputs_repeat_on_a_cpu():
    rows = list(generation.generation_rows(BENCH, quick=True))
    assert [row.name for row in rows] == [
        f"tiny generation B=4 {p.short}" for p in generation.POLICIES
    ]
    for row in rows:
        assert row.status == "ok", row.reason
        assert row.values["identical"] == 1 and row.values["tokens_per_s"] > 0
        # two answers of six tokens a row, the first of each without a step, two steps not counted
        assert row.values["steps"] == 2 * 5 - 2


def test_what_cannot_run_has_no_speed(monkeypatch):
    m = build_model(TINY, torch.device("cpu"))

    def broken(self, on_step=None):
        raise RuntimeError("no room")
        yield

    monkeypatch.setattr(GenerationRun, "run", broken)
    policies = [parse_policy("shared:fp16")]
    (row,) = generation.bench_generation(BENCH, m, "tiny", policies=policies, **SMALL)
    assert row.status == "refused" and row.reason == "RuntimeError: no room" and not row.values
