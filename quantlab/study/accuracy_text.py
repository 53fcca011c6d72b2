"""Prompts of an accuracy study as ids, and its outputs as text, by the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quantlab.data.benchmarks.extraction import Thinking, thinking_of
from quantlab.data.tasks import END_ID, Problem
from quantlab.data.tokenize import ByteTokenizer
from quantlab.errors import UsageError
from quantlab.study.accuracy_spec import Asked


class Texts:
    """Prompts to ids and outputs to text, by the model's own tokenizer and chat template."""

    def __init__(self, m: Any, asked: Sequence[Asked]) -> None:
        import torch

        self.ids = [a.id for a in asked]
        tokenizer = m.tokenizer
        own: Any = ByteTokenizer()
        embedded = {isinstance(a.source, Problem) for a in asked}
        eos = _eos(m)
        self.thinking: Thinking | None = None
        self.no_text: tuple[int, ...] = ()
        byte_level = tokenizer is None or "byt5" in type(tokenizer).__name__.lower()
        byte_level = byte_level or isinstance(tokenizer, ByteTokenizer)
        if True in embedded and not byte_level:
            raise UsageError("embedded tasks are for byte-level models, such as the zoo's")
        if byte_level:
            if False in embedded:
                raise UsageError("public benchmarks need a model with a tokenizer of its own")
            self.name = own.name
            self.stop_ids = sorted({*eos, END_ID})
            self.no_text = (0, 2)
            self.prompts = [torch.from_numpy(own.encode(a.source.prompt)) for a in asked]
            self._decode: Callable[[Any], str] = own.decode
            return
        self.name = str(getattr(tokenizer, "name_or_path", type(tokenizer).__name__))
        self.stop_ids = sorted({*eos, tokenizer.eos_token_id} - {None})
        self.no_text = tuple(
            i for i in (tokenizer.unk_token_id, tokenizer.pad_token_id)
            if i is not None and i not in self.stop_ids
        )  # fmt: skip
        self.prompts = []
        template = getattr(tokenizer, "chat_template", None)
        for a in asked:
            prompt = a.source.prompt
            if template:
                prompt = tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}],
                    tokenize=False,
                    add_generation_prompt=True,
                )
                self.thinking = thinking_of(template, prompt)
            ids = tokenizer(prompt, add_special_tokens=not template)["input_ids"]
            self.prompts.append(torch.tensor(ids))
        self._decode = tokenizer.decode

    def decode(self, ids: npt.NDArray[np.int32]) -> str:
        """Text of output ids."""
        return self._decode(ids.astype(np.int64))


def _eos(m: Any) -> list[int]:
    """Stop ids of the model's generation settings, else of its configuration."""
    found = getattr(getattr(m.model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = m.model.config.get_text_config().eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)
