"""Write this folder's README.md from the rows of its runs: `python …/summarise.py`."""

from __future__ import annotations

from pathlib import Path

from quantlab.report.table import markdown_table, number, short_length, short_policy
from quantlab.study.result import Result, load_result

HERE = Path(__file__).parent
RUNS = (
    *("tiny-gdn-bf16", "tiny-mamba2-bf16", "tiny-kda-bf16"),
    *("tiny-gdn-fp32", "tiny-mamba2-fp32"),
)
SHARED, READ = "shared nvfp4-sr", "nvfp4"
INTRODUCTION = """\
# KL against generation length to 131,072 tokens, the zoo

Suite `replayssm` (L = 16) on the four packaged streams, prompt 512, seed 0, on one H200 with the
windowed engine on Triton. `bf16`: BF16 weights and activations, hence BF16 and FP16 records, as a
server has them. `fp32`: FP32 activations and records, so that nothing but the stored state is
rounded; the floor is then what the order of FP32 additions makes it.

    quantlab kl --model MODEL --suite replayssm --tokens 131072 --streams 4 --device cuda \\
        --dtype bf16|fp32 --segment 4096 --batch-rows 40 --out runs/MODEL-DTYPE

The runs are of the tree at 844929b, `tiny-kda-bf16` of 9e260fb and `tiny-gdn-fp32` of d553bf5; the
GPU of these two did other work beside them. `kernels-against-reference.txt` is `python -m
quantlab_kernels.smoke --quick` of the first: 37 comparisons of the kernels with the torch
reference, none failed. This page is written by `summarise.py` from the rows.
"""


def curve(result: Result, policy: str) -> dict[int, float]:
    """KL at every N of one policy, given by its short name."""
    points = result.summary.to_pylist()
    return {p["n"]: p["kl"] for p in points if short_policy(p["policy"]) == policy}


def tracking(result: Result, read: str) -> str:
    """How closely `read / fp16-sr` follows `read / fp32` over all N."""
    narrow, wide = curve(result, f"{read} / fp16-sr"), curve(result, f"{read} / fp32")
    ratios = {n: narrow[n] / wide[n] for n in wide}
    inside = sum(1 / 1.25 <= r <= 1.25 for r in ratios.values())
    worst = max(ratios, key=lambda n: max(ratios[n], 1 / ratios[n]))
    return f"{inside} of {len(ratios)}, worst {ratios[worst]:.2f} at {short_length(worst)}"


def claims(result: Result) -> list[str]:
    """One row of the table of claims."""
    shared, separate = curve(result, SHARED), curve(result, f"{READ} / fp32")
    floor = curve(result, "shared fp32")
    last = max(shared)
    return [
        short_length(last),
        f"{number(shared[16])} → {number(shared[last])} ({shared[last] / shared[16]:.0f}×)",
        f"{number(separate[16])} → {number(separate[last])} ({separate[last] / separate[16]:.1f}×)",
        f"{shared[last] / separate[last]:.0f}×",
        tracking(result, "nvfp4"),
        tracking(result, "fp8"),
        f"{number(separate[last] / floor[last])}×",
    ]


def main() -> None:
    """Write the page."""
    results = {name: load_result(HERE / name) for name in RUNS}
    header = [
        "run",
        "last N",
        "shared NVFP4, N = 16 → last",
        "NVFP4 / FP32, N = 16 → last",
        "shared ÷ separate at last N",
        "N at which NVFP4 / FP16-SR is within 1.25× of NVFP4 / FP32",
        "the same for FP8",
        "NVFP4 / FP32 ÷ floor",
    ]
    lines = [INTRODUCTION, "## What the paper expects, and what was measured", ""]
    lines += ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join([name, *claims(r)]) + " |" for name, r in results.items()]
    lines += [
        "",
        "The paper (Qwen3.5-4B, 128K): shared NVFP4 0.136, NVFP4 / FP32 0.0038, 36×; 13–29× on its",
        "other models; separate curves flat on GDN, a few times up on Mamba-2; FP16-SR recurrence",
        "within 1.25× of FP32 recurrence at every point but one, with one seed and four streams.",
    ]
    for name, result in results.items():
        seconds = sum(s["seconds"] for s in result.run["sessions"])
        state = "" if result.finished else ", interrupted"
        lines += [
            f"\n## {name}\n",
            f"{seconds:.0f} s of {result.run['sessions'][0]['made_with']['device']}{state}.\n",
            markdown_table(result.summary),
            f"\n![KL against N, {name}]({name}/kl.png)",
        ]
    (HERE / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
