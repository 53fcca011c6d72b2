"""Generation: the model's own tokens, the same whatever the batch, order or interruption."""

import math
import time

import pytest
import torch

from quantlab.engine import TeacherForcing, generation
from quantlab.engine.generation import (
    BROKEN,
    BUDGET,
    STOP,
    Arm,
    Generation,
    GenerationRun,
    Job,
    Pace,
    Question,
    first_divergence,
)
from quantlab.engine.sampling import Sampling, stream_id
from quantlab.replay import parse_policy
from tests.models.tiny import VOCAB, tiny

FP32 = parse_policy("conventional:fp32")
NVFP4 = parse_policy("shared:nvfp4-sr L=4")
PAIR = parse_policy("nvfp4 / fp16-sr L=4")
BUDGET_TOKENS = 24


def questions(count=5):
    """Prompts of different lengths, ids apart from their order."""
    generator = torch.Generator().manual_seed(3)
    return [
        Question(id=70 + 3 * i, tokens=torch.randint(VOCAB, (3 + 4 * i,), generator=generator))
        for i in range(count)
    ]


def generate(m, on_step=None, state=None, **changes):
    arguments = {
        "arms": [Arm(policy=FP32, seed=1), Arm(policy=NVFP4, seed=1)],
        "questions": questions(),
        "sampling": Sampling(),
        "budget": BUDGET_TOKENS,
        "stop_ids": [7, 8],
        "seed": 5,
        "rows": 8,
    } | changes
    run = GenerationRun(m, **arguments)
    if state is not None:
        run.load_state_dict(state)
    found = list(run.run(None if on_step is None else lambda: on_step(run)))
    return {g.job: g for g in found}


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "mamba2", "falcon_h1", "kimi_linear"])
def test_fp32_greedy_is_the_models_own_decoding(family):
    m = tiny(family)
    found = generate(
        m, arms=[Arm(policy=FP32, seed=0)], sampling=Sampling(temperature=0), stop_ids=[]
    )
    for index, question in enumerate(questions()):
        got = found[Job(0, index, 0)]
        ids = torch.cat([question.tokens, torch.tensor(got.tokens)])[None]
        with torch.inference_mode():
            logits = m.model(input_ids=ids).logits[0, len(question.tokens) - 1 : -1]
        top = logits.topk(2).values
        gap = (top[:, 0] - top[:, 1]).tolist()
        # prefill + steps agree with the full forward to 1e-4 of the largest logit (case C01)
        bound = 1e-4 * float(logits.abs().max())
        assert len(got.tokens) == BUDGET_TOKENS and got.finish == BUDGET
        for token, best, own, margin in zip(
            got.tokens, logits.argmax(-1).tolist(), gap, got.margins, strict=True
        ):
            assert token == best or own < bound
            assert abs(margin - own) < 2 * bound


@pytest.mark.parametrize("policy", [NVFP4, PAIR], ids=str)
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_a_policy_rounds_as_the_stepwise_engine_does(family, policy):
    """In FP64 the margins along a greedy generation are those of the teacher-forced oracle."""
    m = tiny(family, dtype=torch.float64)
    found = generate(
        m,
        arms=[Arm(policy=FP32, seed=0), Arm(policy=policy, seed=0)],
        sampling=Sampling(temperature=0),
        stop_ids=[],
        repetitions=2,
        rows=3,
    )
    moved = 0.0
    for index, question in enumerate(questions()):
        got = found[Job(1, index, 1)]
        ids = torch.cat([question.tokens, torch.tensor([*got.tokens, 0])])[None]
        run = TeacherForcing(
            m, ids, policies=[policy], stream_ids=[stream_id(question.id, 1)],
            positions=range(1, BUDGET_TOKENS), prompt=len(question.tokens), segment=1, seed=5,
            engine="stepwise",
        )  # fmt: skip
        logits = torch.cat([part.logits for part in run.run()], 2)[:, 0]
        top = logits.topk(2).values
        gap = top[..., 0] - top[..., 1]
        assert logits[1].argmax(-1).tolist() == got.tokens[1:]
        margins = torch.tensor(got.margins[1:], dtype=torch.float64)
        assert (gap[1] - margins).abs().max() < 1e-10
        moved = max(moved, float((gap[0] - margins).abs().max()))
    assert moved > 1e-4  # the reference's margins are not these


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_answers_do_not_depend_on_the_batch(family):
    """1, 8 and 64 busy rows of 64: tokens and margins equal, to the last bit."""
    m = tiny(family)
    arms = [Arm(policy=FP32, seed=1), Arm(policy=NVFP4, seed=1), Arm(policy=PAIR, seed=1)]
    runs = [
        generate(m, arms=arms, questions=questions(3), repetitions=2, budget=12, rows=64, busy=busy)
        for busy in (1, 8, 64)
    ]
    assert len(runs[0]) == 18
    assert runs[0] == runs[1] == runs[2]
    backwards = generate(
        m, arms=arms, questions=questions(3)[::-1], repetitions=2, budget=12, rows=64
    )
    for (arm, question, repetition), g in backwards.items():
        twin = runs[0][Job(arm, 2 - question, repetition)]
        assert (g.tokens, g.margins, g.finish) == (twin.tokens, twin.margins, twin.finish)


