"""Embedded tasks: deterministic, right by an independent check, as long as they say."""

import hashlib
import re

import numpy as np
import pytest

from quantlab.data.tasks import (
    END,
    END_ID,
    EVALUATION_SEED,
    TASKS,
    extract,
    first_wrong_step,
    grade,
    task_named,
)
from quantlab.data.tasks.corpus import book
from quantlab.data.tokenize import ByteTokenizer
from quantlab.errors import UsageError
from quantlab.metrics.collapse import collapse


def problems(name, count=300, seed=EVALUATION_SEED):
    return [TASKS[name].problem(seed, i) for i in range(count)]


def solve(problem):
    """Answer from the prompt alone, written without the generator."""
    words = problem.prompt.rstrip(":\n").split()
    if problem.task == "chain":
        value = int(words[4])
        for sign, operand in re.findall(r"([-+*])(\d)", words[5]):
            value = eval(f"(value {sign} {operand}) % 97")
        return str(value)
    if problem.task == "permutation":
        row = list(words[1])
        for i, j in words[2:]:
            i, j = int(i) - 1, int(j) - 1
            row[i], row[j] = row[j], row[i]
        return "".join(row)
    if problem.task == "addition":
        one, two = (int(w[::-1]) for w in words[1:])
        digits = max(len(w) for w in words[1:])
        return str(one + two).zfill(digits)[::-1]
    values = {w[0]: int(w[1:]) for w in words[3:11]}
    total = sum(values[name] for name in words[12]) % 100
    return f"{total} {values[words[14]]}"


@pytest.mark.parametrize("name", TASKS)
def test_answers_follow_from_the_prompt(name):
    for problem in problems(name):
        assert solve(problem) == problem.answer
        assert extract(problem.solution) == problem.answer and grade(problem.solution, problem)
        assert problem.solution.count("\n") == problem.steps + 1
        assert first_wrong_step(problem.solution, problem) is None
        assert problem.text.isascii() and problem.text.count(END) == 1


@pytest.mark.parametrize("name", TASKS)
def test_lengths_run_from_fifty_to_thousands(name):
    lengths = np.array([len(p.solution) for p in problems(name, 1000)])
    prompts = np.array([len(p.prompt) for p in problems(name, 1000)])
    assert 40 <= lengths.min() <= 80
    assert 2000 <= lengths.max() <= 4500
    assert 200 < np.median(lengths) < 800
    # even in log: about as many below the geometric middle as above
    middle = np.exp((np.log(lengths.min()) + np.log(lengths.max())) / 2)
    assert 0.4 < (lengths < middle).mean() < 0.6
    assert prompts.max() <= 1300 and np.median(prompts) < 250
    assert np.corrcoef(prompts, lengths)[0, 1] > 0.9


def test_problems_are_keyed_by_task_seed_and_index_alone():
    for name in TASKS:
        texts = [p.text for p in problems(name)]
        assert len(set(texts)) == len(texts)
        assert TASKS[name].problem(0, 250) == problems(name)[250]
        other = [p.text for p in problems(name, seed=1)]
        assert not set(texts) & set(other)
    digest = hashlib.sha256("".join(p.text for n in TASKS for p in problems(n, 20)).encode())
    # what a committed result was measured on must not move
    assert digest.hexdigest()[:16] == "50962a24fe9e2f0c"


def test_answers_are_not_guessable():
    """The commonest answer of each task is rare."""
    for name in TASKS:
        answers = [p.answer for p in problems(name)]
        assert max(answers.count(a) for a in set(answers)) < 0.05 * len(answers)


def test_recall_needs_a_value_that_no_step_uses():
    for problem in problems("recall"):
        words = problem.prompt.rstrip(":\n").split()
        assert words[14] not in words[12]


@pytest.mark.parametrize(
    "text, answer",
    [
        ("1+1=2\nanswer 2\n", "2"),
        ("answer 2\nno\nanswer 3\n", "3"),
        ("answer 12", None),  # cut: the right value may be 120
        ("answer 1\nanswer 12", "1"),
        ("the answer 5\n", None),
        ("", None),
    ],
)
def test_extraction(text, answer):
    assert extract(text) == answer


def test_grading_is_exact():
    problem = TASKS["addition"].problem(0, 3)
    assert not grade(problem.solution.replace("answer ", "answer 0"), problem)
    assert not grade(problem.solution[:-1], problem)
    lines = problem.solution.split("\n")
    lines[1] = "0+0+0=0"
    assert first_wrong_step("\n".join(lines), problem) == 1
    assert grade("\n".join(lines), problem)  # only the answer counts
    assert first_wrong_step("", problem) == 0
    assert first_wrong_step(problem.solution + "more", problem) is not None


def test_end_is_one_id_that_no_text_holds():
    ids = ByteTokenizer().encode(TASKS["chain"].problem(0, 0).text)
    assert (ids == END_ID).sum() == 1 and ids[-1] == END_ID


def test_no_solution_is_taken_for_a_loop():
    for name in TASKS:
        for problem in problems(name, 250):
            assert collapse(list(problem.solution.encode())) is None


def test_unknown_task():
    with pytest.raises(UsageError, match="Did you mean 'permutation'"):
        task_named("permutations")


def test_books_mix_the_tasks_evenly_and_repeat():
    text = book(5, 400_000).decode()
    assert text == book(5, 400_000).decode() != book(6, 400_000).decode()
    starts = {"chain": "chain", "swap": "permutation", "add": "addition", "sum": "recall"}
    shares = dict.fromkeys(TASKS, 0)
    for problem in text.split(END)[:-1]:
        shares[starts[problem.split(" ")[0]]] += len(problem)
    assert all(abs(share / len(text) - 0.25) < 0.03 for share in shares.values())
    with pytest.raises(ValueError, match="evaluation"):
        book(0, 10)


def test_evaluation_problems_are_in_no_book():
    train = set(book(1, 300_000).decode().split(END))
    evaluation = {p.text[:-1] for name in TASKS for p in problems(name)}
    assert not train & evaluation
