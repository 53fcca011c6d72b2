"""Accuracy studies: rows, tables, resuming, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from quantlab.data.benchmarks.benchmark import Item
from quantlab.data.tasks import END_ID, TASKS
from quantlab.data.tokenize import ByteTokenizer
from quantlab.engine.generation import Generation, Job, first_divergence
from quantlab.errors import RunError, UsageError
from quantlab.metrics.accuracy_table import bins_table, summary_table
from quantlab.replay.policy import parse_policy
from quantlab.report.accuracy import bins_tables, summary_tables, write_report
from quantlab.study.accuracy import load_eval, run_eval
from quantlab.study.accuracy_cut import cut_eval
from quantlab.study.accuracy_rows import (
    OUTPUTS,
    PART,
    SCHEMA,
    finish_rows,
    first_difference,
    part_table,
)
from quantlab.study.accuracy_spec import Asked, EvalSpec, ask, describe
from quantlab.study.accuracy_text import Texts
from quantlab.study.run import Interrupted
from tests.models.tiny import tiny

NVFP4 = parse_policy("shared:nvfp4-sr")


def make_spec(**changes):
    values = {
        "model": "tiny-gdn", "policies": (NVFP4,), "tasks": ("chain", "recall"), "limit": 2,
        "repetitions": 2, "budget": 70, "rows": 8, "top_p": 0.98,
    }  # fmt: skip
    return EvalSpec(**{**values, **changes})


@pytest.fixture(scope="module")
def model():
    return tiny("qwen3_5", vocab_size=264)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A run that nothing interrupts."""
    return run_eval(make_spec(), tmp_path_factory.mktemp("run") / "whole", model=model)


def ids(text):
    return ByteTokenizer().encode(text).tolist()


def scripted(spec, write, asked=None):
    """Parts as a run would leave them; `write(arm, asked, repetition)` gives (text, finish)."""
    asked = ask(spec) if asked is None else asked
    rows = []
    for arm, _ in enumerate(spec.arms):
        for q, question in enumerate(asked):
            for r in range(spec.repetitions):
                text, finish = write(spec.arms[arm][0], question, r)
                tokens = ids(text)
                rows.append(
                    {
                        "arm": arm, "asked": q, "repetition": r, "tokens": tokens,
                        "margins": [0.5] * (len(tokens) + 1), "finish": finish,
                        "stop_id": END_ID if finish == "stop" else None, "diverged_at": -1,
                    }
                )  # fmt: skip
    return [pa.Table.from_pylist(rows, schema=PART)]


def finished(spec, write):
    def decode(tokens):
        return ByteTokenizer().decode(np.asarray(tokens, np.int64))

    rows, outputs = finish_rows(
        scripted(spec, write), spec, ask(spec), decode=decode, thinking=None, grader=lambda p: []
    )
    assert outputs.schema.names == OUTPUTS.names and outputs.num_rows == rows.num_rows
    return rows


