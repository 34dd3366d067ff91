"""`gathered_logprobs`: logprobs of given tokens from logits, by the backend asked for.

Shapes: N rows (tokens), V columns of this rank's vocabulary shard.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from typing import Literal, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.errors import ConfigError
from mopd.kernels import torch_rows
from mopd.kernels.autograd import Backend, GatheredLogprobs
from mopd.kernels.partials import Columns

logger = logging.getLogger(__name__)

BackendName = Literal["auto", "triton", "torch"]


@overload
def gathered_logprobs(
    logits_NV: Tensor,
    target_ids_N: Tensor,
    *,
    temperature: float = ...,
    valid_vocab: int | None = ...,
    vocab_start: int = ...,
    group: dist.ProcessGroup | None = ...,
    backend: str = ...,
    inplace_backward: bool = ...,
    return_entropy: Literal[False] = ...,
) -> Tensor: ...


@overload
def gathered_logprobs(
    logits_NV: Tensor,
    target_ids_N: Tensor,
    *,
    temperature: float = ...,
    valid_vocab: int | None = ...,
    vocab_start: int = ...,
    group: dist.ProcessGroup | None = ...,
    backend: str = ...,
    inplace_backward: bool = ...,
    return_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def gathered_logprobs(
    logits_NV: Tensor,
    target_ids_N: Tensor,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    inplace_backward: bool = False,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """[N] log_softmax(logits / temperature)[target] in nats; with `return_entropy` also the [N]
    entropies of the same distributions, without gradient.

    logits_NV: float32, bfloat16 or float16 (float64 too by "torch"), any strides. Results and sums
        are float32 (float64 for float64).
    target_ids_N: int64 token ids; `reference.IGNORE` (-1) gives exactly 0 and no gradient, even
        where that row's logits are NaN.
    valid_vocab: size of the whole vocabulary; ids at or above it (padded LM-head rows) are outside
        the softmax. None: every column counts.
    vocab_start, group: this shard's first token id, and the tensor-parallel process group whose
        ranks hold the other shards. Every rank of the group calls with the same target ids, gets
        the same logprobs, and must send the same gradient back.
    backend: "auto" is Triton on CUDA and torch on CPU; the choice is logged once. Triton on CPU
        runs only in its interpreter (TRITON_INTERPRET=1). There is no fallback.
    inplace_backward: the backward writes the gradient over the logits' storage, so that no second
        [N, V] tensor exists. The caller promises that nothing reads the logits after it.

    Raises ValueError for shapes, dtypes or a temperature that break this contract, ConfigError for
    a backend that cannot run here, DataError (on CPU) for an id outside the vocabulary.
    """
    _check(logits_NV, target_ids_N, temperature, valid_vocab, vocab_start, inplace_backward)
    shard = logits_NV.shape[1]
    valid = shard if valid_vocab is None else min(max(valid_vocab - vocab_start, 0), shard)
    logprobs_N, entropy_N = GatheredLogprobs.apply(
        logits_NV,
        target_ids_N.contiguous(),
        choose_backend(backend, logits_NV.device.type),
        float(temperature),
        Columns(vocab_start, valid),
        group,
        inplace_backward,
        return_entropy,
    )
    return (logprobs_N, entropy_N) if return_entropy else logprobs_N


@functools.cache
def choose_backend(backend: str, device_type: str) -> Backend:
    """The module that computes on `device_type`; logs the choice the first time it is made."""
    if backend not in ("auto", "triton", "torch"):
        raise ConfigError(f"student.kernel is {backend!r}; expected 'auto', 'triton' or 'torch'.")
    name = backend
    if backend == "auto":
        name = "triton" if device_type == "cuda" else "torch"
    module: object = torch_rows if name == "torch" else _triton_backend(device_type)
    logger.info("logprob kernel: %s on %s (student.kernel: %s)", name, device_type, backend)
    return cast(Backend, module)


def _triton_backend(device_type: str) -> object:
    wants_interpreter = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y")
    if device_type != "cuda" and not wants_interpreter:
        raise ConfigError(
            f"student.kernel: triton was asked for on {device_type}; Triton compiles for CUDA "
            "only. Set student.kernel to torch (or auto), or TRITON_INTERPRET=1 before Python "
            "starts to run the kernel, very slowly, in Triton's interpreter."
        )
    try:
        from mopd.kernels import gathered_logprob
    except ImportError as error:
        raise ConfigError(
            f"the Triton logprob kernel was asked for on {device_type}, and triton does not "
            f"import ({error}). Install triton, or set student.kernel: torch."
        ) from error
    if device_type != "cuda" and not gathered_logprob.interpreted():
        raise ConfigError(
            "TRITON_INTERPRET=1 was set after triton had been imported, which is too late; set it "
            "in the environment before Python starts, or set student.kernel: torch."
        )
    return gathered_logprob


def _check(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    valid_vocab: int | None,
    vocab_start: int,
    inplace_backward: bool,
) -> None:
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"got logits {tuple(logits.shape)} and target ids {tuple(targets.shape)} "
            f"{targets.dtype}; expected [N, V] logits and [N] int64 target ids"
        )
    if not logits.is_floating_point():
        raise ValueError(f"got {logits.dtype} logits; expected a floating-point dtype")
    if logits.device != targets.device:
        raise ValueError(f"logits are on {logits.device}, target ids on {targets.device}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature is {temperature}; expected a finite number above 0 (the temperature "
            "the tokens were sampled at)"
        )
    if vocab_start < 0 or (valid_vocab is not None and valid_vocab < 1):
        raise ValueError(
            f"vocab_start is {vocab_start} and valid_vocab {valid_vocab}; expected >= 0 and >= 1"
        )
    overlapping = any(
        stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)
    )
    if inplace_backward and overlapping:
        raise ValueError(
            f"inplace_backward=True needs logits whose elements do not share memory; got strides "
            f"{logits.stride()} for shape {tuple(logits.shape)} (an expanded view)"
        )
