"""Tables and figure of an accuracy run: by policy, and by FP32 output length."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quantlab.metrics.accuracy_table import ALL, REFERENCE, REPEAT
from quantlab.replay.policy import parse_policy
from quantlab.report.document import Document, Figure, Section, to_html
from quantlab.report.figure import finish
from quantlab.report.page import render
from quantlab.report.style import styles
from quantlab.report.table import Table

if TYPE_CHECKING:
    from quantlab.study.accuracy import EvalResult
    from quantlab.study.accuracy_spec import EvalSpec

NAMES = {REFERENCE: "FP32", REPEAT: "FP32 repeated"}


def arm_name(arm: str) -> str:
    """Legend name of an arm."""
    return NAMES.get(arm) or parse_policy(arm).short


def summary_tables(summary: pa.Table) -> list[tuple[str, Table]]:
    """(task, table) of a run, from `quantlab.metrics.accuracy_table.summary_table`."""
    header = (
        "policy", "accuracy", "truncated", "collapsed", "change", "95 %", "lost/gained", "p",
        "verdict", "identical", "leaves at", "margin",
    )  # fmt: skip
    found = []
    for task, cells in _by_task(summary):
        rows = []
        for c in cells:
            own = c["arm"] == REFERENCE
            interval = f"{_points(c['change_low'])} … {_points(c['change_high'])}"
            rows.append(
                (
                    arm_name(c["arm"]),
                    f"{_percent(c['accuracy'])} ± {_percent(c['se'])}",
                    _percent(c["truncated"]),
                    _percent(c["collapsed"]),
                    "–" if own else _points(c["change"]),
                    "–" if own else interval,
                    "–" if own else f"{c['lost']}/{c['gained']}",
                    "–" if own else f"{c['p']:.2g}",
                    "–" if own else c["verdict"],
                    "–" if own else _percent(c["identical"]),
                    "–" if own or math.isnan(c["left_at_median"]) else f"{c['left_at_median']:.0f}",
                    "–"
                    if own or math.isnan(c["left_margin_median"])
                    else f"{c['left_margin_median']:.2g}",
                )
            )
        first = cells[0]
        note = (
            f"{task}: {first['questions']:,} questions, {first['draws']:,} generations a policy. "
            "Percent and points; ± is question-clustered; a truncated answer is wrong. Change is "
            "paired with FP32 under the same noise; leaves at: median token and FP32's margin "
            "there (nats)."
        )
        found.append((task, Table(header=header, rows=tuple(rows), note=note)))
    return found


def bins_tables(bins: pa.Table) -> list[tuple[str, Table]]:
    """(task, table): accuracy and change by FP32 output length."""
    found = []
    for task, cells in _by_task(bins):
        numbers = list(dict.fromkeys(c["bin"] for c in cells))
        heads = {
            c["bin"]: f"{c['length_low']:,}–{c['length_high']:,} (n {c['draws']:,})" for c in cells
        }
        rows = []
        for arm in dict.fromkeys(c["arm"] for c in cells):
            own = {c["bin"]: c for c in cells if c["arm"] == arm}
            rows.append((arm_name(arm), *(_bin_cell(own[n]) for n in numbers)))
        note = (
            f"{task}: accuracy (change ± standard error, points; t: truncated) by the output "
            "length of the first FP32 run, tokens."
        )
        header = ("policy", *(heads[n] for n in numbers))
        found.append((task, Table(header=header, rows=tuple(rows), note=note)))
    return found


def _bin_cell(c: dict[str, Any]) -> str:
    text = _percent(c["accuracy"])
    if c["arm"] != REFERENCE:
        text += f" ({_points(c['change'])} ± {_percent(c['change_se'])})"
    return text + (f" t {_percent(c['truncated'])}" if c["truncated"] else "")


def bins_figure(cells: Sequence[dict[str, Any]], *, title: str, subtitle: str) -> Any:
    """Draw accuracy against FP32 output length: a line a policy, Wilson intervals as bars.

    Args:
        cells: rows of one task of `quantlab.metrics.accuracy_table.bins_table`.
        title: what was measured.
        subtitle: on what.
    """
    import altair as alt

    policies = list(dict.fromkeys(c["arm"] for c in cells if c["arm"] not in NAMES))
    look = styles(policies, None)
    names = [NAMES[REFERENCE], *(look[p].name for p in policies)]
    colours = ["#666666", *(look[p].colour for p in policies)]
    dashes = [[1, 0], *(look[p].dash for p in policies)]
    medians = sorted({c["length_median"] for c in cells})
    spread = math.log(medians[-1] / medians[0]) if medians[0] > 0 and len(medians) > 1 else 1.0
    drawn = []
    for c in cells:
        if c["arm"] == REPEAT:
            continue
        place = names.index(arm_name(c["arm"])) - (len(names) - 1) / 2
        drawn.append(
            {
                "policy": arm_name(c["arm"]),
                # moved aside a little, so that bars of different policies do not cover each other
                "length": max(1.0, c["length_median"]) * math.exp(0.012 * spread * place),
                "accuracy": 100 * c["accuracy"],
                "low": 100 * c["low"],
                "high": 100 * c["high"],
                "truncated": c["truncated"],
            }
        )
    x = alt.X(
        "length:Q",
        title="FP32 output length, median of the bin (tokens)",
        scale=alt.Scale(type="log", nice=False, padding=20),
        axis=alt.Axis(values=[round(m) for m in medians], format=",", grid=True),
    )
    scale = alt.Scale(domain=[0, 100])
    y = alt.Y("accuracy:Q", title="accuracy (%), truncated = wrong", scale=scale)
    colour = alt.Color(
        "policy:N", sort=names, title="policy", scale=alt.Scale(domain=names, range=colours),
        legend=alt.Legend(labelLimit=300),
    )  # fmt: skip
    dash = alt.StrokeDash(
        "policy:N", sort=names, title="policy", scale=alt.Scale(domain=names, range=dashes)
    )
    base = alt.Chart(alt.Data(values=drawn))
    bars = base.mark_rule(opacity=0.5).encode(
        x=x, y=alt.Y("low:Q", scale=scale), y2="high:Q", color=colour
    )
    lines = base.mark_line(strokeWidth=1.8).encode(x=x, y=y, color=colour, strokeDash=dash)
    points = base.mark_point(size=42, filled=True, opacity=1).encode(
        x=x,
        y=y,
        color=colour,
        tooltip=[
            alt.Tooltip("policy:N"),
            alt.Tooltip("accuracy:Q", format=".1f"),
            alt.Tooltip("low:Q", format=".1f"),
            alt.Tooltip("high:Q", format=".1f"),
            alt.Tooltip("truncated:Q", format=".1%"),
        ],
    )
    return finish(alt, bars + lines + points, title=title, subtitle=subtitle)


def write_report(result: EvalResult) -> list[Path]:
    """Write `bins-TASK.png` and `.svg` of every task, and index.html, into the run's directory.

    Returns:
        The files, the page last.

    Raises:
        RunError: the disk is full.
    """
    from quantlab.study.store import RunDirectory

    directory = RunDirectory(result.path)
    written, figures = [], {}
    for task, png, svg in draw_bins(result):
        name = f"bins-{task}"
        figures[task] = Figure(name=f"{name}.svg", text=f"accuracy by length: {task}", svg=svg)
        for suffix, data in ((".png", png), (".svg", svg.encode("utf-8"))):
            path = result.path / f"{name}{suffix}"
            directory.write(path, data)
            written.append(path)
    page = result.path / "index.html"
    directory.write(page, to_html(document(result, figures)).encode("utf-8"))
    return [*written, page]


def draw_bins(result: EvalResult) -> list[tuple[str, bytes, str]]:
    """(task, PNG, SVG) of accuracy by length, task by task."""
    found = []
    for task, cells in _by_task(result.bins()):
        what = "all tasks" if task == ALL else task
        chart = bins_figure(
            cells,
            title=f"Accuracy by output length: {what}",
            subtitle=f"{Path(result.spec.model).name}; bins of equal count; bars: Wilson 95 %, "
            "draws of a question counted together",
        )
        found.append((task, *render(chart)))
    return found


def document(result: EvalResult, figures: Mapping[str, Figure]) -> Document:
    """Lay a run out: its settings, then every task's tables and figure.

    Args:
        result: the run.
        figures: by task.
    """
    spec, made = result.spec, result.record["made_with"]
    sessions = result.run.get("sessions", [])
    command = sessions[0].get("command", []) if sessions else []
    seconds = sum(s.get("seconds", 0) for s in sessions)
    introduction = "\n\n".join(
        [
            f"# {Path(spec.model).name}: accuracy of long generations",
            "Paired with FP32-state decoding under the same sampling noise and binned by its "
            f"output length. {spec.repetitions} repetitions, budget {spec.budget:,} tokens (an "
            f"output that reaches it is wrong), {sampling_line(spec)}, seed {spec.seed}, "
            f"{spec.rows:,} rows a forward, {result.record['model'].get('dtype', '')} "
            f"activations, on {made['device']}, {seconds:,.0f} s.",
            f"    {shlex.join(command)}" if command else "From Python; see spec.json.",
        ]
    )
    summaries, binned = dict(summary_tables(result.summary())), dict(bins_tables(result.bins()))
    sections = [
        Section(
            title="All tasks" if task == ALL else task,
            tables=(table, binned[task]),
            figures=(figures[task],) if task in figures else (),
        )
        for task, table in summaries.items()
    ]
    files = (
        ("rows.parquet", "one row a generation"),
        ("outputs.parquet", "what each wrote"),
        ("summary.csv", "all figures by policy"),
        ("bins.csv", "and by length"),
        ("spec.json", "everything needed to repeat it"),
    )
    policies = tuple((arm_name(str(p)), str(p)) for p in spec.policies)
    table = Table(header=("policy", "in full"), rows=policies, note="")
    sections.append(Section(title="How it was made", tables=(table,), numeric=False, files=files))
    return Document(introduction=introduction, sections=sections)


def sampling_line(spec: EvalSpec) -> str:
    """Say in a few words how tokens are chosen."""
    if spec.temperature == 0:
        return "greedy"
    parts = [f"temperature {spec.temperature:g}", f"top-p {spec.top_p:g}"]
    parts += [f"top-k {spec.top_k}"] if spec.top_k else []
    parts += [f"presence penalty {spec.presence_penalty:g}"] if spec.presence_penalty else []
    return ", ".join(parts)


def _by_task(table: pa.Table) -> list[tuple[str, list[dict[str, Any]]]]:
    rows = table.to_pylist()
    tasks = dict.fromkeys(r["task"] for r in rows)
    return [(task, [r for r in rows if r["task"] == task]) for task in tasks]


def _percent(x: float) -> str:
    return "–" if math.isnan(x) else f"{100 * x:.1f}"


def _points(x: float) -> str:
    return "–" if math.isnan(x) else f"{100 * x:+.1f}"