def test_rows_are_graded_and_compared():
    spec = make_spec(limit=6, budget=400)

    def write(arm, question, repetition):
        right = question.source.solution
        if arm == str(NVFP4) and question.question % 2:
            return right[:-1].replace("answer ", "answer 1") + "\n", "stop"
        if arm == str(NVFP4) and question.question == 0 and repetition == 1:
            return right, "budget"  # lucky, but cut
        return right, "stop"

    rows = finished(spec, write)
    assert rows.schema.names == SCHEMA.names and rows.num_rows == 4 * 12 * 2
    table = {(r["task"], r["arm"]): r for r in summary_table(rows).to_pylist()}
    assert {t for t, _ in table} == {"chain", "recall", "all"}
    fp32, repeat, policy = (table["all", a] for a in ("reference", "repeat", str(NVFP4)))
    assert fp32["accuracy"] == repeat["accuracy"] == 1 and repeat["identical"] == 1
    asked = ask(spec)
    odd = [a for a in asked if a.question % 2]
    cut = [a for a in asked if a.question == 0]
    want = 1 - (len(odd) + len(cut) / 2) / len(asked)
    assert policy["accuracy"] == pytest.approx(want)
    assert policy["change"] == pytest.approx(want - 1) and policy["gained"] == 0
    assert policy["lost"] == 2 * len(odd) + len(cut)
    assert policy["as_graded"] == pytest.approx(1 - len(odd) / len(asked))
    assert policy["truncated"] == pytest.approx(len(cut) / len(rows) * 4)
    assert f"id {END_ID} × " in policy["ends"] and f"budget × {len(cut)}" in policy["ends"]
    left = [r for r in rows.to_pylist() if r["arm"] == str(NVFP4) and r["question"] % 2]
    for r in left:
        right = next(a for a in asked if (a.task, a.question) == (r["task"], r["question"]))
        # the output leaves FP32's where the answer begins, unless the answer starts with a 1
        start = right.source.solution.rindex("answer ") + len("answer ")
        assert r["left_at"] >= start and r["left_margin"] == 0.5


