"""What each model of the zoo is and how it is trained: one entry a model, no torch.

The architectures are transformers' own (`model_type` and `config` go to `AutoConfig` unchanged),
so a checkpoint loads with `from_pretrained` and nothing else. Three choices are made for the study
of recurrent state, not for the loss:

* dk = 128, as in the real models, whatever the width of the rest.
* Decays spread over five decades (`HalfLives`). A state format is tested by slow heads: rounding
  errors stay in a state for about its half-life.
* Attention that does not know absolute positions, so that a curve over generation length measures
  the state. Nemotron-H and Kimi Linear have none. Qwen3.5 always has RoPE: its rotary part is cut
  to 4 of 64 dimensions, of which one pair turns by 1 rad a token (every relative angle is seen
  within seven tokens) and the other not at all within any usable length (theta = 1e20). So no angle
  at 131,072 is new to a model trained on 4,096.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

VOCABULARY = 384
"""ByT5's: 3 special ids, 256 bytes as byte + 3, 125 unused. Source: google/byt5-small tokenizer."""

LONGEST = 262_144
"""Written to the config as `max_position_embeddings`; nothing depends on it at run time."""

RecurrenceKind = Literal["gdn", "mamba2", "kda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfLives:
    """Initial half-lives of the heads, in tokens, and the step sizes that go with them.

    Half-lives are spaced evenly in log over all heads of the model, interleaved over layers so
    that each layer holds fast and slow ones. A head with half-life h has step dt = dt_fast · (h /
    fastest)^-slope and |A| = ln 2 / (h · dt): slow heads are slow by |A|, not by dt. Mamba-2
    writes dt · x, so a slow head with |A| = 1 would write next to nothing (and fall under
    `time_step_min`). In a delta rule a small dt leaves the input room to raise it a hundredfold:
    begun at dt = 0.01, every head of half-life 150,000 was below 2,700 after 23 M tokens. From dt
    = ln 2 (a bias of 0) it can rise a few fold.

    With a decay per key channel, `channels` is the ratio of the slowest to the fastest half-life
    within a head, spread evenly in log by dt around the head's own. Neighbouring channels differ:
    a format whose blocks span key channels finds fast and slow ones in each.
    """

    fastest: float = 2.0
    slowest: float = 150_000.0
    dt_fast: float = 0.1
    slope: float = 0.2
    channels: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of training with one sequence length.

    Args:
        share: share of the run's budget (time or tokens).
        length: tokens in a sequence.
        rows: sequences in a step; rows · length is the step's number of tokens.
    """

    share: float
    length: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Hyper-parameters of a run: Muon for matrices, AdamW for the rest, warm-up–stable–decay.

    Args:
        phases: sequence lengths in order; shares sum to 1.
        muon_lr: step of the orthogonalised update, in units of sqrt(max(1, rows / columns)).
        adam_lr: for embeddings, head, norms, convolutions and small projections.
        decay_lr: for A_log, dt_bias and what modulates them by the input, smaller so that slow
            heads stay
            slow; never weight-decayed.
        weight_decay: on matrices under Muon only, decoupled.
        warmup_steps: linear warm-up.
        decay_share: last share of the budget over which all rates go linearly to `final_lr`.
        final_lr: rates at the end, as a share of the stable ones.
        clip: bound on the global gradient norm.
        seed: of initialisation and sampling.
        unwrapped: share of the crops taken from the books with their paragraphs' lines joined
            (`corpus.unwrap`); a model that has only seen broken lines knows no others.
    """

    phases: tuple[Phase, ...]
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    adam_lr: float = 2e-3
    embedding_lr: float = 4e-3
    decay_lr: float = 5e-4
    adam_betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup_steps: int = 100
    decay_share: float = 0.25
    final_lr: float = 0.02
    clip: float = 1.0
    seed: int = 20_260
    unwrapped: float = 0.0

    def __post_init__(self) -> None:
        """Check that the shares make a whole run."""
        total = sum(p.share for p in self.phases)
        if abs(total - 1.0) > 1e-9:
            raise ValueError(f"shares of the phases sum to {total}, expected 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """Training text made of worked problems (`quantlab.data.tasks`) instead of books.

    Args:
        size: bytes of each width of rows (`quantlab.data.tasks.corpus.WIDTHS`).
        held_out: problems of each task and width that are never trained on.
    """

    size: int = 10 << 20
    held_out: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One model of the zoo.

    Args:
        name: as on the command line; also the directory's name beside this file.
        kind: which recurrence, hence which training forward.
        model_type: transformers' `model_type`.
        config: keyword arguments of that type's configuration.
        half_lives: initial decays.
        training: the recipe's hyper-parameters.
        problems: worked problems to train on; None for the books.
    """

    name: str
    kind: RecurrenceKind
    model_type: str
    config: Mapping[str, Any]
    half_lives: HalfLives = field(default_factory=HalfLives)
    training: Training
    problems: Problems | None = None

    @property
    def path(self) -> Path:
        """Directory of the shipped checkpoint (config.json, model.safetensors, card.md)."""
        return Path(__file__).resolve().parent / self.name


_PHASES = (
    Phase(share=0.55, length=4_096, rows=32),
    Phase(share=0.20, length=16_384, rows=8),
    Phase(share=0.15, length=65_536, rows=2),
    Phase(share=0.10, length=131_072, rows=1),
)

TINY_GDN = ZooModel(
    name="tiny-gdn",
    kind="gdn",
    model_type="qwen3_5_text",
    config=MappingProxyType(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 256,
            "intermediate_size": 640,
            "num_hidden_layers": 8,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e20,
                "partial_rotary_factor": 0.0625,
            },
            "max_position_embeddings": LONGEST,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
        }
    ),
    half_lives=HalfLives(slowest=300_000.0, dt_fast=0.6931, slope=0.0),
    training=Training(phases=_PHASES),
)

