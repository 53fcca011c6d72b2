"""Train a zoo model on the books: `train("tiny-gdn", data=…, out=…, seconds=…)`.

A run is planned on a budget, of wall-clock seconds or of tokens. Its progress p in [0, 1] decides
sequence length (`Training.phases`) and rates (`rate_at`). `out` receives

    stable.pt            everything to go on with, taken where the decay of rates begins
    last.pt              the same, once a minute, until the run is finished
    train.csv            a row per `LOG_EVERY` steps
    config.json, model.safetensors, result.json, card.md

`resume=True` continues a run that was cut from last.pt and a finished one from stable.pt, under a
new budget: budgets add up, so the resumed run decays at the end of the sum. Crops depend on the
step alone. A resumed token-budget run on one machine repeats an unbroken one bit for bit where the
device's sums are deterministic (on a CPU they are, and it is tested).
"""

from __future__ import annotations

import csv
import json
import logging
import math
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from quantlab.errors import RunError, UsageError
from quantlab.models.zoo.card import write_card
from quantlab.models.zoo.corpus import Corpus, load_corpus
from quantlab.models.zoo.evaluate import Evaluation, evaluate
from quantlab.models.zoo.forward import Forward
from quantlab.models.zoo.initialise import hf_model, initial_weights, save_checkpoint
from quantlab.models.zoo.ops import training_ops
from quantlab.models.zoo.optimiser import Optimiser
from quantlab.models.zoo.problems import ProblemCorpus, ProblemSource, problem_corpus
from quantlab.models.zoo.recipe import TRAINABLE, Phase, ZooModel
from quantlab.models.zoo.schedule import Budget, phase_at, rate_at
from quantlab.models.zoo.solved import Solved, evaluate_problems
from quantlab.models.zoo.source import BookSource, Source

log = logging.getLogger(__name__)

LOG_EVERY = 100
"""Steps between rows of train.csv."""
VALIDATE_EVERY = 60.0
"""Seconds between validation losses."""

COLUMNS = (
    "step", "tokens", "seconds", "length", "loss_bits", "validation_bits", "rate", "grad_norm",
    "tokens_per_s",
)  # fmt: skip


def train(
    name: str,
    *,
    data: Path | None,
    out: Path,
    device: str = "cuda",
    seconds: float | None = None,
    tokens: int | None = None,
    resume: bool = False,
) -> Path:
    """Train a model of the zoo.

    Args:
        name: a key of `TRAINABLE`.
        data: directory with books-train.txt.xz and books-test/ (see `corpus.load_corpus`); None
            for a model of worked problems, which are made.
        out: directory of results, made if missing.
        device: torch device; anything but CUDA is for tests.
        seconds: budget in wall-clock seconds of this call; or
        tokens: in tokens of this call.
        resume: go on with the run in `out` (see `saved_state`).

    Returns:
        `out`, a checkpoint that transformers loads.

    Raises:
        UsageError: an unknown name, or nothing of this model in `out` to go on with.
        MissingAsset: books are missing.
        RunError: a damaged file, a file that cannot be written, or a loss that stopped being
            finite.
    """
    if name not in TRAINABLE:
        raise UsageError(f"no zoo model {name!r}; known: {', '.join(TRAINABLE)}")
    model = TRAINABLE[name]
    budget = Budget(seconds=seconds, tokens=tokens)
    begun = time.monotonic()
    corpus: Corpus | ProblemCorpus
    if model.problems is not None:
        if data is not None:
            raise UsageError(f"{name} is trained on worked problems, which are made: give no data")
        corpus = problem_corpus(model.problems)
        log.info("%s: problems made after %.1f s", name, time.monotonic() - begun)
    elif data is None:
        raise UsageError(f"{name} is trained on books: give their directory as data")
    else:
        corpus = load_corpus(data)
    try:
        run = Run(model, corpus, out, torch.device(device), budget, begun=begun)
        if resume:
            run.load(saved_state(out))
        run.loop()
        # Before the evaluation, which may still fail or be cut.
        save_checkpoint(run.model, run.optimiser.masters, out)
        run.finish(run.evaluate())
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error}") from error
    return out


