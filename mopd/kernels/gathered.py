"""Logprobs of given tokens from logits. Shapes: N rows (tokens), V columns of this rank's shard."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch.distributed as dist
from torch import Tensor

from mopd.kernels.autograd import GatheredLogprobs
from mopd.kernels.backends import choose_backend
from mopd.kernels.checks import check_rows, check_temperature, shard_columns
from mopd.kernels.vocab_parallel import several


class RowScores(NamedTuple):
    """What one read of the logits says of each row's target, [N] float32 each, in nats.

    Exactly 0 in ignored rows. Only the logprobs carry a gradient.
    """

    logprobs_N: Tensor
    """log_softmax(logits / T)[target]."""
    logsumexp_N: Tensor
    """log sum exp(logits / T) over the vocabulary."""
    entropy_N: Tensor | None
    """Of softmax(logits / T); None unless asked for."""
    advantage_N: Tensor | None
    """teacher logprob - logprob, the reverse-KL advantage; None without teacher logprobs."""


def gathered_scores(
    logits_NV: Tensor,
    target_ids_N: Tensor,
    *,
    teacher_logprobs_N: Tensor | None = None,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    inplace_backward: bool = False,
    return_entropy: bool = False,
) -> RowScores:
    """Everything about the targets in one pass over the logits.

    logits_NV: float32, bfloat16 or float16 (float64 too by "torch"), any strides. Results and sums
        are float32 (float64 for float64).
    target_ids_N: int64 token ids; `reference.IGNORE` (-1) gives exactly 0 and no gradient, even
        where that row's logits are NaN, and costs nothing.
    teacher_logprobs_N: [N] the teacher's logprobs of the same targets, for the advantage; may hold
        anything in ignored rows.
    valid_vocab: size of the whole vocabulary; ids at or above it (padded LM-head rows) are outside
        the softmax. None: every column counts.
    vocab_start, group: this shard's first token id, and the tensor-parallel process group whose
        ranks hold the other shards. Every rank of the group calls with the same target ids, gets
        the same scores, and must send the same gradient back.
    backend: "auto" is Triton on CUDA and torch on CPU; the choice is logged once. Triton on CPU
        runs only in its interpreter (TRITON_INTERPRET=1). There is no fallback.
    inplace_backward: the backward writes the gradient over the logits' storage, so that no second
        [N, V] tensor exists. The caller promises that nothing reads the logits after it.

    Raises ValueError for shapes, dtypes or a temperature that break this contract, ConfigError for
    a backend that cannot run here, DataError (on CPU) for an id outside the vocabulary.
    """
    if target_ids_N.dim() != 1:
        raise ValueError(f"got target ids {tuple(target_ids_N.shape)}; expected one per row")
    check_rows(logits_NV, target_ids_N, inplace_backward)
    check_temperature(temperature)
    check_teacher(teacher_logprobs_N, target_ids_N)
    columns = shard_columns(logits_NV.shape[1], valid_vocab, vocab_start)
    logprobs_N, entropy_N, logsumexp_N, advantage_N = GatheredLogprobs.apply(
        logits_NV,
        target_ids_N.contiguous(),
        teacher_logprobs_N,
        choose_backend(backend, logits_NV.device.type),
        float(temperature),
        columns,
        several(group),
        inplace_backward,
        return_entropy,
    )
    return RowScores(logprobs_N, logsumexp_N, entropy_N, advantage_N)


def check_teacher(teacher_logprobs_N: Tensor | None, target_ids_N: Tensor) -> None:
    """ValueError unless the teacher's logprobs lie beside the target ids."""
    if teacher_logprobs_N is None:
        return
    if (
        teacher_logprobs_N.shape != target_ids_N.shape
        or teacher_logprobs_N.device != target_ids_N.device
        or not teacher_logprobs_N.is_floating_point()
    ):
        raise ValueError(
            f"got teacher logprobs {tuple(teacher_logprobs_N.shape)} {teacher_logprobs_N.dtype} on "
            f"{teacher_logprobs_N.device}; expected {tuple(target_ids_N.shape)} floating-point "
            f"numbers on {target_ids_N.device}"
        )


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
    """[N] logprobs of `gathered_scores` (whose text tells the arguments); with `return_entropy`
    also the [N] entropies of the same distributions, without gradient."""
    scores = gathered_scores(
        logits_NV,
        target_ids_N,
        temperature=temperature,
        valid_vocab=valid_vocab,
        vocab_start=vocab_start,
        group=group,
        backend=backend,
        inplace_backward=inplace_backward,
        return_entropy=return_entropy,
    )
    if scores.entropy_N is None:
        return scores.logprobs_N
    return scores.logprobs_N, scores.entropy_N
