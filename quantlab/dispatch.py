"""The one place where quantlab reaches its Triton kernels, at call time.

`import quantlab` needs neither a GPU nor Triton. What runs is decided here by the device or by an
explicit choice, never by what happens to be installed: where the kernels are wanted and cannot be
had, an error says so, and nothing falls back to something slower or different. The name that a
study records is `implementation_name` of the class chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, get_args

import torch

from quantlab.errors import MissingAsset
from quantlab.replay.policy import Policy
from quantlab.replay.scan import WindowedScan

Implementation = Literal["auto", "torch", "triton"]
"""Which windowed scan: by device ("triton" on CUDA, "torch" elsewhere), or the one named."""


def scan_class(
    device: torch.device | str, implementation: Implementation = "auto"
) -> type[WindowedScan]:
    """Choose the windowed scan for a device.

    Args:
        device: where the inputs will be.
        implementation: "auto" takes the Triton kernels on CUDA and plain torch elsewhere.

    Returns:
        `WindowedScan` or its subclass on Triton.

    Raises:
        ValueError: no such implementation.
        MissingAsset: the kernels are wanted and Triton is not installed.
    """
    if _resolved(device, implementation) == "torch":
        return WindowedScan
    with _triton(f"the scan on {device}", "choose implementation='torch' to run the slower one"):
        from quantlab_kernels.triton_scan import TritonScan
    scan: type[WindowedScan] = TritonScan
    return scan


def decode_states(device: torch.device | str, implementation: Implementation = "auto") -> type[Any]:
    """Choose what holds and steps the recurrent states of a decoder's rows.

    Args:
        device: where the model is.
        implementation: "auto" takes the decode kernels on CUDA and plain torch elsewhere.

    Returns:
        A class of `quantlab.engine.decoder.RowStates`.

    Raises:
        ValueError: no such implementation.
        MissingAsset: the kernels are wanted and Triton is not installed.
    """
    if _resolved(device, implementation) == "torch":
        from quantlab.engine.rowwise_states import RowwiseStates

        return RowwiseStates
    with _triton(f"decoding on {device}", "choose implementation='torch' to run the slower one"):
        from quantlab_kernels.decode_states import KernelStates
    states: type[Any] = KernelStates
    return states


def compiling(jobs: int | None = None) -> AbstractContextManager[None]:
    """Compile the decode kernels that are launched inside a block, side by side; run nothing.

    Args:
        jobs: compilations at once; as many as processors if None.

    Raises:
        MissingAsset: Triton is not installed.
    """
    with _triton("decoding on a GPU", "decode on a CPU to try it without"):
        from quantlab_kernels.compiling import compiling as context
    block: AbstractContextManager[None] = context(jobs)
    return block


def decode_conv() -> Callable[..., Any]:
    """Hand out one token of the short convolution in front of a recurrence, on a GPU.

    Returns:
        `quantlab_kernels.decode_conv.conv_step`, for transformers' `causal_conv1d_update`.

    Raises:
        MissingAsset: Triton is not installed.
    """
    with _triton("decoding on a GPU", "decode on a CPU to try it without"):
        from quantlab_kernels.decode_conv import conv_step
    step: Callable[..., Any] = conv_step
    return step


def check_decodable(policies: Iterable[Policy]) -> None:
    """Refuse policies that the decode kernels do not have, before anything is loaded.

    Raises:
        UsageError: naming the policy or format and what there is.
        MissingAsset: Triton is not installed.
    """
    with _triton("decoding on a GPU", "the windowed engine runs without"):
        from quantlab_kernels.decode import check_policy
    for policy in policies:
        check_policy(policy)


def decode_trial() -> type[Any]:
    """Hand out one layer's decode cache filled with numbers, for benchmarks.

    Returns:
        `quantlab_kernels.decode_trial.Trial`.

    Raises:
        MissingAsset: Triton is not installed.
    """
    with _triton("measuring the decode kernels", "nothing else measures them"):
        from quantlab_kernels.decode_trial import Trial
    trial: type[Any] = Trial
    return trial


def decode_attention() -> type[Any]:
    """Hand out attention of one query a row over a cache at fixed addresses, on a GPU.

    Returns:
        `quantlab_kernels.decode_attention.DecodeAttention`.

    Raises:
        MissingAsset: Triton is not installed.
    """
    with _triton("decoding on a GPU", "decode on a CPU to try it without"):
        from quantlab_kernels.decode_attention import DecodeAttention
    attention: type[Any] = DecodeAttention
    return attention


def sampling_noise(device: torch.device) -> Callable[..., Any]:
    """Choose what draws the noise of sampling for every row of a step.

    Returns:
        `quantlab.engine.sampling.gumbel_rows`, or the kernel of the same on CUDA.

    Raises:
        MissingAsset: Triton is not installed.
    """
    if device.type != "cuda":
        from quantlab.engine.sampling import gumbel_rows

        return gumbel_rows
    with _triton("generation on a GPU", "generate on a CPU to try it without"):
        from quantlab_kernels.gumbel import gumbel_rows as kernel
    noise: Callable[..., Any] = kernel
    return noise


def training_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hand out the recurrence and the convolution that the zoo is trained with on a GPU.

    Returns:
        `chunk_any` and `conv_silu`, both differentiable.

    Raises:
        MissingAsset: Triton is not installed.
    """
    with _triton("training on a GPU", "train on a CPU to try it without"):
        from quantlab_kernels.chunk_any import chunk_any
        from quantlab_kernels.chunk_train_conv import conv_silu
    return chunk_any, conv_silu


def cast_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hand out the casts that write and read stored codes on a GPU.

    Returns:
        `encode` and `decode` of `quantlab_kernels.casts` and `decoders`: the stored form of what
        `quantlab.formats.encode` and `decode` do, bit for bit.

    Raises:
        MissingAsset: Triton is not installed.
    """
    with _triton("casting on a GPU", "quantlab.formats casts without"):
        from quantlab_kernels.casts import encode
        from quantlab_kernels.decoders import decode
    return encode, decode


def cast_launch() -> type[Any]:
    """Hand out the launch parameters of `cast_kernels`, for sweeps; no bit depends on them.

    Raises:
        MissingAsset: Triton is not installed.
    """
    with _triton("casting on a GPU", "quantlab.formats casts without"):
        from quantlab_kernels.casts import TileLaunch
    launch: type[Any] = TileLaunch
    return launch


def scan_launch() -> type[Any]:
    """Hand out the launch parameters of the Triton scan, for sweeps.

    Raises:
        MissingAsset: Triton is not installed.
    """
    with _triton("the scan on a GPU", "choose implementation='torch' to run the slower one"):
        from quantlab_kernels.scan_launch import ScanLaunch
    launch: type[Any] = ScanLaunch
    return launch


def _resolved(device: torch.device | str, implementation: str) -> str:
    """Resolve "auto" by the device.

    Raises:
        ValueError: no such implementation.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"unknown implementation {implementation!r}; known: "
            f"{', '.join(get_args(Implementation))}"
        )
    if implementation == "auto":
        return "triton" if torch.device(device).type == "cuda" else "torch"
    return implementation


@contextmanager
def _triton(what: str, instead: str) -> Iterator[None]:
    """Explain an import of kernels that fails for want of Triton."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise MissingAsset(
            f"{what} needs Triton, which is not installed (pip install 'quantlab[gpu]'); {instead}"
        ) from error


def implementation_name(scan: type[object]) -> str:
    """Name a scan class for a study's records: `quantlab_kernels.triton_scan.TritonScan`."""
    return f"{scan.__module__}.{scan.__qualname__}"
