"""Claims of ReplaySSM, arXiv 2610.13778, in the order of `Claims`: KL, rounding, window, theory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantlab.analysis.theory import Moments, deviation, isotropic_transition
from quantlab.analysis.traffic import paper_ratio
from quantlab.report.claims.evidence import (
    Claim,
    Evidence,
    Finding,
    Judge,
    Row,
    at,
    beyond,
    curve,
    interval,
    last,
    only,
    unmeasured,
    upto,
    verdict,
    watched,
    where,
)
from quantlab.report.table import number, short_length

# The last N from which a run speaks for "at long generation lengths".
LONG = 32_768
FROM = 1024
DELTA = ("gdn", "kda")
TWO_COPIES = ("fp8 / fp32", "nvfp4 / fp32")


def _apart(e: Evidence) -> Finding | None:
    shared, two = curve(e.kl, "shared nvfp4-sr"), curve(e.kl, "nvfp4 / fp32")
    common = sorted(set(shared) & set(two))
    if not common:
        return unmeasured("no run of both")
    n = common[-1]
    times = shared[n] / two[n]
    text = f"{number(shared[n])} ÷ {number(two[n])} = {number(times)}× {where(n)}"
    return Finding(ours=text, verdict=verdict(times >= 13)) if n >= LONG else unmeasured(text)


def _compounds(e: Evidence) -> Finding | None:
    found = {p: curve(e.kl, f"shared {p}-sr") for p in ("fp8", "nvfp4")}
    if not all(found.values()):
        return unmeasured("no run")
    rise = {p: c[max(c)] / c[min(c)] for p, c in found.items()}
    n = max(found["fp8"])
    text = ", ".join(f"{p} {number(x)}×" for p, x in rise.items())
    return Finding(
        ours=f"{text} from 16 to {short_length(n)}",
        verdict=verdict(min(rise.values()) > 2) if n >= LONG else "not measured",
    )


def _rise(low: float, high: float) -> Judge:
    def judge(e: Evidence) -> Finding | None:
        found = {p: curve(e.kl, p) for p in TWO_COPIES}
        if not all(found.values()):
            return unmeasured("no run")
        rise = {p: c[max(c)] / c[min(c)] for p, c in found.items()}
        n = max(found[TWO_COPIES[0]])
        text = ", ".join(f"{p} {number(x)}×" for p, x in rise.items())
        holds = all(low <= x <= high for x in rise.values())
        return Finding(
            ours=f"{text} from 16 to {short_length(n)}",
            verdict=verdict(holds) if n >= LONG else "not measured",
        )

    return judge


def _tracks(e: Evidence) -> Finding | None:
    worst, off, points = 0.0, 0, 0
    for read in ("fp8", "nvfp4"):
        half, full = curve(e.kl, f"{read} / fp16-sr"), curve(e.kl, f"{read} / fp32")
        ratios = [half[n] / full[n] for n in half if n in full]
        points += len(ratios)
        off += sum(max(r, 1 / r) > 1.25 for r in ratios)
        worst = max([worst, *(max(r, 1 / r) for r in ratios)])
    if not points:
        return unmeasured("no run of both")
    text = f"{points - off} of {points} points, worst {number(worst)}×"
    return Finding(ours=text, verdict=verdict(off <= 1))


def _reads(e: Evidence) -> Finding | None:
    fp8, nvfp4 = (curve(e.kl, p).get(16) for p in TWO_COPIES)
    if fp8 is None or nvfp4 is None:
        return unmeasured("no run")
    text = f"{number(nvfp4)} ÷ {number(fp8)} = {number(nvfp4 / fp8)}×"
    return Finding(ours=text, verdict=verdict(nvfp4 > 3 * fp8))


def _floor(e: Evidence) -> Finding | None:
    rows = last([r for r in e.kl if r["dtype"] != "float32" and r["floor"] == r["floor"]])
    if not rows:
        return unmeasured("no run with 16-bit activations")
    floor = rows[0]["floor"]
    text = f"{number(floor)} {where(rows[0]['n'])} ({rows[0]['dtype']})"
    return Finding(ours=text, verdict=verdict(1e-5 <= floor <= 1e-3))


def _short_ratio(fmt: str, most: float) -> Judge:
    def judge(e: Evidence) -> Finding | None:
        row = at(e.rounding, FROM, format=fmt)
        if row is None:
            return unmeasured("no run to N = 1K")
        text = f"{number(row['ratio'])} ({interval(row, 'ratio')}) at 1K"
        return Finding(ours=text, verdict=verdict(row["ratio"] <= most))

    return judge


def _crossing(e: Evidence) -> Finding | None:
    rows = [r for r in e.rounding if r["format"] == "fp8"]
    if not rows:
        return unmeasured("no run")
    final = rows[-1]
    crossed = [r["n"] for r in rows if r["ratio"] > 1 or r["rtn_diverged"]]
    if not crossed and final["n"] < 16_384:
        return unmeasured(f"ratio {number(final['ratio'])} {where(final['n'])}, the last N")
    text = f"first above one {where(crossed[0])}" if crossed else "never above one"
    return Finding(ours=text, verdict=verdict(bool(crossed) and crossed[0] <= 16_384))


def _rising(e: Evidence) -> Finding | None:
    texts, holds, n = [], [], 0
    for fmt in ("fp8", "nvfp4"):
        early, late = (
            at(e.rounding, FROM, format=fmt),
            last([r for r in e.rounding if r["format"] == fmt]),
        )
        if early is None or not late:
            return unmeasured("no run to N = 1K")
        n = late[0]["n"]
        diverged = late[0]["rtn_diverged"] > 0
        end = "div." if diverged else number(late[0]["ratio"])
        texts.append(f"{fmt} {number(early['ratio'])} → {end}")
        holds.append(diverged or late[0]["ratio"] > early["ratio"])
    text = f"{', '.join(texts)} {where(n)}"
    return Finding(ours=text, verdict=verdict(all(holds))) if n >= LONG else unmeasured(text)


def _half_precision(rule: Callable[[float], bool]) -> Judge:
    def judge(e: Evidence) -> Finding | None:
        rows = last([r for r in e.rounding if r["format"] == "fp16"])
        if not rows:
            return unmeasured("no run")
        row = rows[0]
        text = f"{number(row['ratio'])} ({interval(row, 'ratio')}) {where(row['n'])}"
        if row["n"] < LONG:
            return unmeasured(text)
        return Finding(ours=text, verdict=verdict(rule(row["ratio"])))

    return judge


def _rtn_diverges(e: Evidence) -> Finding | None:
    rows = last(e.rounding)
    if not rows or rows[0]["n"] < 131_072:
        n = short_length(rows[0]["n"]) if rows else "–"
        count = sum(r["rtn_diverged"] > 0 for r in rows)
        return unmeasured(f"{count} of {len(rows)} formats diverged by {n}")
    coarse = [r for r in rows if r["format"] in ("fp8", "nvfp4")]
    text = ", ".join(f"{r['format']}: {r['rtn_diverged']} of {r['streams']}" for r in coarse)
    holds = all(r["rtn_diverged"] and not r["sr_diverged"] for r in coarse)
    return Finding(ours=f"streams diverged: {text}", verdict=verdict(holds))


def _spread_only(e: Evidence) -> Finding | None:
    rows = [r for r in last(e.rounding) if r["seeds"] > 1 and r["bias"] == r["bias"]]
    if not rows:
        return unmeasured("needs a run with two seeds")
    shares = {r["format"]: r["bias"] / r["sr"] for r in rows}
    text = ", ".join(f"{f} {100 * share:.0f}%" for f, share in shares.items())
    return Finding(
        ours=f"bias share of SR's KL {where(rows[0]['n'])}: {text}",
        verdict=verdict(all(share < 0.25 for share in shares.values())),
    )


def _fall(policy: str, least: int, most: int, n: int) -> Judge:
    """KL falls from the shorter window to the longer one, by less than stores do."""

    def judge(e: Evidence) -> Finding | None:
        rows = [r for r in e.window if r["policy"] == policy and r["base_window"] == least]
        row = next((r for r in upto(rows, n) if r["window"] == most), None)
        if row is None:
            return unmeasured("no run")
        text = f"{number(row['fall'])}× ({interval(row, 'fall')}) {where(row['n'])}"
        if n >= LONG > row["n"]:
            return unmeasured(f"{text}, the last N")
        return Finding(ours=text, verdict=verdict(1 < row["fall"] < most / least))

    return judge


def _flat(e: Evidence) -> Finding | None:
    rows = [r for r in last(e.window) if "/" in r["policy"] and r["window"] == 64]
    rows = [r for r in rows if r["base_window"] == 4]
    if not rows:
        return unmeasured("no run")
    moved = {r["policy"]: max(r["fall"], 1 / r["fall"]) for r in rows}
    text = ", ".join(f"{name} {number(x)}×" for name, x in moved.items())
    return Finding(
        ours=f"{text} {where(rows[0]['n'])}", verdict=verdict(max(moved.values()) <= 1.25)
    )


def _folding(e: Evidence) -> Finding | None:
    rows = [r for r in last(e.correction) if r["policy"].startswith(("fp8 /", "nvfp4 /"))]
    if not rows:
        return unmeasured("no run")
    text = ", ".join(f"{r['policy']} {number(r['ratio'])}×" for r in rows)
    return Finding(
        ours=f"folded ÷ derived again {where(rows[0]['n'])}: {text}",
        verdict=verdict(all(r["ratio"] > 1.25 or r["fold_diverged"] for r in rows)),
    )


def _same_copies(e: Evidence) -> Finding | None:
    """Recurrence copies under other read formats, on the same inputs: recorded, or of layer 0."""
    same = [r for r in e.copies if r["inputs"] == "recorded" or r["layer"] == 0]
    by_way = {way: [r for r in same if r["corrections"] == way] for way in ("rederive", "fold")}
    if not all(by_way.values()):
        return unmeasured("no run of quantlab ablate copies")
    windows = max(r["windows"] for r in by_way["rederive"])
    apart = [r["first_difference"] for r in by_way["rederive"] if r["first_difference"] >= 0]
    folded = [r["first_difference"] for r in by_way["fold"]]
    again = f"differ from window {min(apart)}" if apart else f"identical over {windows:,} windows"
    first = f"from window {min(folded):,}" if min(folded) >= 0 else "not everywhere"
    return Finding(
        ours=f"derived again: {again}; folded: differ {first}",
        verdict=verdict(not apart and min(folded) >= 0),
    )


def _control(e: Evidence) -> Finding | None:
    if not e.correction:
        return unmeasured("no run")
    same = all(r["identical"] for r in e.correction)
    return Finding(ours="every row identical" if same else "rows differ", verdict=verdict(same))


def _bounded(points: Sequence[Row]) -> Finding:
    if not points:
        return unmeasured("no sweep (quantlab ablate folding)")
    outcomes = {
        decay: sorted({p["outcome"] for p in points if (p["decay"] < 1) == decay})
        for decay in (True, False)
    }
    text = f"decay < 1: {', '.join(outcomes[True])}; decay 1: {', '.join(outcomes[False])}"
    grows = {"grows", "diverges"}
    holds = not grows & set(outcomes[True]) and bool(grows & set(outcomes[False]))
    return Finding(ours=text, verdict=verdict(holds))


def _simulation(_: Sequence[Row]) -> Finding:
    bound = deviation(Moments(mean=0, variance=1), decay=0.999, window=16).variance
    rule = 1 / (1 - isotropic_transition(decay=0.999, beta=0.3, dk=32) ** 16)
    text = f"{number(rule)} against {number(bound)} (dk = 32, isotropic keys; simulated in tests)"
    return Finding(ours=text, verdict=verdict(abs(rule - 4) < 0.1 and abs(bound - 31.7) < 0.1))


def _traffic(_: Sequence[Row]) -> Finding:
    ratio = float(paper_ratio(dv=64, dk=128, window=16))
    return Finding(ours=f"{ratio:.3f}", verdict=verdict(abs(ratio - 0.58) < 0.005))


KL = (
    Claim(
        text="shared NVFP4 lies 36× above NVFP4 / FP32 at 128K, 13–29× on other models (rule: 13 "
        "or more)",
        source="§6",
        judge=_apart,
    ),
    Claim(
        text="the error of a shared low-precision copy compounds with N (rule: KL more than "
        "doubles from 16)",
        source="§6",
        judge=_compounds,
    ),
    Claim(
        text="Mamba-2: with two copies KL still rises a few times (rule: 1.5 to 10)",
        source="§6",
        judge=only("mamba2")(_rise(1.5, 10)),
    ),
    Claim(
        text="delta rule: with two copies KL does not grow (rule: at most 1.5×)",
        source="§6",
        judge=only(*DELTA)(_rise(0, 1.5)),
    ),
    Claim(
        text="FP16-SR recurrence tracks FP32 recurrence within 1.25× at every point but one",
        source="§6",
        judge=_tracks,
    ),
    Claim(
        text="NVFP4 reads cost 17 times FP8 reads at N = 16 (2e-2, 1.2e-3; rule: over 3)",
        source="E.4.3",
        judge=_reads,
    ),
    Claim(
        text="the floor, an FP32 replay, is about 1e-4 (rule: 1e-5 to 1e-3)",
        source="E.4.3",
        judge=_floor,
    ),
)
ROUNDING = (
    Claim(
        text="NVFP4: RTN gives 0.40–0.51 of SR's KL at 1K (rule: at most 0.51)",
        source="E.4.5",
        judge=_short_ratio("nvfp4", 0.51),
    ),
    Claim(
        text="FP8: RTN gives 0.59–1.1 of SR's KL at 1K (rule: at most 1.1)",
        source="E.4.5",
        judge=_short_ratio("fp8", 1.1),
    ),
    Claim(text="FP8: the ratio crosses one by 16K", source="E.4.5", judge=_crossing),
    Claim(
        text="FP8, NVFP4: RTN loses against SR as N grows (rule: ratio above that at 1K)",
        source="E.4.5",
        judge=_rising,
    ),
    Claim(
        text="FP16, Mamba-2: RTN gives 15× (32K) and 2.7× (128K) of SR's KL (rule: over 1.5)",
        source="E.4.5",
        judge=only("mamba2")(_half_precision(lambda x: x > 1.5)),
    ),
    Claim(
        text="FP16, GDN: at most 2.3×",
        source="E.4.5",
        judge=only("gdn")(_half_precision(lambda x: x <= 2.3)),
    ),
    Claim(
        text="GDN: RTN drives FP8 and NVFP4 states non-finite by 128K, SR stays finite",
        source="E.4.5",
        judge=only("gdn")(_rtn_diverges),
    ),
)
WINDOW = (
    *(
        Claim(
            text=f"shared {name}: KL falls {times}× from L = {least} to {most} at "
            f"{short_length(n)} (rule: it falls, by less than the stores)",
            source="E.4.4",
            judge=_fall(f"shared {fmt}-sr", least, most, n),
        )
        for name, fmt, times, least, most, n in (
            ("FP8", "fp8", "12", 1, 64, 1024),
            ("FP8", "fp8", "10", 1, 64, 131_072),
            ("FP8", "fp8", "3.8", 1, 16, 131_072),
            ("NVFP4", "nvfp4", "23", 1, 64, 1024),
            ("NVFP4", "nvfp4", "4.8", 1, 64, 131_072),
            ("NVFP4", "nvfp4", "2.6", 1, 16, 131_072),
        )
    ),
    Claim(
        text="two copies: KL moves 1.1–1.2× between L = 4 and 64 (rule: at most 1.25)",
        source="E.4.4",
        judge=_flat,
    ),
)
THEORY = (
    Claim(
        text="SR contributes variance only (rule: bias under a quarter of its KL)",
        source="C.6",
        judge=_spread_only,
    ),
    Claim(
        text="Mamba-2, SR: D² is Σγ²σ² under the gates (rule: within 10 %)",
        source="C.6",
        judge=only("mamba2")(
            watched("shared nvfp4-sr", "independent_ratio", lambda x: abs(x - 1) <= 0.1)
        ),
    ),
    Claim(
        text="Mamba-2: with the bias of a write, b Σγ, added (SR is biased where NVFP4 clips), "
        "D² is what theory says (rule: within 10 %)",
        source="C.6",
        judge=only("mamba2")(
            watched("shared nvfp4-sr", "predicted_ratio", lambda x: abs(x - 1) <= 0.1)
        ),
    ),
    Claim(
        text="the same, RTN",
        source="C.6",
        judge=only("mamba2")(
            watched("shared nvfp4", "predicted_ratio", lambda x: abs(x - 1) <= 0.1)
        ),
    ),
    Claim(
        text="delta rule, SR: Σγ²σ² is an upper bound",
        source="C.6",
        judge=only(*DELTA)(watched("shared nvfp4-sr", "independent_ratio", lambda x: x <= 1)),
    ),
    Claim(
        text="RTN's errors keep their sign: D² exceeds what independent errors give",
        source="C.6",
        judge=watched("shared nvfp4", "independent_ratio", lambda x: x > 1),
    ),
    Claim(
        text="a delta rule at β = 0.3, α = 0.999, L = 16: variance 4.0 against 31.7 without",
        source="C.6",
        once=_simulation,
    ),
    Claim(
        text="corrections derived again: the recurrence copy is the same bit for bit whatever is "
        "read; folded, it is not",
        source="B.4",
        judge=only(*DELTA)(_same_copies),
    ),
    Claim(
        text="corrections derived again: read errors never enter the recurrence (rule: D² under "
        "1e-9 of S² with NVFP4 reads)",
        source="B.4",
        judge=only(*DELTA)(watched("nvfp4 / fp32", "relative", lambda x: x < 1e-9)),
    ),
    Claim(
        text="cached corrections folded are the unstable variant (rule: KL 1.25 times or more)",
        source="B.4",
        judge=only(*DELTA)(_folding),
    ),
    Claim(
        text="folded, the error sums over all windows and is bounded only for decay below 1",
        source="B.4",
        once=_bounded,
    ),
    Claim(
        text="without a delta rule folding changes nothing",
        source="B.4",
        judge=only("mamba2")(_control),
    ),
    Claim(
        text="replay moves 0.58 of conventional decoding's bytes at dv = 64, dk = 128, L = 16",
        source="C.3",
        once=_traffic,
    ),
)
BEYOND = (
    beyond(
        "accuracy on MMLU-Pro, GPQA-Diamond, MATH and RULER follows KL (Table 12)",
        "E.4.6",
        "small models cannot do these tasks; quantlab eval runs them on the real ones",
    ),
    beyond(
        "the output-only kernel is 1.46–1.80× faster at B = 256, low-precision reads 1.6–3.8×",
        "Table 7",
        "a claim on time, not on errors: reports/performance",
    ),
    beyond(
        "speculative decoding: one state read a step, a write every L/ā (Table 3)",
        "§5",
        "no speculative decoding in this tree",
    ),
)
CLAIMS: tuple[Claim, ...] = (*KL, *ROUNDING, *WINDOW, *THEORY, *BEYOND)
