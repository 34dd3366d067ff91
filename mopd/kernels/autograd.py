"""The one autograd.Function that every backend runs in."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.kernels.partials import Columns, Partials, RowStats
from mopd.kernels.vocab_parallel import combine


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


class GatheredLogprobs(torch.autograd.Function):
    """(logits, target ids) -> (logprobs, entropies or None); the entropy carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        target_ids_N: Tensor,
        backend: Backend,
        temperature: float,
        columns: Columns,
        group: dist.ProcessGroup | None,
        inplace_backward: bool,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        partials = backend.row_partials(
            logits_NV, target_ids_N, temperature=temperature, columns=columns, entropy=entropy
        )
        logprobs_N, entropy_N, stats = combine(
            partials, target_ids_N, temperature=temperature, group=group
        )
        ctx.save_for_backward(logits_NV, target_ids_N, stats.row_max_N, stats.log_sum_N)
        ctx.backend, ctx.temperature, ctx.columns = backend, temperature, columns
        ctx.inplace_backward, ctx.consumed = inplace_backward, False
        if entropy_N is not None:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _grad_entropy: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # only under create_graph=True
            raise NotImplementedError(
                "gathered_logprobs has no second derivative (backward was called with "
                "create_graph=True); use mopd.kernels.reference.gathered_logprobs_reference."
            )
        if ctx.consumed:
            raise RuntimeError(
                "gathered_logprobs(inplace_backward=True) ran backward twice; the first run wrote "
                "the gradient over the logits. Pass inplace_backward=False to keep the graph."
            )
        logits_NV, target_ids_N, row_max_N, log_sum_N = ctx.saved_tensors
        if ctx.inplace_backward:
            ctx.consumed = True
            out_NV = logits_NV.detach()
        else:
            out_NV = torch.empty_like(logits_NV)
        ctx.backend.write_gradient(
            logits_NV.detach(),
            target_ids_N,
            RowStats(row_max_N, log_sum_N),
            grad_N,
            out_NV,
            temperature=ctx.temperature,
            columns=ctx.columns,
        )
        if ctx.inplace_backward:
            # A Triton store is unseen by torch; whoever else saved these logits must get an error.
            torch.autograd.graph.increment_version(out_NV)
        return out_NV, None, None, None, None, None, None, None