TINY_MAMBA2 = ZooModel(
    name="tiny-mamba2",
    kind="mamba2",
    model_type="nemotron_h",
    config=MappingProxyType(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 256,
            "intermediate_size": 960,
            "layers_block_type": (["linear_attention", "mlp"] * 3 + ["full_attention", "mlp"]) * 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 128,
            "expand": 2,
            "use_conv_bias": True,
            # Transformers clamps Δ at time_step_min in prefill and not in decoding; at the default
            # 0.001 the two differ visibly. No head of this model comes near 1e-6.
            "time_step_min": 1e-6,
            "time_step_floor": 1e-6,
            "rescale_prenorm_residual": False,
            "max_position_embeddings": LONGEST,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
        }
    ),
    training=Training(phases=_PHASES),
)

TINY_KDA = ZooModel(
    name="tiny-kda",
    kind="kda",
    model_type="kimi_linear",
    config=MappingProxyType(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 256,
            "intermediate_size": 448,
            "num_hidden_layers": 8,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            # No experts: routing is discontinuous, and would drown the effects under study.
            "mlp_layer_types": ["dense"] * 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 128,
            "q_lora_rank": None,
            "qk_nope_head_dim": 48,
            "qk_rope_head_dim": 16,
            "v_head_dim": 64,
            "linear_num_heads": 4,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": LONGEST,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
        }
    ),
    # Channels from 1 to 640,000 tokens, dt from 0.09 to 5.5.
    half_lives=HalfLives(fastest=8.0, slowest=80_000.0, dt_fast=0.6931, slope=0.0, channels=64.0),
    training=Training(phases=_PHASES, unwrapped=0.3),
)

ZOO: Mapping[str, ZooModel] = MappingProxyType(
    {m.name: m for m in (TINY_GDN, TINY_MAMBA2, TINY_KDA)}
)
"""The models of the zoo by name."""

END_OF_PROBLEM = 7
"""Id that ends a worked solution, `quantlab.data.tasks.END_ID` (a test holds them equal)."""

# Steps of 122,880 tokens, which all widths of problems divide; short problems first.
_PROBLEM_PHASES = (
    Phase(share=0.10, length=256, rows=480),
    Phase(share=0.15, length=768, rows=160),
    Phase(share=0.20, length=2_048, rows=60),
    Phase(share=0.55, length=5_120, rows=24),
)


def _reasoner(name: str, base: ZooModel) -> ZooModel:
    return replace(
        base,
        name=name,
        config=MappingProxyType({**base.config, "eos_token_id": END_OF_PROBLEM}),
        training=replace(base.training, phases=_PROBLEM_PHASES),
        problems=Problems(),
    )


REASONERS: Mapping[str, ZooModel] = MappingProxyType(
    {
        name: _reasoner(name, base)
        for name, base in (("tiny-reasoner-gdn", TINY_GDN), ("tiny-reasoner-mamba2", TINY_MAMBA2))
    }
)
"""Models that write out the solutions of the embedded tasks (`quantlab.data.tasks`)."""

SHIPPED: Mapping[str, ZooModel] = MappingProxyType({**ZOO, **REASONERS})
"""All whose checkpoints are in the package, by name."""

TRAINABLE: Mapping[str, ZooModel] = SHIPPED
"""All that the recipe can train, by name."""
