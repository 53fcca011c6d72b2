"""Write this folder's README.md and index.html from the rows of its runs.

python reports/accuracy-on-the-zoo/summarise.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from quantlab.metrics.accuracy_table import ALL, REFERENCE, REPEAT
from quantlab.report.accuracy import (
    arm_name,
    bins_tables,
    draw_bins,
    sampling_line,
    summary_tables,
)
from quantlab.report.document import Document, Figure, Section, to_html, to_markdown
from quantlab.report.table import Table
from quantlab.study.accuracy import EvalResult, load_eval

HERE = Path(__file__).parent
NORMAL = 1.96
SHARED, SEPARATE = "shared nvfp4-sr", "nvfp4 / fp16-sr"
FP8_SEPARATE = "fp8 / fp16-sr"
INTRODUCTION = """\
# Accuracy of long generations

The embedded reasoners write out the solutions of the embedded tasks under every policy of suite
`replayssm` (L = 16), with FP32-state decoding in the same batches under the same sampling noise.
Changes are paired by question and draw; errors are clustered by question. Bins are quartiles of the
output length in a further FP32 run with noise of its own. `FP32 repeated` is the reference once
more: what changes by itself on the machine.

Both runs had an H200 each, at d553bf5, and shared it for their first two minutes with the small
runs below and with kernels being compiled. `tiny-reasoner-mamba2` is right on 99.9 % at temperature
1, so its sampling is heated.

Answers do not depend on the batch, on a GPU as on a CPU: `quantlab eval --model tiny-reasoner-gdn
--task chain --task recall --suite replayssm --temperature 1 --top-p 0.95 --limit 4 --repetitions 1
--budget 320 --rows R --device cuda --dtype fp32` gave the same 96 generations to the last of 9,552
tokens, with the same margins to the last bit, at R = 8, 64 and 1,024.

This page is written by `summarise.py` from the rows of the runs beside it.
"""


def signed(value: float) -> str:
    """Points with their sign."""
    return "–" if math.isnan(value) else f"{100 * value:+.1f}"


def by_bin(result: EvalResult, task: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of the table by length of one task, by the policy's short name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in result.bins().to_pylist():
        if row["task"] == task:
            found.setdefault(arm_name(row["arm"]), []).append(row)
    return found


def growth(cells: list[dict[str, Any]]) -> tuple[float, float]:
    """Change in the longest bin less that in the shortest, and its error.

    As if bins shared no question: one that is near an edge may lie in two, by the noise of its
    first FP32 runs.
    """
    first, last = cells[0], cells[-1]
    return last["change"] - first["change"], math.hypot(first["change_se"], last["change_se"])


def verdict(value: float, error: float, worse: str, better: str) -> str:
    """One word on a difference: resolved at 95 % or not."""
    if abs(value) <= NORMAL * error or math.isnan(error):
        return "not resolved"
    return worse if value < 0 else better


def claims(result: EvalResult) -> Table:
    """Tabulate whether the gap grows with length, and whether the separate copy closes it."""
    rows = []
    tasks = [ALL, *result.spec.tasks] if len(result.spec.tasks) > 1 else list(result.spec.tasks)
    summary = {(r["task"], arm_name(r["arm"])): r for r in result.summary().to_pylist()}
    for task in tasks:
        bins = by_bin(result, task)
        grown, error = growth(bins[SHARED])
        shared, separate = summary[task, SHARED], summary[task, SEPARATE]
        rows.append(
            (
                "all tasks" if task == ALL else task,
                " → ".join(signed(c["change"]) for c in bins[SHARED]),
                f"{signed(grown)} ± {100 * NORMAL * error:.1f}: "
                + verdict(grown, error, "grows", "shrinks"),
                f"{signed(shared['change'])} [{signed(shared['change_low'])}, "
                f"{signed(shared['change_high'])}]",
                f"{signed(separate['change'])} [{signed(separate['change_low'])}, "
                f"{signed(separate['change_high'])}]: {separate['verdict']}",
            )
        )
    return Table(
        header=(
            "task", f"{SHARED}, change by quartile", "last less first (95 %)",
            f"{SHARED}, all lengths", f"{SEPARATE}, all lengths",
        ),
        rows=tuple(rows),
        note="Points of accuracy against FP32 under the same noise. The verdict is of the "
        f"equivalence test within {100 * result.spec.margin:g} points.",
    )  # fmt: skip


def facts(result: EvalResult) -> str:
    """One line on how a run was made."""
    spec, sessions = result.spec, result.run["sessions"]
    rows = {r["arm"]: r for r in result.summary().to_pylist() if r["task"] == ALL}
    same = rows[REPEAT]["identical"]
    seconds = sum(s.get("seconds", 0) for s in sessions)
    tokens = sum(result.rows["length"].to_pylist())
    cut = result.record.get("cut")
    asked = f"{spec.limit} questions a task"
    if cut:
        asked = f"The first {cut['questions']} of {cut['of']:,} questions"
    took = f", {seconds:,.0f} s" if seconds else ""
    return (
        f"{asked}, {spec.repetitions} repetitions, {sampling_line(spec)}, "
        f"budget {spec.budget:,} tokens, {spec.rows:,} rows a forward, "
        f"{result.record['model']['dtype']}, on {result.record['made_with']['device']}: "
        f"{result.rows.num_rows:,} generations, {tokens / 1e6:.1f} M tokens{took}. "
        f"FP32 is right on {100 * rows[REFERENCE]['accuracy']:.1f} %; repeated in other rows, "
        f"{100 * same:.1f} % of its outputs are the same to the last token. " + _kept(result)
    )


def _kept(result: EvalResult) -> str:
    """Say what policies keep of FP32's right answers, and how that goes with length."""
    right = {arm_name(r["arm"]): r for r in result.summary().to_pylist() if r["task"] == ALL}
    bins = by_bin(result, ALL)
    parts = []
    for name in (SHARED, SEPARATE, FP8_SEPARATE):
        accuracy = " → ".join(f"{100 * c['accuracy']:.0f}" for c in bins[name])
        parts.append(f"{name} {100 * right[name]['accuracy']:.1f} % ({accuracy} by quartile)")
    own = " → ".join(f"{100 * c['accuracy']:.0f}" for c in bins["FP32"])
    low, high = bins["FP32"][0]["length_low"], bins["FP32"][-1]["length_high"]
    return (
        f"Outputs of {low:,} to {high:,} tokens, on which FP32 itself falls ({own}): "
        + ", ".join(parts)
        + ". Where FP32 has little left a gap has no room to grow."
    )


