"""Embedded tasks: deterministic, right by an independent check, as long as they say."""

import hashlib
from itertools import pairwise

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
from quantlab.data.tasks.corpus import WIDTHS, shelf, steps_between
from quantlab.data.tasks.labels import labels
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
        for sign, operand in (w[2:] for w in words[5:-1]):
            value = eval(f"(value {sign} {operand}) % 97")
        return f"{value:02d}"
    if problem.task == "permutation":
        row = list(words[1])
        for i, j in (w[2:] for w in words[2:-1]):
            i, j = int(i) - 1, int(j) - 1
            row[i], row[j] = row[j], row[i]
        return "".join(row)
    if problem.task == "addition":
        items = words[1:-1]
        one, two = (int("".join(w[place] for w in reversed(items))) for place in (2, 3))
        digits = str(one + two).zfill(len(items) + 1)[::-1]
        marks = [w[:2].upper() for w in words[1:]]
        pairs = [m + d for m, d in zip(marks, digits, strict=True)]
        return "".join(pairs[:-1]) + marks[-1] + "." + digits[-1]
    values = {w[0]: int(w[1:]) for w in words[3:11]}
    total = sum(values[w[2]] for w in words[11:-1]) % 100
    return f"{total:02d} {values[words[-1][3]]}"


@pytest.mark.parametrize("name", TASKS)
def test_answers_follow_from_the_prompt(name):
    for problem in problems(name):
        assert solve(problem) == problem.answer
        assert extract(problem.solution) == problem.answer and grade(problem.solution, problem)
        # the steps, the end of the list, the answer
        assert problem.solution.count("\n") == problem.steps + 2
        assert first_wrong_step(problem.solution, problem) is None
        assert problem.text.isascii() and problem.text.count(END) == 1


@pytest.mark.parametrize("name", TASKS)
def test_lengths_run_from_fifty_to_thousands(name):
    lengths = np.array([len(p.solution) for p in problems(name, 1000)])
    prompts = np.array([len(p.prompt) for p in problems(name, 1000)])
    assert 50 <= lengths.min() <= 80
    assert 3000 <= lengths.max() <= 4000
    assert 300 < np.median(lengths) < 600
    # even in log: about as many below the geometric middle as above
    middle = np.exp((np.log(lengths.min()) + np.log(lengths.max())) / 2)
    assert 0.4 < (lengths < middle).mean() < 0.6
    assert prompts.max() <= 1750 and np.median(prompts) < 250
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
    assert digest.hexdigest()[:16] == "affada37170b28d9"


def test_answers_are_not_guessable():
    """The commonest answer of each task is rare."""
    for name in TASKS:
        answers = [p.answer for p in problems(name)]
        assert max(answers.count(a) for a in set(answers)) < 0.05 * len(answers)


def test_recall_needs_a_value_that_no_step_uses():
    for problem in problems("recall"):
        words = problem.prompt.rstrip(":\n").split()
        asked = words[-1][3]
        assert asked not in {w[2] for w in words[11:-1]} and asked in {w[0] for w in words[3:11]}


def test_every_item_of_a_list_has_a_label_of_its_own():
    """What a step asks for is told by its label alone; so is where the list ends."""
    for name in TASKS:
        for problem in problems(name, 100):
            items = problem.prompt.rstrip(":\n").split()[-problem.steps - 1 :]
            marks = [item[:2] for item in items]
            assert len(set(marks)) == problem.steps + 1
            assert [line[:2] for line in problem.solution.split("\n")[:-2]] == marks
            assert [item[2] == "." for item in items] == [False] * problem.steps + [True]


def test_labels_follow_one_another_around_the_alphabet():
    generator = np.random.Generator(np.random.Philox(key=1))
    drawn = [labels(generator, 30) for _ in range(400)]
    assert all(len(set(marks)) == 30 for marks in drawn)
    assert len({marks[0] for marks in drawn}) > 250
    wrapped = next(marks for marks in drawn if "zz" in marks[:-1])
    assert wrapped[wrapped.index("zz") + 1] == "aa"
    assert labels(generator, 676)
    with pytest.raises(ValueError, match="676"):
        labels(generator, 677)


@pytest.mark.parametrize("name", TASKS)
def test_a_text_is_as_long_as_its_steps_say(name):
    task = TASKS[name]
    for problem in problems(name, 100):
        assert len(problem.text) == task.text_length(problem.steps)
    assert task.problem(3, 4, steps=7).steps == 7
    assert task.text_length(task.most) <= WIDTHS[-1] - 1


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
    lines[1] = "aa0+0+0=0AA0"
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


def test_a_shelf_holds_problems_of_its_width():
    small, wide = shelf(5, 512, 40), shelf(5, 5120, 8)
    for width, below, made in ((512, 384, small), (5120, 4096, wide)):
        assert made.text.shape[1] == width and (made.ends > below).all()
        assert (made.ends <= width).all()
        assert (np.bincount(made.tasks) == len(made.text) // 4).all()
        for text, begin, end in zip(made.text, made.begins, made.ends, strict=True):
            whole = bytes(text[:end]).decode()
            assert whole[begin - 2 : begin] == ":\n" and whole.index(":\n") == begin - 2
            assert whole.endswith(END) and whole.count(END) == 1 and not text[end:].any()
    assert np.array_equal(small.text, shelf(5, 512, 40).text)
    assert not np.array_equal(small.text, shelf(6, 512, 40).text)
    with pytest.raises(ValueError, match="evaluation"):
        shelf(0, 512, 4)


@pytest.mark.parametrize("name", TASKS)
def test_widths_take_every_number_of_steps_once(name):
    task = TASKS[name]
    edges = [0, *WIDTHS]
    found = [n for a, b in pairwise(edges) for n in steps_between(task, a + 1, b)]
    assert found == list(range(task.fewest, task.most + 1))
    assert all(122_880 % width == 0 for width in WIDTHS)


def test_evaluation_problems_are_on_no_shelf():
    made = [shelf(seed, width, 400) for seed in (1, 2) for width in (128, 512)]
    train = {bytes(t[:e]).decode() for s in made for t, e in zip(s.text, s.ends, strict=True)}
    assert len(train) == 1600
    assert not train & {p.text for name in TASKS for p in problems(name)}