def test_outputs_lie_beside_their_counterparts(whole):
    table = whole.outputs().to_pylist()
    arms = [arm for arm, _, _ in whole.spec.arms]
    assert [r["arm"] for r in table] == arms * (len(table) // len(arms))
    rows = {
        (r["arm"], r["task"], r["question"], r["repetition"]): r for r in whole.rows.to_pylist()
    }
    for first in range(0, len(table), len(arms)):
        beside = table[first : first + len(arms)]
        assert len({(r["task"], r["question"], r["repetition"]) for r in beside}) == 1
        for r in beside:
            row = rows[r["arm"], r["task"], r["question"], r["repetition"]]
            assert len(r["tokens"]) + (row["stop_id"] is not None) == row["length"]
            # margins of the reference alone: others are measured against them
            assert len(r["margins"]) == (row["length"] if r["arm"] == "reference" else 0)
            if row["left_margin"] is not None:
                own = beside[arms.index("reference")]
                assert own["margins"][row["left_at"]] == row["left_margin"]


def test_parts_hold_generations_as_they_are():
    made = [
        Generation(job=Job(1, 4, 2), tokens=[5, 6], margins=[0.5, 1.5, 2.5], finish="stop",
                   stop_id=7),
        Generation(job=Job(0, 3, 1), tokens=[], margins=[], finish="diverged", diverged_at=0),
        Generation(job=Job(2, 4, 2), tokens=[9], margins=[0.25], finish="budget"),
    ]  # fmt: skip
    table = part_table(made, margins_of=1)
    assert table.schema == PART
    assert [tuple(r.values()) for r in table.to_pylist()] == [
        (1, 4, 2, [5, 6], [0.5, 1.5, 2.5], "stop", 7, -1),
        (0, 3, 1, [], [], "diverged", None, 0),
        (2, 4, 2, [9], [], "budget", None, -1),
    ]


def test_where_outputs_part():
    """The rule of `first_divergence`, on arrays."""
    cases = [([1, 2, 9], [1, 2, 9]), ([1, 2, 9], [1, 2, 3]), ([1, 2], [1, 5, 6]), ([1], [1, 2])]
    for a, b in cases:
        one, two = (Generation(job=Job(0, 0, 0), tokens=x, margins=[0.5] * 9) for x in (a, b))
        want = first_divergence(one, two)
        got = first_difference(np.array(a, np.int32), np.array(b, np.int32))
        assert got == (None if want is None else want[0])


def test_bins_come_from_the_first_fp32_run():
    spec = make_spec(tasks=("chain",), limit=8, repetitions=1, budget=700)
    asked = ask(spec)
    order = sorted(asked, key=lambda a: len(a.source.solution))
    long = {a.question for a in order[4:]}

    def write(arm, question, repetition):
        right = question.source.solution
        if arm == str(NVFP4) and question.question in long:
            return "answer x\n", "stop"  # short and wrong: its own length must not matter
        return right, "stop"

    table = bins_table(finished(spec, write), count=2).to_pylist()
    got = {(r["bin"], r["arm"]): r["accuracy"] for r in table}
    assert got[0, str(NVFP4)] == 1 and got[1, str(NVFP4)] == 0
    assert got[0, "reference"] == got[1, "reference"] == 1
    lengths = sorted(len(a.source.solution) + 1 for a in asked)
    assert table[0]["length_high"] == lengths[3] and table[-1]["length_low"] == lengths[4]
    logs = bins_table(finished(spec, write), log=True).to_pylist()
    assert sum(r["draws"] for r in logs if r["arm"] == "reference") == 8


def test_arms_without_the_same_draws_are_not_compared():
    spec = make_spec(limit=2)
    rows = finished(spec, lambda arm, q, r: ("answer 1\n", "stop"))
    with pytest.raises(ValueError, match="same questions"):
        summary_table(rows.slice(0, rows.num_rows - 1))


def test_mathematics_goes_to_the_grader():
    spec = make_spec(tasks=("gsm8k",), repetitions=1)
    asked = [Asked(id=0, task="gsm8k", question=0, source=Item(id=0, prompt="p", gold="7"))]
    rows = [
        {"arm": a, "asked": 0, "repetition": 0, "tokens": ids(t), "margins": [0.5] * 20,
         "finish": "stop", "stop_id": 1, "diverged_at": -1}
        for a, t in enumerate((r"\boxed{7.0}", r"\boxed{8}", "7", r"\boxed{7"))
    ]  # fmt: skip
    seen = []

    def grader(pairs):
        seen.extend(pairs)
        return ["right", "timeout"]

    found, _ = finish_rows(
        [pa.Table.from_pylist(rows, schema=PART)], spec, asked,
        decode=lambda t: ByteTokenizer().decode(np.asarray(t)), thinking=None, grader=grader,
    )  # fmt: skip
    assert seen == [("7", "7.0"), ("7", "8")]
    assert found["verdict"].to_pylist() == ["right", "timeout", "none", "none"]
    assert found["correct"].to_pylist() == [True, False, False, False]


class Killer:
    """A progress that plays Ctrl-C once so many 32nds of the tokens are done."""

    def __init__(self, at):
        self.at = at

    def start(self, total, done):
        self.total = total

    def advance(self, done):
        assert done <= self.total
        if 32 * done >= self.at * self.total:
            raise KeyboardInterrupt

    def note(self, text):
        pass


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["saved", "not saved"])
def test_a_killed_run_ends_with_the_same_rows(tmp_path, model, whole, seconds):
    spec = make_spec()
    assert whole.rows.num_rows == 4 * 4 * 2
    out = tmp_path / "cut"
    for at in (5, 20):
        with pytest.raises(Interrupted, match="--resume"):
            run_eval(
                spec, out, resume=True, model=model, progress=Killer(at), checkpoint_seconds=seconds
            )
    again = run_eval(spec, out, resume=True, model=model, checkpoint_seconds=seconds)
    for file in ("rows.parquet", "outputs.parquet"):
        assert (out / file).read_bytes() == (whole.path / file).read_bytes()
    parts = again.run["sessions"][-1]["seconds_by_part"]
    assert set(parts) == {"prompts", "starts", "steps", "reads", "caller"} and parts["steps"] > 0
    assert again.run["state"] == "finished" and len(again.run["sessions"]) == 3
    assert not (out / "parts").exists()
    # the same spec again computes nothing, another is refused
    assert run_eval(spec, out, resume=True, model=None).rows.equals(again.rows)
    with pytest.raises(UsageError, match="seed: 0 there, 1 now"):
        run_eval(make_spec(seed=1), out, resume=True, model=model)


