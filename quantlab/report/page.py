"""Write a run's figures (PNG, SVG) and its page, which opens from disk and loads nothing."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantlab.report.figure import kl_figure, tail_figure
from quantlab.report.table import make_table, short_length, short_policy

if TYPE_CHECKING:
    from quantlab.study.result import Result

# Pixels per unit of the figure: sharp when printed at column width.
PNG_SCALE = 2


def write_report(result: Result) -> list[Path]:
    """Write kl.png, kl.svg, tail.png, tail.svg and index.html into the run's directory.

    Returns:
        The files, the page last; none if nothing has been measured yet.

    Raises:
        RunError: if the disk is full.
    """
    from quantlab.study.store import RunDirectory

    if result.summary.num_rows == 0:
        return []
    directory = RunDirectory(result.path)
    floor = None if result.spec.floor is None else str(result.spec.floor)
    subtitle = describe(result)
    figures = {
        "kl": kl_figure(
            result.summary,
            title=f"{result.spec.model}: KL from FP32-state decoding",
            subtitle=subtitle,
            floor=floor,
        ),
        "tail": tail_figure(
            result.summary,
            title=f"{result.spec.model}: how KL is spread over tokens",
            subtitle=f"{subtitle}; the last window",
            floor=floor,
        ),
    }
    written, shown = [], []
    for name, chart in figures.items():
        png, svg = render(chart)
        for suffix, data in ((".png", png), (".svg", svg.encode("utf-8"))):
            path = result.path / f"{name}{suffix}"
            directory.write(path, data)
            written.append(path)
        shown.append((name, chart, svg))
    page = result.path / "index.html"
    directory.write(page, render_page(result, shown).encode("utf-8"))
    return [*written, page]


def render(chart: Any) -> tuple[bytes, str]:
    """PNG and SVG of an altair chart."""
    import vl_convert

    svg = _renumber(vl_convert.vegalite_to_svg(chart.to_dict()))
    png: bytes = vl_convert.svg_to_png(svg, scale=PNG_SCALE)
    return png, svg


def write_figures(path: Path, charts: Mapping[str, Any]) -> list[Path]:
    """Write altair charts by name into a run's directory, each as PNG and SVG.

    Raises:
        RunError: if the disk is full.
    """
    from quantlab.study.store import RunDirectory

    directory, written = RunDirectory(path), []
    for name, chart in charts.items():
        png, svg = render(chart)
        for suffix, data in ((".png", png), (".svg", svg.encode("utf-8"))):
            file = path / f"{name}{suffix}"
            directory.write(file, data)
            written.append(file)
    return written


def _renumber(svg: str) -> str:
    """Count clip paths from 0: the renderer goes on counting over figures, so ids would differ."""
    order: dict[str, int] = {}
    return re.sub(r"\bclip(\d+)\b", lambda m: f"clip{order.setdefault(m[1], len(order))}", svg)


def describe(result: Result) -> str:
    """One line on what a run measured."""
    spec, streams = result.spec, len(result.record["data"]["streams"])
    windows = sorted({p.window for p in spec.policies if p.kind != "conventional"})
    replay = f", L = {', '.join(map(str, windows))}" if windows else ""
    return (
        f"{streams} stream{'s' if streams != 1 else ''} of {Path(spec.data).name}, prompt "
        f"{spec.prompt:,}{replay}"
    )


def render_page(result: Result, figures: list[tuple[str, Any, str]]) -> str:
    """HTML of a run; every text is escaped, scripts and SVG are our own.

    Args:
        result: the run.
        figures: (name, altair chart, its SVG).
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quantlab.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    titles = {"kl": "KL at N against N, log-log", "tail": "quantiles of KL at the last N"}
    return environment.get_template("page.html.j2").render(
        title=f"{result.spec.model}: which state format is safe to which length",
        lead=f"KL from FP32-state decoding, N to {short_length(result.spec.tokens)}; "
        f"{describe(result)}.",
        warnings=_warnings(result),
        figures=[
            {
                "id": name,
                "alt": titles[name],
                "svg": Markup(svg),
                "spec": Markup(_script_safe(_without_schema(chart.to_dict()))),
            }
            for name, chart, svg in figures
        ],
        table=make_table(result.summary),
        command=_command(result),
        facts=_facts(result),
        policies=[(short_policy(str(p)), str(p)) for p in result.spec.policies],
        streams=[
            (s["name"], f"{s['source']} · tokens {s['tokens_sha256']}")
            for s in result.record["data"]["streams"]
        ],
        bundle=Markup(_bundle()),
    )


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script, from the installed vl-convert."""
    import vl_convert

    make: Any = vl_convert.javascript_bundle  # its stub asks for an argument that it does not need
    text: str = make()
    return text.replace("</script", "<\\/script")


def _script_safe(value: Any) -> str:
    # "</script>" or "<!--" inside a name must not end the element it is in
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def _without_schema(spec: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key != "$schema"}


def _warnings(result: Result) -> list[str]:
    found = []
    if not result.finished:
        found.append(f"This run is not finished (state: {result.run.get('state', 'unknown')}).")
    for cell in result.failed:
        found.append(f"Streams {cell['streams']} failed: {cell['error']}")
    names = [s["name"] for s in result.record["data"]["streams"]]
    diverged = result.summary.filter(result.summary["diverged"].to_numpy() > 0)
    for policy in dict.fromkeys(diverged["policy"].to_pylist()):
        found.append(
            f"{short_policy(policy)}: the state of at least one of {len(names)} streams stopped "
            "being finite; its means are printed as div."
        )
    if result.spec.floor is None:
        found.append("The study has no noise floor (shared:fp32).")
    return found


def _command(result: Result) -> str:
    sessions = result.run.get("sessions", [])
    command = sessions[0].get("command", []) if sessions else []
    if not command:
        return "quantlab.kl(…), from Python; see spec.json"
    return shlex.join([Path(command[0]).name, *command[1:]])


def _facts(result: Result) -> list[tuple[str, str]]:
    record, spec = result.record, result.spec
    model, data, made = record["model"], record["data"], record["made_with"]
    git = made.get("git")
    revision = "installed package" if git is None else git["commit"] + " + changes" * git["dirty"]
    which = model.get("revision") or model.get("sha256") or "in memory"
    seconds = sum(s.get("seconds", 0) for s in result.run.get("sessions", []))
    versions = ", ".join(f"{k} {v}" for k, v in made["versions"].items() if v)
    batches = record["plan"]["stream_batches"]
    return [
        (
            "model",
            f"{spec.model} ({model.get('model_type', '')}, {model.get('dtype', '')}), {which}",
        ),
        ("op", str(model.get("op_implementation", ""))),
        ("data", f"{data['data']}, tokenizer {data['tokenizer']}, BOS {data['bos_id']}"),
        ("engine", f"{spec.engine}, seed {spec.seed}, segments of {record['plan']['segment']}"),
        ("batches of streams", str(batches)),
        ("device", f"{made['device']}, {made['cpu']}, {made['threads']} threads"),
        ("code", revision),
        ("versions", f"Python {made['python']}, {versions}"),
        ("computed in", f"{seconds:,.0f} s"),
    ]
