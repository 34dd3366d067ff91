"""K listed ids a row and one bucket for all the others: logprobs of the K + 1, differentiable.

With x the raw logits, T the temperature, L the ids listed in a row and any constant M of the row:

    z_k    = (x_k - M) / T                                       for k in L
    z_tail = log sum_{v not in L} exp((x_v - M) / T)             summed without the listed ids
    log P  = log_softmax([z_L, z_tail])

The tail is a sum of its own, not 1 minus the rest, so it keeps its digits where the listed ids
have nearly all the mass. The kernels give z and its gradient in one read (forward) and one read
and write (backward) of the logits; everything after is [N, K + 1] and plain torch.

Shapes: N rows, V columns of this rank's vocabulary shard, K listed ids a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.kernels.autograd import begin_backward, end_backward, gradient_buffer
from mopd.kernels.backends import backend_module
from mopd.kernels.checks import check_rows, check_temperature, shard_columns
from mopd.kernels.partials import Columns, RowStats, TailPartials, shift_to
from mopd.kernels.vocab_parallel import all_reduced, refuse_stray, several

UNUSED = -1
"""Id of a slot without a token."""


class BucketBackend(Protocol):
    """What `torch_buckets` and `triton_buckets` both are."""

    def tail_partials(
        self,
        logits_NV: Tensor,
        local_NK: Tensor,
        live_N: Tensor,
        *,
        temperature: float,
        columns: Columns,
        entropy: bool,
    ) -> TailPartials: ...

    def write_bucket_gradient(
        self,
        logits_NV: Tensor,
        local_NK: Tensor,
        live_N: Tensor,
        tail_stats: RowStats,
        grad_NK: Tensor,
        grad_tail_N: Tensor,
        out_NV: Tensor,
        *,
        temperature: float,
        columns: Columns,
    ) -> None: ...


class BucketLogprobs(NamedTuple):
    """Logprobs (nats, float32; float64 for float64 logits) of K listed ids and of the rest.

    A row whose every slot is unused is ignored: exact zeros, no gradient, whatever its logits hold.
    """

    listed_NK: Tensor
    """log_softmax(logits / T)[id]; 0 in unused slots; the same in every repeat of an id."""
    tail_N: Tensor
    """log of the probability of all ids that are not listed; -inf where none is left."""
    counted_NK: Tensor
    """bool: the slot is used and is the first of its id in the row, so that each id counts once."""
    entropy_N: Tensor | None
    """Entropy over the whole vocabulary, without gradient; None unless asked for."""


def bucket_logprobs(
    logits_NV: Tensor,
    ids_NK: Tensor,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    inplace_backward: bool = False,
    return_entropy: bool = False,
) -> BucketLogprobs:
    """Logprobs of the listed ids and of the rest, differentiable in `logits_NV`.

    One call gives all that a top-k objective needs: list the sampled token beside the teacher's top
    k, and its logprob is its slot's.

    ids_NK: [N, K] int64, K >= 1. -1 marks an unused slot. An id may be listed twice in a row: it
        counts once (`counted_NK`), and the gradients of its slots add up.
    The other arguments and errors are those of `gathered.gathered_scores`; every rank of `group`
    calls with the same ids and sends the same gradients back.
    """
    if ids_NK.dim() != 2 or ids_NK.shape[1] < 1:
        raise ValueError(f"got ids {tuple(ids_NK.shape)}; expected [N, K] with K >= 1")
    check_rows(logits_NV, ids_NK, inplace_backward)
    check_temperature(temperature)
    columns = shard_columns(logits_NV.shape[1], valid_vocab, vocab_start)
    used_NK = ids_NK != UNUSED
    first_NK = first_slots(ids_NK)
    counted_NK = used_NK & (first_NK == torch.arange(ids_NK.shape[1], device=ids_NK.device))
    z_NK, z_tail_N, tail_entropy_N = TailBuckets.apply(
        logits_NV,
        torch.where(counted_NK, ids_NK, UNUSED),
        backend_module("buckets", backend, logits_NV.device.type),
        float(temperature),
        columns,
        several(group),
        inplace_backward,
        return_entropy,
    )
    z_listed_NK = z_NK.masked_fill(~counted_NK, float("-inf"))
    z_NB = torch.cat([z_listed_NK, z_tail_N.unsqueeze(1)], dim=1)
    log_sum_N1 = z_NB.logsumexp(dim=1, keepdim=True)
    # A repeat reads its first slot, to which autograd adds its gradient
    listed_NK = torch.where(used_NK, z_NK.gather(1, first_NK) - log_sum_N1, 0.0)
    tail_N = _tail_logprobs(z_listed_NK, z_tail_N)
    entropy_N = None
    if tail_entropy_N is not None:
        logp_NB = (z_NB - log_sum_N1).detach()
        p_NB = logp_NB.exp()
        coarse_N = -torch.where(p_NB == 0, 0.0, p_NB * logp_NB).sum(dim=1)
        entropy_N = coarse_N + p_NB[:, -1] * tail_entropy_N
    return BucketLogprobs(listed_NK, tail_N, counted_NK, entropy_N)


def _tail_logprobs(z_listed_NK: Tensor, z_tail_N: Tensor) -> Tensor:
    """[N] -log(1 + exp(d)), d the log odds of the listed ids against the tail.

    As exact for a tail of nearly all the mass as for one of nearly none, where z_tail minus the
    logsumexp of everything would be left with the rounding of two large numbers.
    """
    some_N = z_listed_NK.amax(dim=1) > float("-inf")
    # where before arithmetic: the logsumexp of nothing but -inf has a NaN gradient
    log_listed_N = torch.where(some_N.unsqueeze(1), z_listed_NK, 0.0).logsumexp(dim=1)
    odds_N = torch.where(some_N, log_listed_N - z_tail_N, float("-inf"))
    return -torch.logaddexp(torch.zeros_like(odds_N), odds_N)


def topk_logprobs(
    logits_NV: Tensor,
    ids_NK: Tensor,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> Tensor:
    """[N, K] log_softmax(logits / temperature)[ids], detached; 0 in unused slots (id -1).

    Arguments and errors as `bucket_logprobs`.
    """
    buckets = bucket_logprobs(
        logits_NV.detach(),
        ids_NK,
        temperature=temperature,
        valid_vocab=valid_vocab,
        vocab_start=vocab_start,
        group=group,
        backend=backend,
    )
    return buckets.listed_NK


def first_slots(ids_NK: Tensor) -> Tensor:
    """[N, K] int64: the first slot of the row with the same id, its own where there is none."""
    sorted_NK, slot_NK = ids_NK.sort(dim=1, stable=True)
    starts_NK = torch.ones_like(sorted_NK, dtype=torch.bool)
    starts_NK[:, 1:] = sorted_NK[:, 1:] != sorted_NK[:, :-1]
    place_K = torch.arange(ids_NK.shape[1], device=ids_NK.device)
    start_NK = torch.where(starts_NK, place_K, 0).cummax(dim=1).values
    return torch.empty_like(slot_NK).scatter_(1, slot_NK, slot_NK.gather(1, start_NK))


class TailBuckets(torch.autograd.Function):
    """(logits, ids) -> (z of the ids [N, K], z of the tail [N], the tail's own entropy or None).

    No id may be listed twice in a row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        ids_NK: Tensor,
        backend: BucketBackend,
        temperature: float,
        columns: Columns,
        group: dist.ProcessGroup | None,
        inplace_backward: bool,
        entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        used_NK = ids_NK != UNUSED
        live_N = used_NK.any(dim=1)
        local_NK = ids_NK - columns.start
        owned_NK = used_NK & (local_NK >= 0) & (local_NK < columns.valid)
        local_NK = torch.where(owned_NK, local_NK, UNUSED)
        partials = backend.tail_partials(
            logits_NV, local_NK, live_N, temperature=temperature, columns=columns, entropy=entropy
        )

        tail_max_N = all_reduced(partials.tail_max_N.clone(), dist.ReduceOp.MAX, group)
        shift_N = shift_to(partials.tail_max_N, partials.sum_exp_N, tail_max_N, temperature)
        scale_N = shift_N.exp()
        weighted_N = partials.weighted_N
        inside_N = torch.zeros_like(shift_N) if weighted_N is None else weighted_N
        inside_N = scale_N * (inside_N + shift_N * partials.sum_exp_N)
        sums_SN = torch.cat(
            [
                (scale_N * partials.sum_exp_N).unsqueeze(0),
                inside_N.unsqueeze(0),
                partials.picked_NK.t(),
                owned_NK.t().to(inside_N.dtype),
            ]
        )
        all_reduced(sums_SN, dist.ReduceOp.SUM, group)
        slots = ids_NK.shape[1]
        sum_exp_N, inside_N = sums_SN[0], sums_SN[1]
        picked_NK, owners_NK = sums_SN[2 : 2 + slots].t(), sums_SN[2 + slots :].t()
        stray_NK = refuse_stray(used_NK & (owners_NK == 0), ids_NK)

        listed_max_N = picked_NK.masked_fill(~used_NK, float("-inf")).amax(dim=1)
        row_max_N = torch.where(live_N, torch.maximum(listed_max_N, tail_max_N), 0.0)
        z_NK = (picked_NK - row_max_N.unsqueeze(1)) / temperature
        z_NK = z_NK.masked_fill(~used_NK, 0.0).masked_fill(stray_NK, float("nan"))
        z_tail_N = (tail_max_N - row_max_N) / temperature + sum_exp_N.log()
        z_tail_N = z_tail_N.masked_fill(~live_N, 0.0)
        tail_entropy_N = None
        empty_N = sum_exp_N == 0  # no tail, or an ignored row
        log_sum_N = sum_exp_N.masked_fill(empty_N, 1.0).log()
        if entropy:
            tail_entropy_N = torch.where(empty_N, 0.0, log_sum_N - inside_N / sum_exp_N)
            ctx.mark_non_differentiable(tail_entropy_N)
        # exp((x - 0) / T - 0) of an empty tail is 0: its every x is -inf
        tail_max_N = tail_max_N.masked_fill(empty_N, 0.0)
        ctx.save_for_backward(logits_NV, local_NK, live_N, tail_max_N, log_sum_N)
        ctx.backend, ctx.temperature, ctx.columns = backend, temperature, columns
        ctx.inplace_backward, ctx.consumed = inplace_backward, False
        return z_NK, z_tail_N, tail_entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_NK: Tensor, grad_tail_N: Tensor, _grad_entropy: Tensor | None
    ) -> tuple[Any, ...]:
        begin_backward(ctx, "bucket_logprobs", "topk_divergence_reference")
        logits_NV, local_NK, live_N, tail_max_N, log_sum_N = ctx.saved_tensors
        out_NV = gradient_buffer(ctx, logits_NV)
        ctx.backend.write_bucket_gradient(
            logits_NV.detach(),
            local_NK,
            live_N,
            RowStats(tail_max_N, log_sum_N),
            grad_NK.contiguous(),
            grad_tail_N.contiguous(),
            out_NV,
            temperature=ctx.temperature,
            columns=ctx.columns,
        )
        end_backward(ctx, out_NV)
        return out_NV, None, None, None, None, None, None, None
