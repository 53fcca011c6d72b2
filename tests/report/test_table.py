import math

import pytest

from quantlab.metrics.summary import SUMMARY_SCHEMA
from quantlab.report.table import make_table, markdown_table, number, plain_table, short_length
from tests.report.summaries import POLICIES, make_summary


@pytest.mark.parametrize(
    "value, text",
    [
        (1.234e-4, "1.23e-4"),
        (0.0123, "0.0123"),
        (12.34, "12.3"),
        (0.0, "0"),
        (-2e-5, "-2.00e-5"),
        (math.inf, "inf"),
        (math.nan, "–"),
        (None, "–"),
        (1e-18, "1.00e-18"),
        (4567.0, "4.57e3"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.parametrize("n, text", [(16, "16"), (1024, "1K"), (131072, "128K"), (5000, "5,000")])
def test_lengths(n, text):
    assert short_length(n) == text


def test_columns_are_powers_of_four_and_the_last():
    assert make_table(make_summary(131_072)).header[:9] == (
        "policy",
        *("16", "64", "256", "1K", "4K", "16K", "64K", "128K"),
    )
    assert make_table(make_summary(600)).header[:5] == ("policy", "16", "64", "256", "600")


def test_one_row_a_policy_with_short_names():
    table = make_table(make_summary())
    assert [row[0] for row in table.rows][:3] == ["shared fp32", "shared fp16-sr", "shared fp8-sr"]
    assert all(len(row) == len(table.header) for row in table.rows)


def test_diverged_prints_div():
    table = make_table(make_summary(diverge={POLICIES[3]: 1024}))
    row = next(r for r in table.rows if r[0] == "shared nvfp4-sr")
    assert row[1:6].count("div.") == 2 and row[4:6] == ("div.", "div.")
    assert row[6] == "–"


def test_floor_of_zero_has_no_ratio():
    assert {row[6] for row in make_table(make_summary(floor=0.0)).rows} == {"–"}


def test_ratio_far_above_the_floor_is_capped():
    rows = make_table(make_summary(floor=1e-13)).rows
    assert rows[0][6] == "1" and {row[6] for row in rows[1:]} == {">1.00e6"}


def test_plain_and_markdown_say_what_the_numbers_are():
    for text in (plain_table(make_summary()), markdown_table(make_summary())):
        assert "nats" in text and "4 streams" in text and "nvfp4 / fp16-sr" in text
    assert len({len(line) for line in plain_table(make_summary()).splitlines()[:1]}) == 1


def test_nothing_measured_yet():
    assert "nothing has been measured" in plain_table(SUMMARY_SCHEMA.empty_table())