def test_whole_questions_of_an_unfinished_run(tmp_path, model, whole):
    spec = make_spec()
    out, cut = tmp_path / "run", tmp_path / "cut"
    with pytest.raises(Interrupted):
        run_eval(spec, out, model=model, progress=Killer(24), checkpoint_seconds=0)
    before = sorted((p.name, p.read_bytes()) for p in (out / "parts").iterdir())
    result = cut_eval(out, cut)
    # of four questions, each with 4 arms and 2 repetitions, the first with the longest prompts
    number = result.record["cut"]["questions"]
    assert result.record["cut"]["of"] == 4 and 1 <= number <= 3
    asked = ask(spec)
    order = sorted(range(4), key=lambda q: -len(asked[q].source.prompt))
    want = {(asked[q].task, asked[q].question) for q in order[:number]}
    rows = result.rows.to_pylist()
    assert {(r["task"], r["question"]) for r in rows} == want and len(rows) == 8 * number
    assert all(row in whole.rows.to_pylist() for row in rows)
    # the run itself can be gone on with
    assert sorted((p.name, p.read_bytes()) for p in (out / "parts").iterdir()) == before
    assert run_eval(spec, out, resume=True, model=model).rows.equals(whole.rows)
    with pytest.raises(UsageError, match="nothing to cut"):
        cut_eval(out, tmp_path / "again")


def test_a_question_is_answered_alike_whichever_others_are_asked(tmp_path, model, whole):
    both = whole.rows.to_pylist()
    spec = make_spec(tasks=("recall",), limit=1, repetitions=1)
    one = run_eval(spec, tmp_path / "b", model=model).rows
    assert one.num_rows == 4
    for row in one.to_pylist():
        assert row in both


def test_tables_and_figures(whole):
    result = whole
    (_, table), *_ = summary_tables(result.summary())
    assert [row[0] for row in table.rows] == ["FP32", "FP32 repeated", "shared nvfp4-sr"]
    assert [name for name, _ in bins_tables(result.bins())] == ["chain", "recall", "all"]
    files = write_report(result)
    assert [f.name for f in files] == [
        *(f"bins-{t}.{s}" for t in ("chain", "recall", "all") for s in ("png", "svg")),
        "index.html",
    ]
    page = (result.path / "index.html").read_text()
    assert page.count("<svg") == 3 and "shared nvfp4-sr" in page and "http-equiv" not in page
    assert "temperature 1, top-p 0.98" in page and 'href="outputs.parquet"' in page
    assert "FP32 repeated" in page and "src=" not in page and "<script" not in page
    svg = (result.path / "bins-all.svg").read_text()
    assert "shared nvfp4-sr" in svg and "FP32 output length" in svg
    record = json.loads((result.path / "spec.json").read_text())
    assert record["stop_ids"] == [END_ID] and record["data"]["chain"]["questions"] == 2
    assert load_eval(result.path).spec == make_spec()


def test_a_pilot_finds_the_lengths_of_fp32(model, monkeypatch):
    from quantlab.study import accuracy_plan

    class Run:
        def __init__(self, lengths, finish="stop"):
            self.made = [
                Generation(job=Job(0, i, 0), tokens=[5] * n, finish=finish)
                for i, n in enumerate(lengths)
            ]

        def run(self):
            return iter(self.made)

    seen = []

    def play(run):
        def made(spec, m, text, *, arms):
            seen.append((spec, arms, len(text.ids)))
            return run

        monkeypatch.setattr(accuracy_plan, "generation_run", made)
        return accuracy_plan.find_budget(make_spec(limit=100, budget=1000), model=model)

    assert play(Run([*range(100), 200])) == 128  # the 99th of a hundred is 99, then multiples of 64
    assert play(Run([10, 950, 999])) == 1000  # never more than the spec's
    spec, arms, questions = seen[0]
    # the reference, with noise that no arm of the study has
    (name, policy, seed) = spec.arms[arms[0]]
    assert len(arms) == 1 and name == "reference" and policy.short == "conventional fp32"
    assert seed not in {s for _, _, s in make_spec().arms}
    assert questions == 2 * accuracy_plan.PILOT_QUESTIONS
    with pytest.raises(UsageError, match="give a number"):
        play(Run([9] * 5, finish="budget"))


