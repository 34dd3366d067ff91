"""The autograd.Function of gathered logprobs, in which every backend runs."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.kernels.partials import Columns, Partials, RowStats
from mopd.kernels.vocab_parallel import Combined, combine


class Backend(Protocol):
    """What `torch_rows` and `gathered_logprob` both are."""

    def row_partials(
        self,
        logits_NV: Tensor,
        target_ids_N: Tensor,
        *,
        temperature: float,
        columns: Columns,
        entropy: bool,
    ) -> Partials: ...

    def write_gradient(
        self,
        logits_NV: Tensor,
        target_ids_N: Tensor,
        stats: RowStats,
        grad_N: Tensor,
        out_NV: Tensor,
        *,
        temperature: float,
        columns: Columns,
    ) -> None: ...


def score_rows(
    backend: Backend,
    logits_NV: Tensor,
    target_ids_N: Tensor,
    *,
    temperature: float,
    columns: Columns,
    group: dist.ProcessGroup | None,
    entropy: bool,
    teacher_logprobs_N: Tensor | None,
) -> Combined:
    """Everything about the targets of one shard's rows, by one read of the logits."""
    finished_scores = getattr(backend, "finished_scores", None)
    if group is None and finished_scores is not None:  # Triton does it all in one launch
        scores: Combined = finished_scores(
            logits_NV,
            target_ids_N,
            teacher_logprobs_N,
            temperature=temperature,
            columns=columns,
            entropy=entropy,
        )
        return scores
    partials = backend.row_partials(
        logits_NV, target_ids_N, temperature=temperature, columns=columns, entropy=entropy
    )
    return combine(
        partials,
        target_ids_N,
        temperature=temperature,
        group=group,
        teacher_logprobs_N=teacher_logprobs_N,
    )


class GatheredLogprobs(torch.autograd.Function):
    """(logits, target ids) -> (logprobs, entropies, logsumexps, advantages); only the first carries
    a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        target_ids_N: Tensor,
        teacher_logprobs_N: Tensor | None,
        backend: Backend,
        temperature: float,
        columns: Columns,
        group: dist.ProcessGroup | None,
        inplace_backward: bool,
        entropy: bool,
    ) -> tuple[Tensor | None, ...]:
        scores = score_rows(
            backend,
            logits_NV,
            target_ids_N,
            temperature=temperature,
            columns=columns,
            group=group,
            entropy=entropy,
            teacher_logprobs_N=teacher_logprobs_N,
        )
        stats = scores.stats
        ctx.save_for_backward(logits_NV, target_ids_N, stats.row_max_N, stats.log_sum_N)
        ctx.backend, ctx.temperature, ctx.columns = backend, temperature, columns
        ctx.inplace_backward, ctx.consumed = inplace_backward, False
        detached = (scores.entropy_N, scores.logsumexp_N, scores.advantage_N)
        ctx.mark_non_differentiable(*(t for t in detached if t is not None))
        return scores.logprobs_N, *detached

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
        begin_backward(ctx, "gathered_logprobs", "gathered_logprobs_reference")
        logits_NV, target_ids_N, row_max_N, log_sum_N = ctx.saved_tensors
        out_NV = gradient_buffer(ctx, logits_NV)
        ctx.backend.write_gradient(
            logits_NV.detach(),
            target_ids_N,
            RowStats(row_max_N, log_sum_N),
            grad_N,
            out_NV,
            temperature=ctx.temperature,
            columns=ctx.columns,
        )
        end_backward(ctx, out_NV)
        return out_NV, None, None, None, None, None, None, None, None


def begin_backward(ctx: Any, name: str, reference: str) -> None:
    """Refuses what cannot be: NotImplementedError under create_graph=True, RuntimeError for a
    second run in place. Before `ctx.saved_tensors`, whose own complaint would say less."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} has no second derivative (backward was called with create_graph=True); use "
            f"mopd.kernels.reference.{reference}."
        )
    if ctx.consumed:
        raise RuntimeError(
            f"{name}(inplace_backward=True) ran backward twice; the first run wrote the gradient "
            "over the logits. Pass inplace_backward=False to keep the graph."
        )
    ctx.consumed = ctx.inplace_backward


def gradient_buffer(ctx: Any, logits_NV: Tensor) -> Tensor:
    """Where the backward writes: the logits themselves if `ctx.inplace_backward`."""
    return logits_NV.detach() if ctx.inplace_backward else torch.empty_like(logits_NV)


def end_backward(ctx: Any, out_NV: Tensor) -> None:
    """Bumps the version of logits written in place: a Triton store is unseen by torch, and whoever
    else saved them must get an error."""
    if ctx.inplace_backward:
        torch.autograd.graph.increment_version(out_NV)
