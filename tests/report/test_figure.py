"""Figures, looked at as specs and as rendered SVG."""

import json
import math

import pytest

from quantlab.report.figure import kl_figure, tail_figure
from quantlab.report.page import render
from quantlab.report.style import PALETTE, styles
from tests.report.summaries import FLOOR, POLICIES, make_summary


def spec_of(summary, floor=FLOOR):
    return kl_figure(summary, title="t", subtitle="s", floor=floor).to_dict()


def values_of(layer):
    return layer["data"]["values"]


def layer_with(spec, mark, field=None):
    found = [
        layer
        for layer in spec["layer"]
        if layer["mark"]["type"] == mark and (field is None or field in values_of(layer)[0])
    ]
    assert len(found) == 1
    return found[0]


def test_axes_are_log_log_with_n_ticks():
    line = layer_with(spec_of(make_summary(131_072)), "line")
    x, y = line["encoding"]["x"], line["encoding"]["y"]
    assert x["scale"]["type"] == y["scale"]["type"] == "log"
    assert x["axis"]["values"] == [16, 64, 256, 1024, 4096, 16384, 65536, 131072]
    assert "'65536': '64K'" in x["axis"]["labelExpr"] and "N" in x["title"]
    assert "nats" in y["title"]


def test_legend_is_ordered_by_the_last_value():
    summary = make_summary(diverge={POLICIES[5]: 2048})
    names = layer_with(spec_of(summary), "line")["encoding"]["color"]["scale"]["domain"]
    last = [p for p in summary.to_pylist() if p["n"] == 4096]
    short = {p: s.name for p, s in styles(POLICIES, FLOOR).items()}
    expected = sorted(last, key=lambda p: math.inf if p["diverged"] else p["kl"], reverse=True)
    assert names == [short[p["policy"]] for p in expected]
    assert names[0] == "nvfp4 / fp32" and names[-1] == "shared fp32"


def test_diverged_points_are_crosses_at_the_top():
    spec = spec_of(make_summary(diverge={POLICIES[3]: 1024}))
    crosses = [x for x in spec["layer"] if x["mark"].get("shape") == "cross"]
    assert len(crosses) == 1
    points = values_of(crosses[0])
    assert [p["n"] for p in points] == [1024, 2048, 4096]
    top = layer_with(spec, "line")["encoding"]["y"]["scale"]["domain"][1]
    assert {p["kl"] for p in points} == {top}
    lines = values_of(layer_with(spec, "line"))
    assert max(p["n"] for p in lines if p["policy"] == "shared nvfp4-sr") == 512
    assert any("diverged" in text for text in spec["title"]["subtitle"])


def test_floor_is_shaded_and_grey():
    spec = spec_of(make_summary(floor=1e-6))
    areas = [x for x in spec["layer"] if x["mark"]["type"] == "area"]
    shade = next(x for x in areas if "color" in x["mark"])
    assert {p["kl"] for p in values_of(shade)} == {1e-6}
    assert styles(POLICIES, FLOOR)[FLOOR].colour not in PALETTE


def test_floor_far_below_does_not_squeeze_the_curves():
    spec = spec_of(make_summary(floor=1e-15))
    low, _ = layer_with(spec, "line")["encoding"]["y"]["scale"]["domain"]
    assert low >= 1e-9
    assert any("below the axis (1.00e-15" in text for text in spec["title"]["subtitle"])
    assert all(p["kl"] >= low for p in values_of(layer_with(spec, "point", "p99")))


def test_floor_of_exactly_zero_is_said():
    spec = spec_of(make_summary(floor=0.0))
    assert any("shared fp32: exactly 0" in text for text in spec["title"]["subtitle"])
    render(kl_figure(make_summary(floor=0.0), title="t", subtitle="s", floor=FLOOR))


def test_interval_bands_need_streams():
    def bands(summary):
        layers = spec_of(summary, floor=None)["layer"]
        return [x for x in layers if x["mark"]["type"] == "area"]

    assert len(bands(make_summary())) == 1 and not bands(make_summary(streams=1))


def test_families_differ_in_dash_and_mark_and_policies_in_colour():
    look = styles([*POLICIES, "conventional:float8_e4m3fn@block128-sr"], FLOOR)
    assert len({s.colour for s in look.values()}) == len(look)
    by_family = {
        "shared": look[POLICIES[1]],
        "separate": look[POLICIES[7]],
        "conventional": look["conventional:float8_e4m3fn@block128-sr"],
    }
    assert len({tuple(s.dash) for s in by_family.values()}) == 3
    assert len({s.mark for s in by_family.values()}) == 3


def test_everything_diverged_still_draws():
    summary = make_summary(16, policies=POLICIES[1:3], diverge=dict.fromkeys(POLICIES[1:3], 1))
    png, svg = render(kl_figure(summary, title="t", subtitle="s", floor=None))
    assert png[:4] == b"\x89PNG" and svg.startswith("<svg")
    render(tail_figure(summary, title="t", subtitle="s", floor=None))


@pytest.mark.parametrize("figure", [kl_figure, tail_figure])
def test_rendering_is_deterministic_and_names_every_policy(figure):
    chart = figure(make_summary(), title="A title", subtitle="s", floor=FLOOR)
    png, svg = render(chart)
    assert (png, svg) == render(chart)
    for style in styles(POLICIES, FLOOR).values():
        assert style.name in svg
    assert "A title" in svg
    json.dumps(chart.to_dict(), allow_nan=False)
