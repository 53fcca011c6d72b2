"""Public reports on long-generation evaluation, by id: each test is the right behaviour."""

import math

import numpy as np
import pytest
import torch

from quantlab.data.benchmarks.extraction import Thinking, final_text, last_box
from quantlab.engine.generation import BUDGET, Arm, GenerationRun, Question
from quantlab.engine.sampling import Sampling
from quantlab.errors import RunError
from quantlab.metrics.accuracy import accuracy, clustered
from quantlab.metrics.accuracy_table import summary_table
from quantlab.metrics.paired import change
from quantlab.replay import parse_policy
from quantlab.study.accuracy import run_eval
from quantlab.study.accuracy_spec import ask
from tests.models.tiny import tiny
from tests.study.test_accuracy import NVFP4, finished, make_spec


def test_E01_truncated_answers_are_a_class_of_their_own():
    """Ten items: four truncated, one of them luckily right, six finished and right."""
    truncated = [True] * 4 + [False] * 6
    graded = [True] + [False] * 3 + [True] * 6
    found = accuracy(graded, truncated, range(10))
    assert found.strict.mean == pytest.approx(0.60)
    assert found.finished_only.mean == 1.00
    assert found.truncated.mean == pytest.approx(0.40)
    assert found.as_graded.mean == pytest.approx(0.70)


@pytest.mark.parametrize("opened", [False, True])
def test_E02_unfinished_reasoning_has_no_answer(opened):
    """Cut at the limit before the closing tag: 42 on the way is not the answer 42."""
    thinking = Thinking(open="<think>", close="</think>", opened=opened)
    output = "so \\boxed{42} maybe" if opened else "<think> so \\boxed{42} maybe"
    assert final_text(output, thinking) is None
    finished = final_text(output + "</think> it is \\boxed{42}", thinking)
    assert finished is not None and last_box(finished) == "42"


def test_E03_stops_are_ids_and_reported():
    """No string stops an output: 'identify the Question' is text; which stop fired is counted."""

    def write(arm, question, repetition):
        if repetition:
            return "identify the Question", "budget"
        return f"identify the Question\nanswer {question.source.answer}\n", "stop"

    spec = make_spec(tasks=("chain",), limit=2)
    found = {r["arm"]: r for r in summary_table(finished(spec, write)).to_pylist()}
    assert found["reference"]["ends"] == "id 7 × 2, budget × 2"
    assert found["reference"]["accuracy"] == 0.5
    # and the engine: ids that spell a common stop string end nothing unless they are stop ids
    m = tiny("nemotron_h")
    arguments = {
        "arms": [Arm(policy=parse_policy("conventional:fp32"), seed=0)],
        "questions": [Question(id=0, tokens=torch.tensor([1, 2, 3]))],
        "sampling": Sampling(temperature=0), "budget": 12, "seed": 0, "rows": 1,
    }  # fmt: skip
    (free,) = GenerationRun(m, stop_ids=[], **arguments).run()
    assert free.finish == BUDGET and len(free.tokens) == 12
    stop = free.tokens[5]
    (cut,) = GenerationRun(m, stop_ids=[stop], **arguments).run()
    assert cut.stop_id == stop and cut.tokens == free.tokens[: free.tokens.index(stop)]


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"\boxed{2} wait \boxed{3}", "3"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{840} and again \boxed{840}", "840"),
        (r"\boxed{12", None),
        (r"\boxed{7} then \boxed{12", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \} b}", r"a \} b"),
        ("no box", None),
    ],
)
def test_E04_last_complete_balanced_box(text, answer):
    assert last_box(text) == answer


def test_E06_a_repeated_baseline_stands_beside_every_policy():
    """FP32 twice: its flips, its share of identical outputs, and the margin where it parts."""
    spec = make_spec(tasks=("chain",), limit=2, budget=400)
    first = ask(spec)[0].question

    def write(arm, question, repetition):
        right = question.source.solution
        if arm == "repeat" and question.question == first and repetition == 0:
            return right[:5] + "?" + right[6:-1] + "9\n", "stop"
        return right, "stop"

    found = {r["arm"]: r for r in summary_table(finished(spec, write)).to_pylist()}
    repeat, policy = found["repeat"], found[str(NVFP4)]
    assert repeat["identical"] == 0.75 and repeat["flips"] == 0.25
    assert repeat["left_at_median"] == 5 and repeat["left_margin_median"] == 0.5
    assert policy["identical"] == 1 and policy["flips"] == 0


def test_E07_paired_test_and_an_honest_verdict():
    """b = 12, c = 5 of 512: p = 0.1435, 1.37 points, paired SE 0.80, inconclusive at a point."""
    n = 512
    reference = np.arange(n) < 437
    policy = (np.arange(n) >= 12) & (np.arange(n) < 442)
    found = change(reference, policy, np.arange(n), margin=0.01)
    assert (found.lost, found.gained) == (12, 5)
    assert round(found.p, 4) == 0.1435
    assert round(-100 * found.difference, 2) == 1.37
    assert round(100 * found.se, 2) == 0.80
    assert found.verdict == "inconclusive"
    assert found.low < 0 < found.high
    # the report's unpaired error of 2.2 points would have hidden even more
    unpaired = math.hypot(reference.std(), policy.std()) / math.sqrt(n)
    assert 2.2 < 100 * unpaired < 2.3


def test_E08_many_draws_of_few_questions():
    """30 questions × 16 draws: the error comes from 30 means, not from 480 draws."""
    generator = np.random.default_rng(8)
    questions = np.repeat(np.arange(30), 16)
    skill = np.repeat(generator.beta(0.5, 0.9, 30), 16)
    right = generator.random(480) < skill
    found = clustered(right, questions)
    means = right.reshape(30, 16).mean(1)
    assert found.se == pytest.approx(means.std(ddof=1) / math.sqrt(30), rel=1e-12)
    assert (found.questions, found.draws) == (30, 480)
    assert found.se > 2 * right.std() / math.sqrt(480)


def test_E12_a_wrong_state_stops_the_study_before_any_answer(tmp_path, monkeypatch):
    """One head's state transposed in one layer: the state check alarms, and nothing is graded."""
    from transformers.cache_utils import LinearAttentionLayer

    # square states, so that the fault has the right shape
    m = tiny("qwen3_5", vocab_size=264, linear_value_head_dim=16)
    own = LinearAttentionLayer.update_recurrent_state
    first: list[int] = []

    def transposed(self, recurrent_states, *args, **kwargs):
        first[:] = first or [id(self)]
        if first[0] == id(self):
            recurrent_states = recurrent_states.clone()
            recurrent_states[:, 0] = recurrent_states[:, 0].mT.clone()
        return own(self, recurrent_states, *args, **kwargs)

    monkeypatch.setattr(LinearAttentionLayer, "update_recurrent_state", transposed)
    with pytest.raises(RunError, match="fails its self-test"):
        run_eval(make_spec(), tmp_path / "run", model=m)
    assert not (tmp_path / "run").exists()
