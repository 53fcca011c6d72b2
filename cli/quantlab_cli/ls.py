"""`quantlab ls`: what can be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from quantlab_cli.types import Choice, columns, echo_json

Listing = list[dict[str, Any]]


def _formats() -> Listing:
    from quantlab.formats import FORMATS, PRESETS, parse_format

    listed = [
        {"name": name, "format": str(parse_format(name)), "about": entry.summary}
        for name, entry in FORMATS.items()
    ]
    listed += [
        {"name": name, "format": str(parse_format(name)), "about": f"{p.project} ({p.source})"}
        for name, p in PRESETS.items()
    ]
    for entry in listed:
        bits = parse_format(entry["name"]).bits_per_element(128, 128)
        entry["bits"] = f"{float(bits):g}"
    return [{k: e[k] for k in ("name", "bits", "format", "about")} for e in listed]


def _models() -> Listing:
    from quantlab.models.presets import PRESETS
    from quantlab.models.registry import FAMILIES
    from quantlab.models.zoo import SHIPPED

    listed: Listing = [
        {"name": name, "kind": "zoo", "about": f"embedded: {e.model_type}, {e.kind}"}
        for name, e in SHIPPED.items()
    ]
    listed += [
        {"name": name, "kind": "preset", "about": f"{p.hub_id}: {p.summary}"}
        for name, p in PRESETS.items()
    ]
    return listed + [
        {"name": f"<{name} checkpoint>", "kind": "family", "about": f"{f.op}, by path or hub id"}
        for name, f in FAMILIES.items()
    ]


def _suites() -> Listing:
    from quantlab.replay.policy import SUITES

    return [
        {"name": name, "policies": "; ".join(p.short for p in policies)}
        for name, policies in SUITES.items()
    ]


def _policies() -> Listing:
    return [
        {"form": "conventional[:FORMAT]", "meaning": "stored at every step; FP32 unless said"},
        {"form": "shared:FORMAT", "meaning": "one copy, stored once a window of L steps"},
        {"form": "READ / RECUR", "meaning": "two copies: steps read READ, a flush replays RECUR"},
        {"form": "… L=4", "meaning": "window (16)"},
        {"form": "… records=bf16", "meaning": "records: auto, bf16, fp32 or exact"},
        {"form": "… corrections=fold", "meaning": "delta rules: fold cached corrections"},
    ]


def _data() -> Listing:
    from quantlab.data.manifest import MANIFESTS, load_manifest

    found = [load_manifest(name) for name in MANIFESTS]
    listed = [{"name": m.name, "about": m.summary, "licence": m.licence} for m in found]
    return [
        *listed,
        {"name": "PATH", "about": ".txt, .jsonl (field text), or a folder", "licence": "yours"},
    ]


def _tasks() -> Listing:
    from quantlab.data.benchmarks.benchmark import BENCHMARKS, load_benchmark
    from quantlab.data.ruler import SYNTHETIC, ruler_tasks
    from quantlab.data.tasks import TASKS

    listed = [{"name": t.name, "about": f"embedded: {t.summary}"} for t in TASKS.values()]
    public = [load_benchmark(name) for name in BENCHMARKS]
    listed += [{"name": b.name, "about": f"{b.summary}; {b.licence}"} for b in public]
    return [
        *listed,
        *(
            {"name": n, "about": f"RULER{', made here' * (n in SYNTHETIC)}: {t['summary']}"}
            for n, t in ruler_tasks().items()
        ),
    ]


LISTINGS: dict[str, Callable[[], Listing]] = {
    "formats": _formats,
    "models": _models,
    "suites": _suites,
    "policies": _policies,
    "data": _data,
    "tasks": _tasks,
}


def _more_formats() -> str:
    from quantlab.formats.element import ELEMENTS, IntElement
    from quantlab.formats.grammar import OPTIONS

    scaled = [e.alias for e in ELEMENTS.values() if isinstance(e, IntElement) or e.bits <= 8]
    return (
        "\nA name takes -sr (stochastic rounding) and options: nvfp4:scale_round=up-sr.\n"
        f"{', '.join(scaled[:-1])} and {scaled[-1]} (or the ml_dtypes name) are formats with a\n"
        "scale, in FP32 unless said: @row (one for a value row, over dk), @key (a key channel,\n"
        "over dv), @state, @blockN (N along dk), @tileRxC (dv × dk): int8@row,\n"
        "int8@key:scale=bf16, fp8@tile32x128:qmax=240-sr.\n"
        f"Options: {', '.join(OPTIONS)}."
    )


NOTES: dict[str, Callable[[], str]] = {"formats": _more_formats}


@click.command()
@click.argument("what", type=Choice(list(LISTINGS)))
@click.option("--json", "as_json", is_flag=True, help="One JSON document as last line of stdout.")
def ls(what: str, as_json: bool) -> None:
    """List formats, models, suites, policies, data or tasks."""
    listed = LISTINGS[what]()
    if as_json:
        echo_json(listed)
        return
    header = tuple(listed[0]) if listed else ()
    click.echo(columns([tuple(str(v) for v in entry.values()) for entry in listed], header))
    if what in NOTES:
        click.echo(NOTES[what]())
