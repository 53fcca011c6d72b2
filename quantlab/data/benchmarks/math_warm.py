"""Imports and first use of math-verify, done once in the process that grading workers fork from."""

from __future__ import annotations

import logging

from quantlab.data.benchmarks.math_grader import equal

logging.disable(logging.CRITICAL)  # math-verify warns of the missing timeouts at every call
equal(r"\frac{1}{2}+x", r"\sqrt{4} \cdot 0.5")  # parsers and simplifiers build tables on first use
