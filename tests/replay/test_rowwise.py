"""The row-wise cache: a row is a stepwise cache of its own, bit for bit, whatever the others do."""

import pytest
import torch

from quantlab.formats.philox import sr_words
from quantlab.recurrence import textbook
from quantlab.replay import StepwiseCache, parse_policy
from quantlab.replay.rowwise import DIVERGED, FLUSH, PHASE, RowwiseCache
from tests.recurrence.sampling import KINDS, sample_inputs

PROMPT, STEPS = 5, 45
POLICIES = [
    parse_policy(p)
    for p in (
        "conventional:fp32",
        "conventional:fp8-sr",
        "shared:fp32",
        "shared:nvfp4-sr",
        "shared:fp16-sr L=4",
        "nvfp4 / fp16-sr L=7",
        "fp8-sr / fp8-sr L=4",
        "nvfp4 / fp32 corrections=fold",
        "shared:bf16 records=bf16 L=3",
    )
]


def sequences(kind, dtype):
    """One sequence a policy: its inputs, and outputs of a stepwise cache of its own."""
    found = []
    for p, policy in enumerate(POLICIES):
        inputs = sample_inputs(
            kind, rows=1, steps=PROMPT + STEPS, dtype=torch.float32, activation_dtype=dtype, seed=p
        )
        cache = StepwiseCache([policy], torch.tensor([40 + p]), layer=2, seed=7)
        cache.prefill(inputs.slice(0, PROMPT))
        found.append((inputs, cache(inputs.slice(PROMPT, PROMPT + STEPS)), cache))
    return found


def stacked(columns):
    """Join one-token inputs of several sequences into rows."""
    first = columns[0]
    parts = {
        name: torch.cat([getattr(c, name) for c in columns])
        for name in ("q", "k", "v", "log_decay", "beta", "dt")
        if getattr(first, name) is not None
    }
    return type(first)(**parts, activation_dtype=first.activation_dtype)


def run(found, order, rows, restart_at=None):
    """Decode all sequences in few rows: a row that has finished takes the next sequence."""
    cache = RowwiseCache(POLICIES, rows, layer=2, seed=7)
    waiting, inside, done = list(order), {}, {}
    blank = found[0][0].slice(0, 1)
    calls = 0
    while waiting or inside:
        for row in range(rows):
            # sequences begin at different calls, so that phases differ
            if row not in inside and waiting and calls >= 3 * row:
                p = waiting.pop(0)
                _, state = textbook(found[p][0].slice(0, PROMPT))
                cache.start(row, state[0], policy=p, stream=40 + p)
                inside[row], done[p] = [p, 0], []
        columns = [
            found[inside[r][0]][0].slice(PROMPT + inside[r][1], PROMPT + inside[r][1] + 1)
            if r in inside
            else blank
            for r in range(rows)
        ]
        o = cache(stacked(columns))
        for row, (p, t) in list(inside.items()):
            done[p].append(o[row])
            inside[row][1] += 1
            if t + 1 == STEPS:
                done[p].append(cache.counters[:, row].clone())
                cache.stop(row)
                del inside[row]
        calls += 1
        if calls == restart_at:
            other = RowwiseCache(POLICIES, rows, layer=2, seed=7)
            other.load_state_dict(cache.state_dict(), torch.device("cpu"))
            cache = other
    return done


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_a_stepwise_cache_of_its_own(kind, dtype):
    found = sequences(kind, dtype)
    for rows, restart in ((4, None), (4, 61), (len(POLICIES), None)):
        done = run(found, range(len(POLICIES)), rows, restart)
        for p, (_, want, cache) in enumerate(found):
            *outputs, counters = done[p]
            assert torch.equal(torch.cat(outputs), want[0]), (POLICIES[p], rows)
            assert counters[PHASE] == len(cache.caches[0].buffer)
            assert counters[FLUSH] == cache.caches[0].flush
            assert counters[DIVERGED] == cache.diverged_at[0]


def test_a_state_that_overflows_is_noted_where_it_is_stored():
    found = sequences("gdn", torch.float32)
    inputs = found[0][0]
    fp16 = parse_policy("shared:fp16 L=4")
    cache = RowwiseCache([fp16], 2, layer=0, seed=0)
    for row, size in enumerate((1.0, 1e5)):
        _, state = textbook(inputs.slice(0, PROMPT))
        cache.start(row, size * state[0], policy=0, stream=row)
    assert cache.counters[DIVERGED].tolist() == [-1, 0]


def test_words_of_rows_at_different_stores():
    """One call with a store each gives what one call a row gives."""
    shape = {"heads": 2, "dv": 3, "dk": 5}
    streams, flushes = torch.tensor([4, 9, 4]), torch.tensor([0, 7, 2**31])
    words = sr_words(seed=3, layer=1, copy=0, stream=streams, flush=flushes, **shape)
    for row in range(3):
        alone = sr_words(
            seed=3, layer=1, copy=0, stream=streams[row : row + 1], flush=int(flushes[row]), **shape
        )
        assert torch.equal(words[row], alone[0])


def test_refuses_what_it_cannot_take():
    cache = RowwiseCache(POLICIES, 2, layer=0, seed=0)
    inputs = sample_inputs("gdn", rows=2, steps=2, dtype=torch.float32)
    with pytest.raises(ValueError, match="one token of 2 rows"):
        cache(inputs)
    with pytest.raises(RuntimeError, match="start a row"):
        cache(inputs.slice(0, 1))
    with pytest.raises(ValueError, match="at least one"):
        RowwiseCache([], 2, layer=0, seed=0)
