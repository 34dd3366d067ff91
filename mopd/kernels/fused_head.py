"""Logprobs of given tokens from hidden states and the LM head, without the [N, V] logits.

    logits = hidden @ weight.T    d_hidden = d_logits @ weight    d_weight = d_logits.T @ hidden

Tile by tile (`mopd.kernels.head`), each tile read by the row kernel of `mopd.kernels.gathered`.
Shapes: N rows (tokens), H hidden size, V vocabulary rows of this rank's weights.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.kernels.autograd import Backend, begin_backward
from mopd.kernels.backends import choose_backend
from mopd.kernels.checks import check_head, check_temperature, shard_columns
from mopd.kernels.gathered import RowScores, check_teacher
from mopd.kernels.head import Head, HeadGradient, column_blocks, row_blocks
from mopd.kernels.partials import Columns, Partials, RowStats, concatenate, merge
from mopd.kernels.reference import IGNORE
from mopd.kernels.vocab_parallel import all_reduced, combine, several


def fused_head_scores(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_ids_N: Tensor,
    *,
    teacher_logprobs_N: Tensor | None = None,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    return_entropy: bool = False,
    logits_dtype: torch.dtype | None = None,
    reduce_hidden_grad: bool = True,
) -> RowScores:
    """`gathered.gathered_scores` of hidden @ weight.T, with gradients for hidden and weight.

    hidden_NH, weight_VH: float32, bfloat16 or float16 (float64 too by "torch"), one dtype. With
        `group`, every rank has the same hidden states and its own shard of the weights.
    target_ids_N: [N] int64. A row of `reference.IGNORE` (-1) gives exactly 0 and no gradient, but
        its share of the products is computed: select the rows that have a token first, they are
        only [N, H].
    logits_dtype: None rounds the logits to the weights' dtype, as an unfused head does;
        torch.float32 keeps them (an FP32 head), their gradient is in the weights' dtype either way.
    reduce_hidden_grad: each rank's d_hidden is its shard's part of a sum over `group`. True adds
        them up here; give False where the layer before does (Megatron's gather from a sequence
        parallel region with tensor_parallel_output_grad).

    The other arguments and errors are those of `gathered_scores`.
    """
    if target_ids_N.dim() != 1 or target_ids_N.dtype != torch.int64:
        raise ValueError(
            f"got target ids {tuple(target_ids_N.shape)} {target_ids_N.dtype}; expected [N] int64"
        )
    if target_ids_N.device != hidden_NH.device:
        raise ValueError(
            f"hidden states are on {hidden_NH.device}, target ids on {target_ids_N.device}"
        )
    check_head(hidden_NH, weight_VH, len(target_ids_N), logits_dtype)
    check_temperature(temperature)
    check_teacher(teacher_logprobs_N, target_ids_N)
    columns = shard_columns(weight_VH.shape[0], valid_vocab, vocab_start)
    logprobs_N, entropy_N, logsumexp_N, advantage_N = FusedHead.apply(
        hidden_NH,
        weight_VH,
        target_ids_N.contiguous(),
        teacher_logprobs_N,
        choose_backend(backend, hidden_NH.device.type),
        float(temperature),
        columns,
        several(group),
        return_entropy,
        logits_dtype,
        reduce_hidden_grad,
    )
    return RowScores(logprobs_N, logsumexp_N, entropy_N, advantage_N)


@overload
def fused_head_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_ids_N: Tensor,
    *,
    temperature: float = ...,
    valid_vocab: int | None = ...,
    vocab_start: int = ...,
    group: dist.ProcessGroup | None = ...,
    backend: str = ...,
    return_entropy: Literal[False] = ...,
    logits_dtype: torch.dtype | None = ...,
    reduce_hidden_grad: bool = ...,
) -> Tensor: ...


@overload
def fused_head_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_ids_N: Tensor,
    *,
    temperature: float = ...,
    valid_vocab: int | None = ...,
    vocab_start: int = ...,
    group: dist.ProcessGroup | None = ...,
    backend: str = ...,
    return_entropy: Literal[True],
    logits_dtype: torch.dtype | None = ...,
    reduce_hidden_grad: bool = ...,
) -> tuple[Tensor, Tensor]: ...


def fused_head_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_ids_N: Tensor,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    return_entropy: bool = False,
    logits_dtype: torch.dtype | None = None,
    reduce_hidden_grad: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """[N] logprobs of `fused_head_scores` (whose text tells the arguments); with `return_entropy`
    also the [N] entropies, without gradient."""
    scores = fused_head_scores(
        hidden_NH,
        weight_VH,
        target_ids_N,
        temperature=temperature,
        valid_vocab=valid_vocab,
        vocab_start=vocab_start,
        group=group,
        backend=backend,
        return_entropy=return_entropy,
        logits_dtype=logits_dtype,
        reduce_hidden_grad=reduce_hidden_grad,
    )
    if scores.entropy_N is None:
        return scores.logprobs_N
    return scores.logprobs_N, scores.entropy_N


class FusedHead(torch.autograd.Function):
    """(hidden, weight, target ids) -> (logprobs, entropies, logsumexps, advantages); only the first
    carries a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_ids_N: Tensor,
        teacher_logprobs_N: Tensor | None,
        backend: Backend,
        temperature: float,
        columns: Columns,
        group: dist.ProcessGroup | None,
        entropy: bool,
        logits_dtype: torch.dtype | None,
        reduce_hidden_grad: bool,
    ) -> tuple[Tensor | None, ...]:
        head = Head(hidden_NH, weight_VH, logits_dtype)
        partials = _partials(head, target_ids_N, backend, temperature, columns, entropy)
        scores = combine(
            partials,
            target_ids_N,
            temperature=temperature,
            group=group,
            teacher_logprobs_N=teacher_logprobs_N,
        )
        stats = scores.stats
        ctx.save_for_backward(hidden_NH, weight_VH, target_ids_N, stats.row_max_N, stats.log_sum_N)
        ctx.backend, ctx.temperature, ctx.columns = backend, temperature, columns
        ctx.logits_dtype, ctx.group = logits_dtype, group if reduce_hidden_grad else None
        ctx.inplace_backward = ctx.consumed = False
        detached = (scores.entropy_N, scores.logsumexp_N, scores.advantage_N)
        ctx.mark_non_differentiable(*(t for t in detached if t is not None))
        return scores.logprobs_N, *detached

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
        begin_backward(ctx, "fused_head_logprobs", "gathered_logprobs_reference")
        hidden_NH, weight_VH, target_ids_N, row_max_N, log_sum_N = ctx.saved_tensors
        # An ignored row may hold NaN, and 0 * NaN would reach every row of d_weight.
        hidden_NH = hidden_NH.masked_fill((target_ids_N == IGNORE).unsqueeze(1), 0.0)
        head = Head(hidden_NH, weight_VH, ctx.logits_dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        gradient = HeadGradient(head, hidden=needs_hidden, weight=needs_weight)
        rows = len(target_ids_N)
        for part in column_blocks(rows, ctx.columns.valid, head.dtype, hidden_NH.device.type):
            width = Columns(ctx.columns.start + part.start, part.stop - part.start)
            for block in row_blocks(rows):
                logits_nc = head.tile(block, part)
                out_nc = logits_nc
                if logits_nc.dtype != weight_VH.dtype:
                    out_nc = torch.empty_like(logits_nc, dtype=weight_VH.dtype)
                ctx.backend.write_gradient(
                    logits_nc,
                    target_ids_N[block],
                    RowStats(row_max_N[block], log_sum_N[block]),
                    grad_N[block],
                    out_nc,
                    temperature=ctx.temperature,
                    columns=width,
                )
                gradient.add(block, part, out_nc)
            gradient.end_columns(part)
        grad_NH = gradient.hidden_NH
        if grad_NH is not None:
            grad_NH = all_reduced(grad_NH, dist.ReduceOp.SUM, ctx.group).to(hidden_NH.dtype)
        return grad_NH, gradient.weight_VH, *[None] * 9


def _partials(
    head: Head,
    target_ids_N: Tensor,
    backend: Backend,
    temperature: float,
    columns: Columns,
    entropy: bool,
) -> Partials:
    """Of every row over this rank's columns, tiles merged as shards are."""
    rows = len(target_ids_N)
    blocks = []
    for block in row_blocks(rows):
        merged = None
        for part in column_blocks(rows, columns.valid, head.dtype, head.hidden_NH.device.type):
            partials = backend.row_partials(
                head.tile(block, part),
                target_ids_N[block],
                temperature=temperature,
                columns=Columns(columns.start + part.start, part.stop - part.start),
                entropy=entropy,
            )
            merged = partials if merged is None else merge(merged, partials, temperature)
        if merged is not None:
            blocks.append(merged)
    if blocks:
        return concatenate(blocks)
    # no row, or no valid column on this rank: what the backend says of an empty tile
    return backend.row_partials(
        head.tile(slice(None), slice(0, 0)),
        target_ids_N,
        temperature=temperature,
        columns=Columns(columns.start, 0),
        entropy=entropy,
    )