def saved_state(out: Path) -> Path:
    """Name the state to go on from: last.pt of a run that was cut, else stable.pt.

    Raises:
        UsageError: there is neither.
    """
    for name in ("last.pt", "stable.pt"):
        if (out / name).is_file():
            return out / name
    raise UsageError(f"--resume: {out} has neither last.pt nor stable.pt to go on from")


class Run:
    """One training run.

    Args:
        model: the entry.
        corpus: the books, or the worked problems.
        out: directory of results.
        device: of weights and batches.
        budget: of this call.
        begun: `time.monotonic()` that a budget of seconds counts from.
        compiled: whether parts of the forward are compiled; on CUDA if None.
    """

    def __init__(
        self, model: ZooModel, corpus: Corpus | ProblemCorpus, out: Path, device: torch.device,
        budget: Budget, *, begun: float, compiled: bool | None = None,
    ) -> None:  # fmt: skip
        self.model, self.out, self.device, self.budget = model, out, device, budget
        self.hyper = model.training
        self.begun = begun
        out.mkdir(parents=True, exist_ok=True)
        shapes = {k: v.shape for k, v in hf_model(model).state_dict().items()}
        self.optimiser = Optimiser(model, initial_weights(model, shapes), device)
        scan, conv = training_ops(device)
        use = device.type == "cuda" if compiled is None else compiled
        self.forward = Forward(model, scan, conv, compiled=use)
        self.corpus = corpus
        self.source: Source
        if isinstance(corpus, Corpus):
            self.source = BookSource(corpus, self.hyper, device)
        else:
            self.source = ProblemSource(corpus, self.hyper, device)
        self.step, self.tokens, self.spent = 0, 0, 0.0
        self.rows: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = [{**asdict(budget), "resume": False}]
        self._tokens_before = 0
        self._saved_stable = False

    def load(self, path: Path) -> None:
        """Continue from a saved state.

        Raises:
            UsageError: it is another model's.
            RunError: it is damaged.
        """
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except (RuntimeError, EOFError, UnpicklingError) as error:
            raise RunError(f"{path} is damaged: {error}") from error
        if state["model"] != self.model.name:
            raise UsageError(f"{path} is a run of {state['model']}, not of {self.model.name}")
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.tokens, self.spent = state["step"], state["tokens"], state["spent"]
        self.rows = state["rows"]
        self.calls = [*state["calls"], {**asdict(self.budget), "resume": True}]
        self._tokens_before = self.tokens

    def save(self, path: Path) -> None:
        """Save everything needed to go on, whole or not at all."""
        temporary = path.with_suffix(".tmp")
        torch.save(
            {
                "model": self.model.name,
                "optimiser": self.optimiser.state_dict(),
                "step": self.step,
                "tokens": self.tokens,
                "spent": self.spent + self._elapsed(),
                "rows": self.rows,
                "calls": self.calls,
            },
            temporary,
        )
        temporary.replace(path)

    def loop(self) -> None:
        """Train until the budget is used."""
        self._warm: float | None = None
        total = torch.zeros((), device=self.device)
        since, mark, mark_tokens = 0, time.monotonic(), self.tokens
        validated = time.monotonic()
        while (progress := self._progress()) < 1.0:
            if progress >= 1.0 - self.hyper.decay_share and not self._saved_stable:
                self.save(self.out / "stable.pt")
                self._saved_stable = True
            phase = phase_at(self.hyper, progress)
            rate = rate_at(self.hyper, progress, self.step)
            loss, norm = self._one(phase, rate)
            total += loss
            since += 1
            if self._warm is None:
                self._sync()
                self._warm = mark = validated = time.monotonic()
                log.info("%s: first step after %.0f s", self.model.name, self._warm - self.begun)
                mark_tokens = self.tokens
            elif self.step % 8 == 0:
                self._sync()
            if self.step % LOG_EVERY == 0:
                bits = (total / since).item() / math.log(2.0)
                now = time.monotonic()
                check = None
                if now - validated > VALIDATE_EVERY:
                    check, validated = self.validate(), time.monotonic()
                    self.save(self.out / "last.pt")
                self._row(
                    phase,
                    bits,
                    check,
                    rate,
                    norm.item(),
                    (self.tokens - mark_tokens) / (now - mark),
                )
                total.zero_()
                since, mark, mark_tokens = 0, time.monotonic(), self.tokens
                if not math.isfinite(bits):
                    raise RunError(f"the loss is {bits} at step {self.step}")
        self._sync()
        self.spent += self._elapsed()

    def _one(self, phase: Phase, rate: float) -> tuple[Tensor, Tensor]:
        batch = self.source.batch(self.step, phase)
        loss = batch.mean(self.forward.losses(self.optimiser.leaves, batch.ids, batch.targets))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = self.optimiser.step(rate)
        self.step += 1
        self.tokens += phase.rows * phase.length
        return loss.detach(), norm

    def validate(self) -> float:
        """Bits per byte on text that is held out, at the weights as they are."""
        means = []
        for batch in self.source.validation():
            losses = self.forward.losses(self.optimiser.leaves, batch.ids, batch.targets)
            means.append(batch.mean(losses.detach()))
        return torch.stack(means).mean().item() / math.log(2.0)

    def evaluate(self) -> Evaluation | Solved:
        """Figures of the card, at the weights as the checkpoint holds them."""
        if isinstance(self.corpus, Corpus):
            return evaluate(
                self.forward, self.rounded(), self.corpus.test,
                unwrapped=self.hyper.unwrapped > 0.0,
            )  # fmt: skip
        assert isinstance(self.source, ProblemSource)
        return evaluate_problems(self.forward, self.rounded(), self.source)

    def rounded(self) -> Mapping[str, Tensor]:
        """Weights as the checkpoint will hold them: BF16 values, in the leaves' dtypes."""
        return {
            k: v.detach().to(torch.bfloat16).to(self.optimiser.leaves[k].dtype).requires_grad_()
            for k, v in self.optimiser.masters.items()
        }

    def finish(self, evaluation: Evaluation | Solved) -> None:
        """Write the checkpoint, the log, the figures and the card; last.pt has then served."""
        save_checkpoint(self.model, self.optimiser.masters, self.out)
        with (self.out / "train.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        result = {
            "model": self.model.name,
            "calls": self.calls,
            "parameters": sum(v.numel() for v in self.optimiser.masters.values()),
            "steps": self.step,
            "tokens": self.tokens,
            "training_seconds": round(self.spent, 1),
            "validation_bits": self.validate(),
            "test": evaluation.to_json(),
            "training": asdict(self.hyper),
            "environment": environment(self.device),
        }
        text = json.dumps(result, indent=1) + "\n"
        (self.out / "result.json").write_text(text, encoding="utf-8")
        write_card(self.model, result, self.out / "card.md")
        (self.out / "last.pt").unlink(missing_ok=True)

    def _progress(self) -> float:
        if self.budget.tokens is not None:
            return self.tokens / (self._tokens_before + self.budget.tokens)
        assert self.budget.seconds is not None
        if self._warm is None:
            return self.spent / (self.spent + self.budget.seconds)
        mine = self.budget.seconds - (self._warm - self.begun)
        return (self.spent + self._elapsed()) / (self.spent + mine)

    def _elapsed(self) -> float:
        return 0.0 if self._warm is None else time.monotonic() - self._warm

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _row(
        self, phase: Phase, bits: float, check: float | None, rate: float, norm: float, speed: float
    ) -> None:
        row = {
            "step": self.step, "tokens": self.tokens,
            "seconds": round(self.spent + self._elapsed(), 1),
            "length": phase.length, "loss_bits": round(bits, 5),
            "validation_bits": "" if check is None else round(check, 5),
            "rate": round(rate, 4), "grad_norm": round(norm, 4), "tokens_per_s": round(speed),
        }  # fmt: skip
        self.rows.append(row)
        log.info("%s %s", self.model.name, " ".join(f"{k}={v}" for k, v in row.items() if v != ""))


def environment(device: torch.device) -> dict[str, str]:
    """Versions and device of a run."""
    import transformers

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
    if device.type == "cuda":
        import triton

        found["triton"] = triton.__version__
    return found
