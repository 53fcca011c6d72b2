"""The equivalence tests can fail: each mutant of the windowed scan is caught by `compare`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantlab.recurrence import decays, window
from quantlab.replay import lane, parse_policy, recorded, scan, whole
from quantlab.replay.draws import READ, RECUR
from tests.recurrence.sampling import sample_inputs
from tests.replay.decoding import compare

RECORDED = parse_policy("nvfp4 / fp16-sr records=bf16")
WHOLE = parse_policy("nvfp4 / fp16-sr records=exact")
SHARED = parse_policy("shared:fp8-sr records=bf16")


def caught(*policies, kind="gdn", **changes):  # type: ignore[no-untyped-def]
    with pytest.raises(AssertionError):
        compare(policies, sample_inputs(kind, steps=75, **changes))


def test_nothing_is_caught_without_a_mutant() -> None:
    for kind in ("mamba2", "gdn", "kda"):
        compare([RECORDED, WHOLE, SHARED], sample_inputs(kind, steps=75))


def test_corrections_rounded_after_the_substitution(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve_then_round(right, lower, records, *, first, round_row):  # type: ignore[no-untyped-def]
        own = window.substitute(right, lower, records, first=first, round_row=lambda row: row)
        records[:, first : first + own.shape[1]] = round_row(own)
        return own

    monkeypatch.setattr(recorded, "substitute", solve_then_round)
    caught(RECORDED)
    caught(SHARED)


def test_own_output_from_the_rounded_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_rounded(right, lower, records, *, first, round_row):  # type: ignore[no-untyped-def]
        window.substitute(right, lower, records, first=first, round_row=round_row)
        return right.copy_(records[:, first : first + right.shape[1]])

    monkeypatch.setattr(recorded, "substitute", with_rounded)
    caught(SHARED)


@pytest.mark.parametrize(("module", "name", "policy"), [
    (recorded, "RecordedWindows", RECORDED), (whole, "WholeWindows", WHOLE),
])  # fmt: skip
def test_flush_from_the_read_copy(module, name, policy, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    plan = getattr(module, name)
    run = plan.run
    monkeypatch.setattr(plan, "run", lambda self, w, recur, read: run(self, w, read.clone(), read))
    caught(policy)


def test_recording_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    right = recorded.RecordedWindows.plan.__func__  # type: ignore[attr-defined]

    def plan(cls, new, types, **options):  # type: ignore[no-untyped-def]
        last = new.keys_queries.clone()
        n = new.v.shape[-2]
        last[..., n - 1, :] = recorded.rounded(last[..., n - 1, :], types.k)
        return right(cls, replace(new, keys_queries=last), types, **options)

    monkeypatch.setattr(recorded.RecordedWindows, "plan", classmethod(plan))
    caught(SHARED)


def test_read_copy_cast_from_the_recurrence_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def store(self, draws):  # type: ignore[no-untyped-def]
        self.recur = self._cast(self.recur, self.kind.recur, draws, RECUR)
        if self.kind.read is not None:
            self.read = self._cast(self.recur, self.kind.read, draws, READ)

    monkeypatch.setattr(lane.Lane, "_store", store)
    caught(WHOLE)


def test_read_copy_drawn_with_the_recurrence_copys_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "READ", RECUR)
    caught(parse_policy("nvfp4-sr / fp16-sr"))


def test_flush_index_that_starts_at_the_first_window(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = scan.WindowedScan._draws
    monkeypatch.setattr(
        scan.WindowedScan, "_draws", lambda self, flush, x: draws(self, max(flush - 1, 0), x)
    )
    caught(SHARED)


def test_last_output_from_the_stored_state(monkeypatch: pytest.MonkeyPatch) -> None:
    # o_L is read from the state being stored, before its cast; L = 1 here: every output
    run = lane.StepWindows.run

    def late(self, w, recur, read):  # type: ignore[no-untyped-def]
        state = run(self, w, recur, read)
        stored = state.half().to(state.dtype)
        self.results[w] = torch.einsum("bvk,bk->bv", stored, self.windows.q[w, :, 0])
        return state

    monkeypatch.setattr(lane.StepWindows, "run", late)
    caught(parse_policy("conventional:fp16"))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_decays_as_products(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # k/γ: overflows as soon as a window decays by more than the type's range.
    def quotients(self, k, *others):  # type: ignore[no-untyped-def]
        gamma = torch.exp(self.log).to(k.dtype)
        return [torch.matmul(x * gamma, (k / gamma).mT).tril() for x in others]

    monkeypatch.setattr(decays.WindowDecays, "products", quotients)
    compare([WHOLE], sample_inputs(kind, steps=75, half_lives=(50.0, 2000.0)))  # mild decay
    caught(WHOLE, kind=kind, half_lives=(0.01, 2000.0))


def test_folding_where_corrections_are_derived_again(monkeypatch: pytest.MonkeyPatch) -> None:
    of = lane.LaneKind.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        lane.LaneKind,
        "of",
        classmethod(lambda cls, *args: replace(of(cls, *args), rederive=False)),
    )
    caught(RECORDED)
    caught(WHOLE)
    caught(SHARED)
    compare([RECORDED, WHOLE], sample_inputs("mamba2", steps=75))  # nothing to derive
