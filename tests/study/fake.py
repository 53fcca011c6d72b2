"""A stand-in for models and engine: logits from a small recurrence, so that resuming must work."""

from types import SimpleNamespace

import torch

from quantlab.data import ByteTokenizer
from quantlab.engine import Measurement, Plan
from quantlab.replay.policy import parse_policy
from quantlab.study.backend import Backend
from quantlab.study.spec import KlSpec

VOCAB = 259
POLICIES = ("shared:fp32", "shared:fp16-sr", "shared:nvfp4-sr", "nvfp4/fp16-sr")


def make_spec(**changes):
    values = {
        "model": "tiny-gdn",
        "policies": tuple(parse_policy(p) for p in POLICIES),
        "tokens": 400,
        "streams": 3,
        "prompt": 8,
        "segment": 64,
    }
    return KlSpec(**{**values, **changes})


class FakeForcing:
    """s ← 0.95 s + noise(stream, t); the logits of policy p are off by 10^-p · s."""

    def __init__(self, spec, tokens, streams, positions, segment, hooks):
        self.spec, self.tokens, self.streams = spec, tokens, list(streams)
        self.positions = torch.tensor(positions)
        self.segment, self.hooks = segment, hooks
        self.rows = len(spec.policies) + 1
        self.state = torch.zeros(len(self.streams), VOCAB, dtype=torch.float64)
        self.done, self.last = 0, max(positions)

    def run(self, on_progress=None):
        while self.done < self.last:
            stop = min(self.done + self.segment, self.last)
            logits = {}
            for t in range(self.done + 1, stop + 1):
                logits[t] = self._step(t)
            wanted = self.positions[(self.positions > self.done) & (self.positions <= stop)]
            for chunk in wanted.split(40):
                self.hooks("measure", int(chunk[0]))
                yield Measurement(
                    positions=chunk,
                    logits=torch.stack([logits[int(t)] for t in chunk], dim=2),
                    targets=self.tokens[:, self.spec.prompt + chunk],
                    diverged_at=self._diverged(stop),
                )
            self.done = stop
            self.hooks("segment", stop)
            if on_progress is not None:
                on_progress(self.done, self.last)

    def _step(self, t):
        noise = torch.stack(
            [
                torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * s + t))
                for s in self.streams
            ]
        ).double()
        self.state = 0.95 * self.state + noise
        scale = torch.tensor([0.0, *(10.0**-p for p in range(1, self.rows))]).double()
        return (noise + scale[:, None, None] * self.state).float()

    def _diverged(self, stop):
        at = torch.full((self.rows, len(self.streams)), -1)
        if 1 in self.streams and stop >= 200:
            at[2, self.streams.index(1)] = 200
        return at

    def state_dict(self):
        return {"done": torch.tensor(self.done), "state": self.state}

    def load_state_dict(self, tensors):
        self.done, self.state = int(tensors["done"]), tensors["state"].clone()


class FakeBackend(Backend):
    """Counts what is asked of it; `hooks(event, t)` may raise, to play a kill."""

    def __init__(self, hooks=lambda event, t: None, identity=None, batch=1):
        self.hooks, self.batch = hooks, batch
        self.identity = identity or {"sha256": "abc", "torch": "2"}
        self.loads, self.restarts = 0, []

    def tokenizer(self, spec):
        return ByteTokenizer()

    def load(self, spec):
        self.loads += 1
        return SimpleNamespace(identity=self.identity, tokenizer=ByteTokenizer())

    def self_test(self, m):
        return [{"name": "stand-in", "passed": True}]

    def plan(self, m, spec, streams):
        step = self.batch
        batches = [list(range(i, min(i + step, streams))) for i in range(0, streams, step)]
        return Plan(stream_batches=batches, segment=spec.segment or 64, rows=9, bytes=1)

    def forcing(self, m, spec, tokens, *, streams, positions, segment):
        forcing = FakeForcing(spec, tokens, streams, positions, segment, self.hooks)
        self.restarts.append(streams)
        return forcing
