"""Benchmarks: manifests, questions made of their rows, and answers out of outputs."""

import pytest

from quantlab.data.benchmarks.benchmark import (
    BENCHMARKS,
    Item,
    load_benchmark,
    load_items,
    make_items,
    paper_sampling,
)
from quantlab.data.benchmarks.extraction import (
    Thinking,
    final_text,
    last_box,
    last_letter,
    thinking_of,
)
from quantlab.engine.sampling import Sampling
from quantlab.errors import MissingAsset, RunError, UsageError
from quantlab.models.presets import PRESETS

THINK = Thinking(open="<think>", close="</think>", opened=False)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_manifests_are_complete(name):
    b = load_benchmark(name)
    assert b.name == name and b.licence and b.budget >= 4096 and b.questions >= 30
    assert "{question}" in b.prompt and ("{options}" in b.prompt) == (b.kind == "choice")
    assert len(b.revision) == 40 or name == "gpqa-diamond"
    assert ("\\boxed{}" in b.prompt) == (b.kind == "math")


def test_the_papers_sampling_settings():
    assert Sampling(**paper_sampling("qwen3.5-4b")) == Sampling(
        temperature=1.0, top_p=0.95, top_k=20, presence_penalty=1.5
    )
    assert Sampling(**paper_sampling("nemotron-3-nano-4b")) == Sampling(top_p=0.95)
    assert paper_sampling("qwen3.5-122b-a10b")["temperature"] == 0.6
    assert paper_sampling("tiny-gdn") == {}
    known = {n for n in PRESETS if paper_sampling(n)}
    assert {"qwen3.5-4b", "nemotron-3-super-120b-a12b"} <= known


def shrunk(name, questions):
    from dataclasses import replace

    return replace(load_benchmark(name), questions=questions)


def test_mathematics():
    rows = [
        {
            "problem": "1+1?",
            "level": "Level 5",
            "solution": r"So \boxed{3}, no, \boxed{\frac{4}{2}}.",
        },
        {"problem": "easy", "level": "Level 1", "solution": r"\boxed{1}"},
        {"problem": "{x}?", "level": "Level 5", "solution": r"\boxed{7}"},
    ]
    items = make_items(shrunk("math-level-5", 2), rows)
    assert [i.gold for i in items] == [r"\frac{4}{2}", "7"] and [i.id for i in items] == [0, 1]
    assert items[1].prompt.startswith("{x}?\n") and items[1].prompt.endswith(r"in \boxed{}.")
    gsm = make_items(shrunk("gsm8k", 1), [{"question": "q", "answer": "2*600\n#### 1,200"}])
    assert gsm[0].gold == "1200"
    with pytest.raises(RunError, match="its manifest says 1,324"):
        make_items(load_benchmark("math-level-5"), rows)
    with pytest.raises(RunError, match="'problem'"):
        make_items(shrunk("math-level-5", 1), [{"level": "Level 5", "solution": r"\boxed{1}"}])


def test_choices():
    rows = [{"question": "which?", "options": ["x", "y", "z"], "answer": "C"}]
    (item,) = make_items(shrunk("mmlu-pro", 1), rows)
    assert (item.gold, item.options) == ("C", 3)
    assert "which?\n\nA. x\nB. y\nC. z\n\nThink" in item.prompt


def test_gold_options_are_shuffled_by_the_question_alone():
    rows = [
        {"Question": f"q{i}", "Correct Answer": "right"}
        | {f"Incorrect Answer {j}": f"w{j}" for j in (1, 2, 3)}
        for i in range(198)
    ]
    items = make_items(load_benchmark("gpqa-diamond"), rows)
    assert items == make_items(load_benchmark("gpqa-diamond"), rows)
    counts = [sum(i.gold == letter for i in items) for letter in "ABCD"]
    # 198 / 4 = 49.5 ± 4 standard deviations of 6.1
    assert all(25 < c < 75 for c in counts)
    for item in items:
        assert f"{item.gold}. right" in item.prompt


def test_unknown_and_missing(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="Did you mean 'gsm8k'"):
        load_benchmark("gsm-8k")
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "dataset_info", refuse)
    with pytest.raises(MissingAsset, match="openai/gsm8k at revision 740312add88f7") as found:
        load_items(load_benchmark("gsm8k"))
    assert found.value.exit_code == 5 and "hf download openai/gsm8k" in str(found.value)


def test_questions_load_through_datasets(monkeypatch, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from quantlab.data.benchmarks import benchmark

    path = tmp_path / "test.parquet"
    pq.write_table(pa.table({"question": ["a", "b"], "answer": ["x\n#### 1", "#### 2"]}), path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(benchmark, "download", lambda *a, **k: path)
    items = load_items(shrunk("gsm8k", 2))
    assert [i.gold for i in items] == ["1", "2"] and items[0].prompt.startswith("a\n")


@pytest.mark.parametrize(
    "output, thinking, text",
    [
        ("<think> a </think> b", THINK, " b"),
        ("<think>a</think><think>b</think>c", THINK, "c"),
        ("<think> so 42 maybe", THINK, None),
        ("no thinking at all", THINK, "no thinking at all"),
        ("a </think> b <think> c", THINK, " b <think> c"),
        ("so 42 maybe", Thinking(open="<think>", close="</think>", opened=True), None),
        ("so </think>42", Thinking(open="<think>", close="</think>", opened=True), "42"),
        ("<think> x", None, "<think> x"),
    ],
)
def test_reasoning_is_told_from_the_answer(output, thinking, text):
    assert final_text(output, thinking) == text


def test_marks_come_from_the_chat_template():
    template = "{{ '<think>' }} … </think>"
    assert thinking_of(template, "user: hi\nassistant: <think>\n").opened
    assert not thinking_of(template, "assistant: <think>\n\n</think>\n\n").opened
    assert not thinking_of(template, "assistant:").opened
    assert thinking_of("plain", "assistant:") is None and thinking_of(None, "x") is None


@pytest.mark.parametrize(
    "text, letter",
    [
        ("Answer: C", "C"),
        ("the answer is (B).", "B"),
        ("Answer: A\nwait\n**Answer:** **D**", "D"),
        ("answer is $\\text{E}$", "E"),
        ("so \\boxed{\\text{C}}", "C"),
        ("\\boxed{(B)}", "B"),
        ("Answer: Because", None),
        ("Answer: K", None),  # not one of the options
        ("A or B", None),
        ("the answer is a number; \\boxed{D}", "D"),
        ("", None),
    ],
)
def test_letters(text, letter):
    assert last_letter(text, 10) == letter


def test_an_item_extracts_by_its_kind():
    assert Item(id=0, prompt="", gold="A", options=4).extract("Answer: A") == "A"
    assert Item(id=0, prompt="", gold="1").extract(r"\boxed{1}") == "1"
    assert last_box(r"\boxed {x \} y}") == r"x \} y"
    assert last_box(r"\fbox{2}") == "2"
