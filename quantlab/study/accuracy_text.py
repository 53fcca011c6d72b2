"""Prompts of an accuracy study as ids, and its outputs as text, by the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quantlab.data.benchmarks.benchmark import Item
from quantlab.data.benchmarks.extraction import Thinking, thinking_of
from quantlab.data.ruler import RulerItem
from quantlab.data.tasks import END_ID, Problem
from quantlab.data.tokenize import ByteTokenizer
from quantlab.errors import UsageError
from quantlab.study.accuracy_spec import Asked

if TYPE_CHECKING:
    import torch


class Texts:
    """The questions of a study for one model.

    Args:
        m: the loaded model.
        asked: the questions.
        room: tokens that a prompt of RULER's may have; None where none is asked.

    Attributes:
        asked: the questions, RULER's fitted to the model's tokens.
        ids: of the questions.
        prompts: [T] int64 of each.
        name: of the tokenizer.
        stop_ids: that end an output.
        no_text: ids that stand for no text.
        thinking: how the chat template marks reasoning, None where it does not.

    Raises:
        UsageError: the model's tokenizer and the tasks do not fit, or no prompt fits the room.
    """

    def __init__(self, m: Any, asked: Sequence[Asked], room: int | None = None) -> None:
        import torch

        tokenizer = m.tokenizer
        eos = _eos(m)
        self.thinking: Thinking | None = None
        self.no_text: tuple[int, ...] = ()
        self._decode: Callable[[Any], str]
        byte_level = tokenizer is None or "byt5" in type(tokenizer).__name__.lower()
        byte_level = byte_level or isinstance(tokenizer, ByteTokenizer)
        kinds = {type(a.source) for a in asked}
        if Problem in kinds and not byte_level:
            raise UsageError("embedded tasks are for byte-level models, such as the zoo's")
        if Item in kinds and byte_level:
            raise UsageError("public benchmarks need a model with a tokenizer of its own")
        encode: Callable[[str], torch.Tensor]
        if byte_level:
            own: Any = ByteTokenizer()
            self.name = own.name
            self.stop_ids = sorted({*eos, END_ID})
            self.no_text = (0, 2)
            self._decode = own.decode
            encode = lambda prompt: torch.from_numpy(own.encode(prompt))  # noqa: E731
        else:
            self.name = str(getattr(tokenizer, "name_or_path", type(tokenizer).__name__))
            self.stop_ids = sorted({*eos, tokenizer.eos_token_id} - {None})
            self.no_text = tuple(
                i for i in (tokenizer.unk_token_id, tokenizer.pad_token_id)
                if i is not None and i not in self.stop_ids
            )  # fmt: skip
            self._decode = tokenizer.decode
            encode = lambda prompt: self._rendered(tokenizer, prompt)  # noqa: E731
        self.asked = [_fitted(a, room, encode) for a in asked]
        self.ids = [a.id for a in self.asked]
        self.prompts = [encode(a.source.prompt) for a in self.asked]

    def _rendered(self, tokenizer: Any, prompt: str) -> torch.Tensor:
        """Ids of a user's message, in the chat template where there is one."""
        import torch

        template = getattr(tokenizer, "chat_template", None)
        if template:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            self.thinking = thinking_of(template, prompt)
        return torch.tensor(tokenizer(prompt, add_special_tokens=not template)["input_ids"])

    def decode(self, ids: npt.NDArray[np.int32]) -> str:
        """Text of output ids."""
        return self._decode(ids.astype(np.int64))


def _fitted(a: Asked, room: int | None, encode: Callable[[str], torch.Tensor]) -> Asked:
    if not isinstance(a.source, RulerItem):
        return a
    if room is None:
        raise UsageError(f"{a.task} needs a length of its context")
    return replace(a, source=a.source.fitted(room, lambda text: len(encode(text))))


def _eos(m: Any) -> list[int]:
    """Stop ids of the model's generation settings, else of its configuration."""
    found = getattr(getattr(m.model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = m.model.config.get_text_config().eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)