def test_rulers_contexts_are_fitted_to_the_models_tokens(model, tmp_path):
    spec = make_spec(
        tasks=("ruler-variables", "ruler-single-1"), limit=1, repetitions=1, budget=4,
        context=700, temperature=0.0, top_p=1.0,
    )  # fmt: skip
    text = Texts(model, ask(spec), spec.room)
    lengths = [len(prompt) for prompt in text.prompts]
    # a byte a token, and a unit of noise has a hundred
    assert all(696 - 110 < n <= 696 for n in lengths)
    rows = run_eval(spec, tmp_path / "r", model=model).rows
    assert rows["share"].to_pylist() == [0.0] * 8 and set(rows["verdict"].to_pylist()) == {"none"}
    said = text.asked[0].source.references
    asked = [replace(text.asked[0], id=0)]

    def write(arm, question, repetition):
        return " ".join(said[:2] if arm == "repeat" else said), "stop"

    spec = replace(spec, tasks=("ruler-variables",))
    rows, _ = finish_rows(
        scripted(spec, write, asked), spec, asked, thinking=None, grader=lambda p: [],
        decode=lambda t: ByteTokenizer().decode(np.asarray(t, np.int64)),
    )  # fmt: skip
    table = {r["arm"]: r for r in summary_table(rows).to_pylist()}
    assert table["repeat"]["share"] == pytest.approx(0.4) and table["repeat"]["accuracy"] == 0
    assert table["reference"]["share"] == table["reference"]["accuracy"] == 1


def test_problems_that_do_not_fit_are_not_asked():
    spec = make_spec(tasks=("addition",), limit=10, budget=100)
    for a in ask(spec):
        assert len(a.source.solution) + 1 <= 100
        assert a.source == TASKS["addition"].problem(0, a.question)
    assert describe(ask(spec))["addition"]["questions"] == 10
    with pytest.raises(UsageError, match="fewer than --limit"):
        ask(make_spec(tasks=("addition",), limit=10, budget=10))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"limit": 0}, "--limit must be positive"),
        ({"limit": None}, "say how many"),
        ({"tasks": ("chains",)}, "Did you mean 'chain'"),
        ({"tasks": ()}, "at least one"),
        ({"policies": (NVFP4, NVFP4)}, "once each"),
        ({"policies": (parse_policy("conventional:fp32"),)}, "rides along"),
        ({"margin": 1.0}, "--margin"),
        ({"seed": 2**64 - 1}, "--seed"),
    ],
)
def test_specs_that_cannot_be(change, message):
    with pytest.raises(UsageError, match=message):
        make_spec(**change)


def test_spec_survives_json():
    spec = make_spec(policies=(NVFP4, parse_policy("nvfp4 / fp16-sr L=4")))
    assert EvalSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    with pytest.raises(RunError, match="not the spec"):
        EvalSpec.from_json({"policies": []})


def test_a_run_says_no_path_of_the_machine(tmp_path):
    from quantlab.models import zoo

    packaged = EvalSpec(model=str(zoo.SHIPPED["tiny-gdn"].path), policies=())
    assert packaged.to_json()["model"] == "tiny-gdn"
    other = EvalSpec(model=str(tmp_path), policies=())
    assert other.to_json()["model"] == tmp_path.name
    assert EvalSpec(model="Qwen/Qwen3.5-4B", policies=()).to_json()["model"] == "Qwen/Qwen3.5-4B"


def test_directories_of_other_runs(tmp_path):
    with pytest.raises(UsageError, match="no run"):
        load_eval(tmp_path)
    Path(tmp_path / "spec.json").write_text('{"study": "kl"}')
    with pytest.raises(UsageError, match="not of eval"):
        load_eval(tmp_path)
