"""Muon for matrices and AdamW for the rest, over FP32 masters of the BF16 leaves autograd sees.

Muon: momentum, then the update replaced by its nearest semi-orthogonal matrix (five quintic
Newton–Schulz steps), batched over matrices of one shape. A fused projection is orthogonalised part
by part, as if it were several matrices. Source: Jordan et al. 2024, "Muon: an optimizer for hidden
layers in neural networks" (coefficients, Nesterov momentum, scale sqrt(max(1, rows / columns))).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantlab.models.zoo.recipe import Training, ZooModel

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x ← a x + b (xxᵀ) x + c (xxᵀ)² x. Source: Jordan et al. 2024."""

DECAYS = ("A_log", "dt_bias", "in_proj_a.weight", "f_a_proj.weight", "f_b_proj.weight")
"""Parameters of the decays and of what modulates them: at `Training.decay_lr`."""

NOT_MUON = (
    "embed", "lm_head", "norm", "conv1d", "in_proj_a", "in_proj_b", "forget_gate", ".b_proj",
)  # fmt: skip
"""Parts of names of matrices that AdamW has."""


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values of [n, rows, columns] matrices near 1; BF16 on a GPU."""
    a, b, c = COEFFICIENTS
    y: Tensor = x.to(torch.bfloat16) if x.is_cuda else x.float()
    tall = y.shape[-2] > y.shape[-1]
    if tall:
        y = y.mT
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.mT if tall else y


def matrix_parts(model: ZooModel, name: str, rows: int) -> tuple[int, ...] | None:
    """Say how Muon takes a parameter: sizes of its row blocks, or None if AdamW has it whole.

    Blocks of fewer than 16 rows go to AdamW too.
    """
    c = model.config
    if any(s in name for s in NOT_MUON):
        return None
    if not name.endswith(".weight"):
        return None
    if name.endswith("in_proj_qkv.weight"):
        keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        return (keys, keys, c["linear_num_value_heads"] * c["linear_value_head_dim"])
    if name.endswith("mixer.in_proj.weight"):
        inner, wide = (
            c["mamba_num_heads"] * c["mamba_head_dim"],
            c["n_groups"] * c["ssm_state_size"],
        )
        return (inner, inner, wide, wide, c["mamba_num_heads"])
    return (rows,)


class Optimiser:
    """Masters, leaves and both rules of one run.

    Args:
        model: the entry.
        weights: FP32 first weights; cloned.
        device: where masters and leaves live.
    """

    def __init__(
        self, model: ZooModel, weights: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.hyper: Training = model.training
        self.masters = {
            k: v.detach().to(device, torch.float32, copy=True) for k, v in weights.items()
        }
        low = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.leaves = {
            k: (v.to(low, copy=True) if v.dim() == 2 else v.clone()).requires_grad_()
            for k, v in self.masters.items()
        }
        self._groups: dict[tuple[int, int], list[tuple[str, slice]]] = {}
        adam: dict[str, list[tuple[str, slice]]] = {"embedding": [], "decay": [], "other": []}
        for name, p in self.masters.items():
            parts = matrix_parts(model, name, p.shape[0])
            if parts is None:
                kind = "decay" if name.endswith(DECAYS) else "other"
                adam["embedding" if "embed" in name else kind].append((name, slice(None)))
                continue
            first = 0
            for size in parts:
                where = slice(first, first + size)
                first += size
                if size < 16:  # Δ's rows of Mamba-2's projection
                    adam["decay"].append((name, where))
                else:
                    self._groups.setdefault((size, p.shape[1]), []).append((name, where))
        self._momenta = {s: torch.zeros(len(m), *s, device=device) for s, m in self._groups.items()}
        self._rates = {
            "embedding": self.hyper.embedding_lr,
            "decay": self.hyper.decay_lr,
            "other": self.hyper.adam_lr,
        }
        self._members = [(kind, m) for kind, ms in adam.items() for m in ms]
        self._views = [self.masters[n][w] for _, (n, w) in self._members]
        groups = [
            {
                "params": [
                    v for v, (k, _) in zip(self._views, self._members, strict=True) if k == kind
                ],
                "kind": kind,
            }
            for kind in adam
        ]
        self._adam = torch.optim.AdamW(
            groups, lr=1.0, betas=self.hyper.adam_betas, eps=1e-10, weight_decay=0.0,
            fused=device.type == "cuda",
        )  # fmt: skip

    def step(self, rate: float) -> Tensor:
        """Clip, update masters by `rate` times the recipe's rates, refresh leaves, clear gradients.

        Returns:
            0-d FP32 — the gradient norm before clipping.
        """
        names = list(self.leaves)
        grads = {n: self.leaves[n].grad for n in names}
        present = [g for g in grads.values() if g is not None]
        norm: Tensor = torch.stack(torch._foreach_norm(present, dtype=torch.float32)).norm()
        scale = (self.hyper.clip / (norm + 1e-6)).clamp(max=1.0)
        for shape, members in self._groups.items():
            self._muon(shape, members, grads, scale, rate)
        for (_, (name, where)), view in zip(self._members, self._views, strict=True):
            grad = grads[name]
            view.grad = None if grad is None else grad[where].float() * scale
        for group in self._adam.param_groups:
            group["lr"] = rate * self._rates[group["kind"]]
        self._adam.step()
        with torch.no_grad():
            torch._foreach_copy_([self.leaves[n] for n in names], [self.masters[n] for n in names])
        for leaf in self.leaves.values():
            leaf.grad = None
        return norm

    @torch.no_grad()
    def _muon(
        self, shape: tuple[int, int], members: list[tuple[str, slice]],
        grads: Mapping[str, Tensor | None], scale: Tensor, rate: float,
    ) -> None:  # fmt: skip
        h = self.hyper
        gradient = torch.stack([_present(grads[n])[w] for n, w in members]).float() * scale
        momentum = self._momenta[shape]
        momentum.lerp_(gradient, 1.0 - h.muon_momentum)
        update = orthogonalise(gradient.lerp(momentum, h.muon_momentum)).float()
        views = [self.masters[n][w] for n, w in members]
        lr = rate * h.muon_lr
        torch._foreach_mul_(views, 1.0 - lr * h.weight_decay)
        step = -lr * max(1.0, shape[0] / shape[1]) ** 0.5
        torch._foreach_add_(views, list(update.unbind()), alpha=step)

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on."""
        return {"masters": self.masters, "momenta": self._momenta, "adam": self._adam.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state, in place."""
        for mine, theirs in ((self.masters, state["masters"]), (self._momenta, state["momenta"])):
            for key, value in theirs.items():
                mine[key].copy_(value)
        self._adam.load_state_dict(state["adam"])
        for name, leaf in self.leaves.items():
            leaf.copy_(self.masters[name])


def _present(grad: Tensor | None) -> Tensor:
    if grad is None:
        raise RuntimeError("a matrix has no gradient: the forward does not use it")
    return grad
