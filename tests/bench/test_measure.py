"""Statistics of timings, and that nothing is timed whose check fails."""

from __future__ import annotations

import pytest

from quantlab.bench.measure import Bench, Row, Timing


def test_median_and_spread_of_known_times() -> None:
    timing = Timing(seconds=(4.0, 1.0, 2.0, 3.0, 100.0))
    assert timing.median == 3.0
    # quartiles 2 and 4, whatever the outlier
    assert timing.spread == pytest.approx(2 / 3)
    assert Timing(seconds=(2.0, 3.0, 1.0)).spread == pytest.approx(1.0)
    assert Timing(seconds=(2.0,)).spread == 0.0


@pytest.mark.parametrize("seconds", [(), (1.0, 0.0), (-1.0,)])
def test_times_that_cannot_be(seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Timing(seconds=seconds)


def test_warmup_is_not_timed_and_buffers_take_turns() -> None:
    seen: list[int] = []
    calls = [lambda i=i: seen.append(i) for i in range(3)]
    timing = Bench("cpu", repeats=4, warmup=2).time(calls)
    assert len(timing.seconds) == 4
    assert seen == [0, 1, 0, 1, 2, 0]


def row(check: object, call: object = lambda: None) -> Row:
    return Bench("cpu", repeats=2, warmup=1).measured(
        "op",
        call,  # type: ignore[arg-type]
        check=check,  # type: ignore[arg-type]
        values=lambda timing: {"rate": 1 / timing.median},
    )


def test_a_good_operation_has_a_speed() -> None:
    found = row(lambda: None)
    assert found.status == "ok" and set(found.values) == {"ms", "spread", "rate"}


def test_a_failed_check_has_none_and_is_not_even_timed() -> None:
    calls: list[int] = []
    found = row(lambda: "3 codes differ", lambda: calls.append(1))
    assert found == Row(name="op", status="refused", reason="3 codes differ")
    assert not calls


def test_an_operation_that_raises_is_refused_and_one_not_installed_absent() -> None:
    def broken() -> None:
        raise RuntimeError("out of memory")

    def missing() -> None:
        raise ModuleNotFoundError("No module named 'fla'")

    assert row(lambda: None, broken).reason == "RuntimeError: out of memory"
    assert row(lambda: None, broken).status == "refused"
    assert row(lambda: None, missing).status == "absent"
