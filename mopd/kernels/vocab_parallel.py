"""From per-shard partials to logprobs: the same few lines for one shard and for a TP group.

Two all-reduces per call, both of [N] or [<=4, N] numbers, whatever the vocabulary:

    M   = max_r m_r                         s = sum_r s_r exp((m_r - M) / T)
    log p(target) = (x_target - M) / T - log s
    H   = log s - sum_v ((x_v - M) / T) p_v                      (entropy, nats)

The backward needs no communication: with M and s of the whole vocabulary, each shard's gradient is
g / T * (onehot - softmax) on its own columns.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.errors import DataError
from mopd.kernels.partials import Partials, RowStats
from mopd.kernels.reference import IGNORE


def combine(
    partials: Partials,
    target_ids_N: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor | None, RowStats]:
    """([N] logprobs, [N] entropies or None, RowStats), equal on every rank of `group`.

    Every rank must call with the same target ids. An id that no shard owns (outside the valid
    vocabulary, and not IGNORE) raises DataError on CPU, on every rank alike; on an accelerator,
    where looking would stall the stream, its logprob is NaN.
    """
    row_max_N = partials.row_max_N
    if group is not None:
        row_max_N = row_max_N.clone()
        dist.all_reduce(row_max_N, op=dist.ReduceOp.MAX, group=group)

    # Where s = 0 (no finite logit in the shard) m is -inf, and -inf - M may be NaN: shift by 0, the
    # sum stays 0. Where s is NaN (NaN logits) the shift is 0 too and the NaN lives on.
    shift_N = torch.where(
        partials.sum_exp_N > 0, (partials.row_max_N - row_max_N) / temperature, 0.0
    )
    scale_N = shift_N.exp()
    sums = [scale_N * partials.sum_exp_N, partials.target_logit_N, partials.owned_N]
    if partials.weighted_N is not None:
        sums.append(scale_N * (partials.weighted_N + shift_N * partials.sum_exp_N))
    sums_KN = torch.stack(sums)
    if group is not None:
        dist.all_reduce(sums_KN, op=dist.ReduceOp.SUM, group=group)
    sum_exp_N, target_logit_N, owned_N = sums_KN[0], sums_KN[1], sums_KN[2]

    live_N = target_ids_N != IGNORE
    stray_N = live_N & (owned_N == 0)
    if stray_N.device.type == "cpu" and bool(stray_N.any()):
        row = int(stray_N.nonzero()[0])
        raise DataError(
            f"target id {int(target_ids_N[row])} in row {row} ({int(stray_N.sum())} such rows) is "
            f"outside the model's vocabulary; expected a token id of the student's tokenizer, or "
            f"{IGNORE} for a row without a token. Drop the sample, or give the valid vocabulary "
            "that the ids belong to."
        )
    log_sum_N = torch.where(live_N, sum_exp_N, 1.0).log()
    logprobs_N = (target_logit_N - row_max_N) / temperature - log_sum_N
    logprobs_N = torch.where(live_N, logprobs_N, 0.0).masked_fill(stray_N, float("nan"))
    entropy_N = None
    if partials.weighted_N is not None:
        entropy_N = torch.where(live_N, log_sum_N - sums_KN[3] / sum_exp_N, 0.0)
    return logprobs_N, entropy_N, RowStats(row_max_N, log_sum_N)
