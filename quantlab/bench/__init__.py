"""Measured speed: casts, the scan and the engine, and whether committed results meet their targets.

`measure.py` times and refuses, `result.py` records, `casts.py`, `scan.py` and `engine.py` measure,
`targets.py` compares. Results are fractions of a copy measured in the same run, or ratios to rivals
installed beside.
"""