@pytest.mark.parametrize("at", [1, 13, 30])
def test_a_run_cut_anywhere_goes_on(at):
    m = tiny("qwen3_5")
    whole = generate(m, repetitions=2, rows=4)
    saved, before = {}, {}

    class Killed(Exception):
        pass

    def kill(run):
        if run.steps == at:
            saved.update(run.state_dict())
            raise Killed

    run = GenerationRun(
        m, arms=[Arm(policy=FP32, seed=1), Arm(policy=NVFP4, seed=1)], questions=questions(),
        sampling=Sampling(), budget=BUDGET_TOKENS, stop_ids=[7, 8], seed=5, rows=4, repetitions=2,
    )  # fmt: skip
    with pytest.raises(Killed):
        for g in run.run(lambda: kill(run)):
            before[g.job] = g
    after = generate(m, repetitions=2, rows=4, state=saved)
    assert not before.keys() & after.keys()
    assert before | after == whole
    # and without a saved state: what is unfinished is made again
    assert before | generate(m, repetitions=2, rows=4, skip=list(before)) == whole


@pytest.mark.parametrize("steps", [2, 7])
def test_the_hosts_pace_changes_no_answer(steps, monkeypatch):
    """Rows replaced steps later, prompts consumed ahead: every bit the same; also if cut."""
    monkeypatch.setattr(generation, "STARTED_TOGETHER", 2)
    m = tiny("qwen3_5")
    settings = {"repetitions": 1, "rows": 4, "sampling": Sampling(presence_penalty=0.5)}
    whole = generate(m, **settings)
    pace = Pace(steps=steps, together=1, ahead=True)
    assert generate(m, pace=pace, **settings) == whole
    saved, before = {}, {}

    def save(run):
        saved.setdefault(run.steps // steps, run.state_dict())

    run = GenerationRun(
        m, arms=[Arm(policy=FP32, seed=1), Arm(policy=NVFP4, seed=1)], questions=questions(),
        budget=BUDGET_TOKENS, stop_ids=[7, 8], seed=5, pace=pace, **settings,
    )  # fmt: skip
    for g in run.run(lambda: save(run)):
        before.setdefault(run.steps // steps, {})[g.job] = g
    for at in (1, max(saved) - 1):
        after = generate(m, state=saved[at], pace=pace, **settings)
        first = {job: g for bout, some in before.items() if bout <= at for job, g in some.items()}
        assert not first.keys() & after.keys()
        assert first | after == whole


def test_prompts_of_one_length_are_consumed_together_and_once(monkeypatch):
    m = tiny("qwen3_5", dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    asked = [
        Question(id=i, tokens=torch.randint(VOCAB, (4 + i % 2,), generator=generator))
        for i in range(10)
    ]
    settings = {"questions": asked, "rows": 4}
    alone = generate(m, **settings)
    sizes = []
    prefill = generation.prefill
    monkeypatch.setattr(
        generation, "prefill", lambda m, ids: sizes.append(tuple(ids.shape)) or prefill(m, ids)
    )
    clock, seconds = time.monotonic(), {}
    together = generate(
        m,
        lambda run: seconds.update(run.seconds),
        pace=Pace(steps=3, together=3, ahead=True),
        **settings,
    )
    # nothing is counted twice
    assert min(seconds.values()) >= 0 and seconds["prompts"] > 0
    assert sum(seconds.values()) <= time.monotonic() - clock
    assert sizes == [(3, 5), (2, 5), (3, 4), (2, 4)]
    # products of another shape: sums in another order
    for job, g in alone.items():
        assert together[job].tokens == g.tokens
        assert together[job].margins == pytest.approx(g.margins, abs=1e-9)


def test_fp32_against_itself():
    m = tiny("nemotron_h")
    same = generate(m, arms=[Arm(policy=FP32, seed=1), Arm(policy=FP32, seed=1)])
    other = generate(m, arms=[Arm(policy=FP32, seed=1), Arm(policy=FP32, seed=2)])
    for q in range(5):
        assert first_divergence(same[Job(0, q, 0)], same[Job(1, q, 0)]) is None
        assert same[Job(0, q, 0)] == other[Job(0, q, 0)]
    assert any(first_divergence(other[Job(0, q, 0)], other[Job(1, q, 0)]) for q in range(5))


def test_policies_share_the_noise_and_part_at_near_ties():
    m = tiny("qwen3_5")
    found = generate(m, questions=questions(5), repetitions=4, stop_ids=[])
    left = [
        first_divergence(found[Job(0, q, r)], found[Job(1, q, r)])
        for q in range(5)
        for r in range(4)
    ]
    parted = [x for x in left if x is not None]
    assert parted
    assert all(step >= 1 for step, _ in parted)  # the first token comes before any rounding
    margins = [m for g in found.values() for m in g.margins]
    # where they part the reference was nearer a tie than at a typical token
    assert sum(margin for _, margin in parted) / len(parted) < sum(margins) / len(margins)


def test_reasons_to_finish():
    m = tiny("qwen3_5")
    found = generate(m, repetitions=3)
    finish = {g.finish for g in found.values()}
    assert finish == {STOP, BUDGET}
    for g in found.values():
        assert (g.stop_id in (7, 8)) == (g.finish == STOP)
        assert g.length == len(g.margins) <= BUDGET_TOKENS
        assert not set(g.tokens) & {7, 8}
        if g.finish == BUDGET:
            assert g.length == BUDGET_TOKENS


def test_a_broken_state_ends_its_row_alone():
    m = tiny("qwen3_5")
    fp16 = parse_policy("conventional:fp16")
    with torch.no_grad():  # a state beyond 65,504 becomes infinite when it is stored
        m.recurrent_modules[0].in_proj_qkv.weight[-96:] *= 1e7
    found = generate(m, arms=[Arm(policy=FP32, seed=1), Arm(policy=fp16, seed=1)], stop_ids=[])
    alone = generate(m, arms=[Arm(policy=FP32, seed=1)], stop_ids=[])
    for q in range(5):
        assert found[Job(0, q, 0)] == alone[Job(0, q, 0)]
        assert found[Job(0, q, 0)].finish == BUDGET
        broken = found[Job(1, q, 0)]
        assert broken.finish == BROKEN and broken.diverged_at >= 0
        assert broken.length < BUDGET_TOKENS


def test_divergence_counts_the_end():
    def g(tokens, stop=None, margins=None):
        return Generation(
            job=Job(0, 0, 0), tokens=tokens, stop_id=stop, margins=margins or [0.5] * 9
        )

    assert first_divergence(g([1, 2], 9), g([1, 2], 9)) is None
    assert first_divergence(g([1, 2], 9, [0.1, 0.2, 0.3]), g([1, 2, 3])) == (2, 0.3)
    assert first_divergence(g([1, 2, 3], None, [0.1, 0.2, 0.3]), g([1, 5])) == (1, 0.2)
    step, margin = first_divergence(g([1], None, [0.1]), g([1, 2]))
    assert step == 1 and math.isnan(margin)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"budget": 0}, "budget must be positive"),
        ({"busy": 9}, "busy ≤ rows"),
        ({"arms": []}, "needs arms"),
        ({"questions": [questions()[0]] * 2}, "same id"),
        ({"questions": [Question(id=0, tokens=torch.empty(0).long())]}, "at least one token"),
    ],
)
def test_refuses_what_it_cannot_run(change, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny("qwen3_5"), **change)
