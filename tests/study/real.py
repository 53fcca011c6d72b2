"""The real engine on tiny random models, fed with packaged books taken modulo their vocabulary."""

import torch

from quantlab.study.backend import Backend
from tests.models.tiny import VOCAB, tiny


class SmallBytes:
    """Bytes modulo a small vocabulary."""

    bos_token_id = None
    name_or_path = "bytes modulo 96"

    def __call__(self, text, **_):
        return {"input_ids": [b % VOCAB for b in text.encode("utf-8")]}


class TinyBackend(Backend):
    """Everything real but the weights."""

    def __init__(self, family):
        self.family = family

    def tokenizer(self, spec):
        return SmallBytes()

    def load(self, spec):
        torch.manual_seed(0)
        return tiny(self.family)
