"""Numerics and quantization study toolkit for the recurrent state of hybrid language models.

The main job in three lines, as `quantlab kl` does it::

    import quantlab
    result = quantlab.kl("tiny-gdn", ["shared:nvfp4-sr", "nvfp4/fp16-sr"], tokens=4096)
    print(result)                       # the table; result.rows and result.summary are Arrow tables

Importing this package loads neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantlab.replay import Policy
    from quantlab.study import Result

__all__ = ["kl"]


def kl(
    model: str,
    policies: Sequence[str | Policy] | str = "replayssm",
    *,
    out: Path | str | None = None,
    resume: bool = False,
    figures: bool = True,
    **options: Any,
) -> Result:
    """Measure KL from FP32-state decoding of a model under low-precision states.

    Args:
        model: zoo name, preset, directory or hub id.
        policies: policies by name (`shared:nvfp4-sr`, `nvfp4/fp16-sr L=32`, `conventional:fp8`),
            or the name of a suite. `shared:fp32`, the noise floor, is added if it is not there.
        out: run directory; None for `runs/kl-<model>-<N>-<hash of the study>`.
        resume: go on with the run in `out`, if there is one.
        figures: draw figures and `index.html` into `out`.
        options: further fields of `quantlab.study.KlSpec`: tokens, streams, data, prompt, engine,
            seed, device, dtype, batch_rows, segment.

    Returns:
        The result; `print` shows its table.

    Raises:
        quantlab.errors.QuantlabError: with a message for the user; see `quantlab.study.run_kl`.
    """
    from quantlab.study.build import build_spec, default_directory
    from quantlab.study.run import run_kl

    spec = build_spec(model, policies, **options)
    result = run_kl(spec, default_directory(spec) if out is None else out, resume=resume)
    if figures:
        from quantlab.report.page import write_report

        write_report(result)
    return result
