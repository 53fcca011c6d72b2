"""Launches of the decode kernels: one table, looked up by family, format and batch.

Every entry says where it comes from. `origin="design"` is derived from the byte and instruction
counts of reports/decisions/0001-decode-kernels.md and has not been measured; SWEEP is
reports/performance/launches/decode.json: B = 256 on an H200, the shapes of Qwen3.5-4B,
Nemotron-3-Super-120B and Nemotron-3-Nano-4B, every case compared with the stepwise cache; AHEAD is
launches/ahead.json, likewise, where steps that overlap with what the heads share were faster too.
`python -m quantlab_kernels.decode_smoke` sweeps launches and prints the best of each.
"""

from dataclasses import dataclass

import torch
import triton

WEIGHTS_PER_SM = 16
"""Programs of one warp per multiprocessor that form what a flush knows without the states."""
SWEEP = "H200, launches/decode.json"
AHEAD = "H200, launches/ahead.json"
"""Origins of what was chosen by measurement."""
INTERPRETED_SMS = 2
"""Multiprocessors that the interpreter pretends to have: few, so that programs walk many items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaunch:
    """How an output-only step is cut.

    Attributes:
        block_v: state rows of a tile, which may span heads; 16 a warp and more keep a narrow
            format's codes in the lanes that need them.
        width: row elements side by side in a warp (fp32), at most dk.
        warps: of a program.
        registers: most registers of a thread; None leaves it to the compiler.
        overlap: whether its programs may start while what the heads share is still being formed.
        origin: "design", or the run that chose it.
    """

    block_v: int
    width: int = 32
    warps: int = 4
    registers: int | None = None
    overlap: bool = False
    origin: str = "design"


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLaunch:
    """How a flush or a conventional step is cut.

    Attributes:
        block_v: state rows of a tile; at least dv where a copy has a state scale. A flush with a
            decay per head: at least 16.
        tiles: of one program, of such a flush.
        warps: of a program.
        per_sm: programs per multiprocessor, of a flush.
        registers: most registers of a thread; None leaves it to the compiler.
        ahead: whether a program of such a flush asks the second-level cache for its next tile while
            it computes one.
        origin: "design", or the run that chose it.
    """

    block_v: int
    tiles: int = 1
    warps: int = 4
    per_sm: int = 4
    registers: int | None = None
    ahead: bool = False
    origin: str = "design"


STEP_TILES: dict[str, tuple[int, int | None]] = {
    "fp32": (64, 128),
    "fp16": (64, None),
    "bf16": (64, None),
    "fp8": (64, None),
    "nvfp4": (128, 80),
    "int8": (128, None),
    "int4": (128, None),
}
"""Rows of a step's tile and registers of a thread by the read copy's format, in a large batch."""
MEASURED_STEPS = ("fp32", "fp16", "fp8", "nvfp4")


def _power(n: int) -> int:
    return triton.next_power_of_2(n)


def step_launch(
    fmt: str, *, rows: int, heads: int, key_heads: int, dv: int, dk: int, per_channel: bool
) -> StepLaunch:
    """Choose the launch of an output-only step.

    Args:
        fmt: kernels' name of the read copy's format.
        rows: of the batch.
        heads: value heads.
        key_heads: key heads.
        dv: value width.
        dk: key width.
        per_channel: decay per key channel.
    """
    unit = dv if per_channel else dv * (heads // key_heads)
    block_v, registers = STEP_TILES[fmt]
    if rows * heads < 512:
        # too few heads to fill the device: small programs
        block_v = 16 if fmt == "fp32" else 32
        registers = 128 if fmt == "fp32" else None
    fits = min(block_v, _power(max(16, unit)))
    measured = fits == STEP_TILES[fmt][0] and fmt in MEASURED_STEPS and not per_channel
    return StepLaunch(
        block_v=fits,
        warps=max(1, min(4, fits // 16)),
        registers=registers,
        overlap=not per_channel,
        origin=SWEEP if measured else "design",
    )


def spanned_heads(block_v: int, *, dv: int, most: int) -> int:
    """Count the heads that the rows of one tile may belong to, heads being contiguous."""
    if dv % block_v == 0 or block_v % dv == 0:
        return min(max(1, block_v // dv), most)
    return min((block_v - 2) // dv + 2, most)


def flush_launch(
    formats: tuple[str, ...],
    *,
    rows: int,
    heads: int,
    dv: int,
    dk: int,
    per_channel: bool = False,
) -> TileLaunch:
    """Choose the launch of a flush.

    Args:
        formats: kernels' names of those of the copies that it stores.
        rows: of the batch.
        heads: value heads.
        dv: value width.
        dk: key width.
        per_channel: decay per key channel.
    """
    whole = max(16, _power(dv))
    warps = max(1, min(8, whole * dk // 2048))
    if per_channel:
        if "nvfp4" in formats:
            # 32 elements a thread, as the others: 64 need 251 registers
            return TileLaunch(block_v=whole, warps=max(4, min(16, whole * dk // 1024)), per_sm=1)
        return TileLaunch(block_v=min(32, whole), warps=4, per_sm=4, registers=128)
    large = rows * heads >= 512
    if "nvfp4" in formats:
        origin = AHEAD if large else "design"
        return TileLaunch(block_v=whole, warps=warps, per_sm=1, ahead=True, origin=origin)
    if set(formats) <= {"fp32", "fp16", "bf16"}:
        # a warp has the tiles of a head, one after another: no barriers, keys prepared once, and no
        # row computed in vain where dv is no power of two; of few heads, a tile
        return TileLaunch(
            block_v=16,
            tiles=-(-dv // 16) if large else 1,
            warps=1,
            per_sm=8,
            ahead=set(formats) == {"fp32"},
            origin=AHEAD if large else "design",
        )
    block_v = min(64, whole)
    tiles, per_sm = 1, 6
    if large and dv % block_v == 0 and dv > block_v:
        # two tiles of a program share what the rounding to a scaled format holds; one spills
        tiles, per_sm = dv // block_v, 3
    return TileLaunch(
        block_v=block_v,
        tiles=tiles,
        warps=min(4, warps),
        per_sm=per_sm,
        registers=168,
        origin=SWEEP if large else "design",
    )


def conventional_launch(fmt: str, *, rows: int, heads: int, dv: int, dk: int) -> TileLaunch:
    """Choose the launch of a conventional step."""
    whole = max(1, _power(dv))
    if fmt == "nvfp4":
        return TileLaunch(block_v=whole, warps=max(4, min(16, whole * dk // 1024)))
    block_v = 16 if dv % 32 or rows * heads < 512 else 32
    return TileLaunch(block_v=min(block_v, whole), warps=4)


def programs(items: int, per_sm: int, device: torch.device) -> int:
    """Choose how many programs share some items: as many each, and no more than fit at once."""
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        sms = INTERPRETED_SMS
    rounds = -(-items // (sms * per_sm))
    return max(1, -(-items // rounds))