def command(result: EvalResult) -> str:
    """How the run was started, with this machine's paths left out."""
    words = list(result.run["sessions"][0]["command"])
    for option, value in (("--model", result.path.name), ("--out", "RUN")):
        if option in words:
            words[words.index(option) + 1] = value
    return " ".join(words)


def section(result: EvalResult) -> list[Section]:
    """Lay a model out: claims, then every task's tables and figure."""
    name = result.path.name
    figures = {}
    for task, _, svg in draw_bins(result):
        (result.path / f"bins-{task}.svg").write_text(svg, encoding="utf-8")
        figures[task] = Figure(
            name=f"{name}/bins-{task}.svg", text=f"{name}: accuracy by length, {task}", svg=svg
        )
    summaries, binned = dict(summary_tables(result.summary())), dict(bins_tables(result.bins()))
    files = [(f"{name}/{f}", what) for f, what in (
        ("rows.parquet", "one row a generation"), ("summary.csv", "by policy"),
        ("bins.csv", "by length"), ("spec.json", "everything needed to repeat it"),
    )]  # fmt: skip
    parts = [
        Section(title=name, command=command(result), facts=facts(result),
                tables=(claims(result),), numeric=False, files=files)
    ]  # fmt: skip
    for task, table in summaries.items():
        what = "all tasks" if task == ALL else task
        parts.append(
            Section(title=f"{name}: {what}", tables=(table, binned[task]), figures=(figures[task],))
        )
    return parts


def main() -> None:
    """Read all runs, write the page twice."""
    runs = [load_eval(path.parent) for path in sorted(HERE.glob("*/spec.json"))]
    sections = [part for result in runs for part in section(result)]
    document = Document(introduction=INTRODUCTION, sections=sections)
    (HERE / "README.md").write_text(to_markdown(document), encoding="utf-8")
    (HERE / "index.html").write_text(to_html(document), encoding="utf-8")


if __name__ == "__main__":
    main()
