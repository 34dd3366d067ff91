"""The torch backend of gathered logprobs: in chunks of live rows, so that temporaries stay small.

Works on every device and dtype, float64 included. Shapes: N rows, V columns of this shard, n rows
of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mopd.kernels.chunks import live_chunks
from mopd.kernels.partials import Columns, Partials, RowStats
from mopd.kernels.reference import IGNORE


def accumulator_dtype(logits: Tensor) -> torch.dtype:
    """float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def row_partials(
    logits_NV: Tensor,
    target_ids_N: Tensor,
    *,
    temperature: float,
    columns: Columns,
    entropy: bool,
) -> Partials:
    """Partials of every row; rows whose target is IGNORE are 0 whatever their logits hold."""
    rows = logits_NV.shape[0]
    dtype = accumulator_dtype(logits_NV)
    row_max_N = torch.zeros(rows, dtype=dtype, device=logits_NV.device)
    sum_exp_N = torch.zeros_like(row_max_N)
    target_logit_N = torch.zeros_like(row_max_N)
    weighted_N = torch.zeros_like(row_max_N) if entropy else None
    live_N = target_ids_N != IGNORE
    local_N = target_ids_N - columns.start
    owned_N = live_N & (local_N >= 0) & (local_N < columns.valid)
    if columns.valid == 0:
        row_max_N.masked_fill_(live_N, float("-inf"))
        return Partials(row_max_N, sum_exp_N, target_logit_N, owned_N.to(dtype), weighted_N)

    place_N = torch.where(owned_N, local_N, 0)
    for part in live_chunks(live_N, columns.valid):
        logits_nV = logits_NV[part, : columns.valid]
        max_n1 = logits_nV.amax(dim=1, keepdim=True).to(dtype)
        scaled_nV = logits_nV - torch.where(max_n1 == float("-inf"), 0.0, max_n1)
        if temperature != 1.0:
            scaled_nV.div_(temperature)
        exps_nV = scaled_nV.exp() if entropy else scaled_nV.exp_()
        row_max_N[part] = max_n1.squeeze(1)
        sum_exp_N[part] = exps_nV.sum(dim=1)
        if weighted_N is not None:
            # where: -inf * exp(-inf) is NaN, its limit is 0
            weighted_N[part] = torch.where(exps_nV == 0, 0.0, scaled_nV.mul_(exps_nV)).sum(dim=1)
        picked_n = logits_nV.gather(1, place_N[part].unsqueeze(1)).squeeze(1)
        target_logit_N[part] = torch.where(owned_N[part], picked_n.to(dtype), 0.0)
    return Partials(row_max_N, sum_exp_N, target_logit_N, owned_N.to(dtype), weighted_N)


def write_gradient(
    logits_NV: Tensor,
    target_ids_N: Tensor,
    stats: RowStats,
    grad_N: Tensor,
    out_NV: Tensor,
    *,
    temperature: float,
    columns: Columns,
) -> None:
    """out = g / T * (onehot - softmax), which may be `logits_NV` itself; 0 in padded columns."""
    dtype = accumulator_dtype(logits_NV)
    live_N = target_ids_N != IGNORE
    scale_N = grad_N.to(dtype) / temperature
    local_N = target_ids_N - columns.start
    owned_N = live_N & (local_N >= 0) & (local_N < columns.valid)
    place_N = torch.where(owned_N, local_N, 0)

    out_NV[:, columns.valid :] = 0
    zero_dead_rows(out_NV, live_N)  # also where their logits or gradient are NaN
    if columns.valid == 0:
        return
    for part in live_chunks(live_N, columns.valid):
        logits_nV = logits_NV[part, : columns.valid]
        in_place = out_NV.dtype == dtype and isinstance(part, slice)
        work_nV = torch.sub(
            logits_nV,
            stats.row_max_N[part].unsqueeze(1),
            # in place on float32 storage this chunk's logits are overwritten, nothing is made
            out=out_NV[part, : columns.valid] if in_place else None,
        )
        if temperature != 1.0:
            work_nV.div_(temperature)
        work_nV.sub_(stats.log_sum_N[part].unsqueeze(1)).exp_()
        work_nV.mul_(-scale_N[part].unsqueeze(1))
        scale_n = torch.where(owned_N[part], scale_N[part], 0.0)
        work_nV.scatter_add_(1, place_N[part].unsqueeze(1), scale_n.unsqueeze(1))
        if not in_place:
            # by index, torch does not convert on its own
            out_NV[part, : columns.valid] = work_nV.to(out_NV.dtype)


def zero_dead_rows(out_NV: Tensor, live_N: Tensor) -> None:
    """Exact zeros in the rows that are not live, without a temporary of their size."""
    out_NV.masked_fill_(~live_N.unsqueeze(1), 0.0)
