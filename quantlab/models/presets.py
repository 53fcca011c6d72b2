"""Short names of public checkpoints, with the hub repository each stands for.

How sure the repository names are is said with each: they were read from public pages, not fetched.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named public checkpoint.

    Attributes:
        hub_id: repository on the Hugging Face hub.
        summary: what it is, one line.
    """

    hub_id: str
    summary: str


PRESETS: dict[str, Preset] = {
    # Sure: the vendor's own naming (Qwen/Qwen3.5-<size>), dense, multimodal, post-trained.
    "qwen3.5-4b": Preset(
        hub_id="Qwen/Qwen3.5-4B",
        summary="Gated DeltaNet, 24 of 32 layers, 32 value heads of 128 × 128",
    ),
    # Sure: listed under this name on the hub and in vLLM's and NVIDIA's serving recipes.
    "qwen3.5-122b-a10b": Preset(
        hub_id="Qwen/Qwen3.5-122B-A10B",
        summary="Gated DeltaNet with experts, 48 layers of which 12 attention",
    ),
    # Sure: its model card's own title; 42 layers, four of them attention.
    "nemotron-3-nano-4b": Preset(
        hub_id="nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16",
        summary="Mamba-2 (Nemotron-H)",
    ),
    # Sure: listed on the hub; FP8 and NVFP4 siblings exist, and a -Base-BF16.
    "nemotron-3-super-120b-a12b": Preset(
        hub_id="nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        summary="Mamba-2 with latent experts (Nemotron-H)",
    ),
    # Sure of the name; the choice of Instruct over Base is ours.
    "kimi-linear-48b-a3b": Preset(
        hub_id="moonshotai/Kimi-Linear-48B-A3B-Instruct",
        summary="Kimi delta attention with experts, decay per key channel",
    ),
}
