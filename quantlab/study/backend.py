"""What a study needs of models and the engine, in one place; imported when a run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quantlab.study.spec import KlSpec

if TYPE_CHECKING:
    from torch import Tensor

    from quantlab.engine import Measurement, Plan
    from quantlab.models import LoadedModel


class Forcing(Protocol):
    """A batch under way; `quantlab.engine.TeacherForcing` is one."""

    done: int

    def run(self, on_progress: Callable[[int, int], None] | None = None) -> Iterator[Measurement]:
        """Yield the measured positions in order."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything later segments depend on."""

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a state."""


class Backend:
    """Models and engine of this package."""

    def tokenizer(self, spec: KlSpec) -> Any:
        """Tokenizer of the model, found before any weight is read; None if it brings none.

        Raises:
            UsageError, MissingAsset, RunError: as loading the model would.
        """
        from quantlab.data import ByteTokenizer
        from quantlab.models.source import fetch, resolve

        source = resolve(spec.model)
        if source.origin == "zoo":
            return ByteTokenizer()
        source = fetch(source, weights=False)
        if source.path is None or not _has_tokenizer(source.path):
            return None
        import transformers

        return transformers.AutoTokenizer.from_pretrained(source.path, local_files_only=True)

    def load(self, spec: KlSpec) -> LoadedModel:
        """Load the model onto its device.

        Raises:
            UsageError: a policy that the engine does not have there; nothing has been loaded.
        """
        from quantlab.models import load_model

        if spec.engine == "stepwise" and spec.device.startswith("cuda"):
            from quantlab.dispatch import check_decodable

            check_decodable(spec.policies)
        return load_model(spec.model, device=spec.device, dtype=spec.dtype)

    def self_test(self, m: LoadedModel) -> list[dict[str, Any]]:
        """Require that the model keeps its history and that its op can be replaced.

        Returns:
            What was checked, with values and bounds, for provenance.

        Raises:
            RunError: with the table, if a check fails.
        """
        from quantlab.models.check import check_model

        report = check_model(m)
        report.raise_if_failed()
        return [asdict(row) for row in report.rows]

    def plan(self, m: LoadedModel, spec: KlSpec, streams: int) -> Plan:
        """Split the streams into batches."""
        from quantlab.engine import plan

        return plan(
            m,
            spec.policies,
            streams=streams,
            tokens=spec.tokens,
            prompt=spec.prompt,
            batch_rows=spec.batch_rows,
            segment=spec.segment,
            engine=spec.engine,
            device=spec.device,
        )

    def forcing(
        self,
        m: LoadedModel,
        spec: KlSpec,
        tokens: Tensor,
        *,
        streams: Sequence[int],
        positions: Sequence[int],
        segment: int,
    ) -> Forcing:
        """Set up one batch."""
        from quantlab.engine import DecodedForcing, TeacherForcing

        if spec.engine == "stepwise" and m.device.type == "cuda":
            return DecodedForcing(
                m,
                tokens,
                policies=spec.policies,
                stream_ids=streams,
                positions=positions,
                prompt=spec.prompt,
                seed=spec.seed,
            )
        return TeacherForcing(
            m,
            tokens,
            policies=spec.policies,
            stream_ids=streams,
            positions=positions,
            prompt=spec.prompt,
            segment=segment,
            seed=spec.seed,
            engine=spec.engine,
        )


def _has_tokenizer(path: Path) -> bool:
    return any(path.glob("tokenizer*")) or any(path.glob("vocab.*"))
