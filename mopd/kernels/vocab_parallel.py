"""From per-shard partials to logprobs: the same few lines for one shard and for a TP group.

Two all-reduces per call, both of [N] or [<=4, N] numbers, whatever the vocabulary:

    M   = max_r m_r                         s = sum_r s_r exp((m_r - M) / T)
    log p(target) = (x_target - M) / T - log s
    H   = log s - sum_v ((x_v - M) / T) p_v                      (entropy, nats)

The backward needs no communication: with M and s of the whole vocabulary, each shard's gradient is
g / T * (onehot - softmax) on its own columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.errors import DataError
from mopd.kernels.partials import Partials, RowStats, shift_to
from mopd.kernels.reference import IGNORE


class Combined(NamedTuple):
    """Over the whole vocabulary, [N] each, equal on every rank; 0 in ignored rows."""

    logprobs_N: Tensor
    entropy_N: Tensor | None
    logsumexp_N: Tensor
    """log sum exp(logits / T)."""
    advantage_N: Tensor | None
    """teacher logprob - logprob, where the teacher's were given."""
    stats: RowStats


def combine(
    partials: Partials,
    target_ids_N: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None,
    teacher_logprobs_N: Tensor | None = None,
) -> Combined:
    """Every rank must call with the same target ids.

    An id that no shard owns (outside the valid vocabulary, and not IGNORE) raises DataError on CPU,
    on every rank alike; on an accelerator, where looking would stall the stream, its logprob is
    NaN.
    """
    row_max_N = all_reduced(partials.row_max_N.clone(), dist.ReduceOp.MAX, group)
    shift_N = shift_to(partials.row_max_N, partials.sum_exp_N, row_max_N, temperature)
    scale_N = shift_N.exp()
    sums = [scale_N * partials.sum_exp_N, partials.target_logit_N, partials.owned_N]
    if partials.weighted_N is not None:
        sums.append(scale_N * (partials.weighted_N + shift_N * partials.sum_exp_N))
    sums_KN = all_reduced(torch.stack(sums), dist.ReduceOp.SUM, group)
    sum_exp_N, target_logit_N, owned_N = sums_KN[0], sums_KN[1], sums_KN[2]

    live_N = target_ids_N != IGNORE
    stray_N = refuse_stray(live_N & (owned_N == 0), target_ids_N)
    log_sum_N = torch.where(live_N, sum_exp_N, 1.0).log()
    logprobs_N = (target_logit_N - row_max_N) / temperature - log_sum_N
    logprobs_N = torch.where(live_N, logprobs_N, 0.0).masked_fill(stray_N, float("nan"))
    entropy_N = None
    if partials.weighted_N is not None:
        entropy_N = torch.where(live_N, log_sum_N - sums_KN[3] / sum_exp_N, 0.0)
    advantage_N = None
    if teacher_logprobs_N is not None:
        advantage_N = torch.where(live_N, teacher_logprobs_N.to(logprobs_N) - logprobs_N, 0.0)
    logsumexp_N = row_max_N / temperature + log_sum_N
    return Combined(logprobs_N, entropy_N, logsumexp_N, advantage_N, RowStats(row_max_N, log_sum_N))


def several(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """`group`, or None where it is of one rank, which holds everything: nothing to reduce."""
    return None if group is None or dist.get_world_size(group) == 1 else group


def all_reduced(
    tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> Tensor:
    """`tensor` itself, reduced in place over `group` (None: one shard holds everything)."""
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def refuse_stray(stray: Tensor, ids: Tensor) -> Tensor:
    """`stray` (same shape as `ids`) back; on CPU DataError where any of it is true."""
    if stray.device.type == "cpu" and bool(stray.any()):
        place = tuple(int(i) for i in stray.nonzero()[0])
        raise DataError(
            f"target id {int(ids[place])} in row {place[0]} ({int(stray.sum())} such ids) is "
            f"outside the model's vocabulary; expected a token id of the student's tokenizer, or "
            f"{IGNORE} where there is no token. Drop the sample, or give the valid vocabulary "
            "that the ids belong to."
        )
    return stray
