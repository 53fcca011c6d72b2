"""Summaries of made-up studies, for figures and tables."""

import math

import numpy as np
import pyarrow as pa

from quantlab.metrics.positions import lengths
from quantlab.metrics.summary import SUMMARY_SCHEMA
from quantlab.replay.policy import SUITES

POLICIES = [str(p) for p in SUITES["replayssm"]]
FLOOR = POLICIES[0]


def make_summary(tokens=4096, *, policies=POLICIES, diverge=None, floor=1e-7, streams=4):
    """KL of policy i: 10^-i growing with N; `diverge`: policy → N from which it diverged."""
    generator = np.random.default_rng(0)
    points = []
    for index, policy in enumerate(policies):
        for n in lengths(tokens):
            gone = bool(diverge and policy in diverge and n >= diverge[policy])
            kl = 10.0 ** -(index % 5 + 1) * (n / 16) ** 0.1 * math.exp(0.1 * generator.normal())
            kl = floor if policy == FLOOR else kl
            kl = math.nan if gone else kl
            points.append(
                {
                    "policy": policy,
                    "n": n,
                    "streams": streams,
                    "diverged": int(gone),
                    "kl": kl,
                    "kl_low": kl * 0.8 if streams > 1 else math.nan,
                    "kl_high": kl * 1.2 if streams > 1 else math.nan,
                    "kl_median": kl / 2,
                    "kl_p90": kl * 2,
                    "kl_p99": kl * 4,
                    "kl_p999": kl * 8,
                    "kl_max": kl * 16,
                    "excess_nll": kl / 3,
                    "top1_agreement": 0.99,
                    "floor": floor,
                }
            )
    return pa.Table.from_pylist(points, schema=SUMMARY_SCHEMA)
