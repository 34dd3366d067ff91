"""The torch backend of top-k buckets: the tail without the listed ids, in chunks of live rows.

Shapes: N rows, V columns of this shard, K listed ids a row, n rows of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mopd.kernels.chunks import live_chunks
from mopd.kernels.partials import Columns, RowStats, TailPartials
from mopd.kernels.torch_rows import accumulator_dtype, zero_dead_rows


def tail_partials(
    logits_NV: Tensor,
    local_NK: Tensor,
    live_N: Tensor,
    *,
    temperature: float,
    columns: Columns,
    entropy: bool,
) -> TailPartials:
    """Over the valid columns that are not listed.

    local_NK: int64 column of each listed id, -1 where it is unused or another shard's; no column
        twice in a row. Rows that are not live give 0 and cost nothing.
    """
    dtype = accumulator_dtype(logits_NV)
    tail_max_N = torch.zeros(logits_NV.shape[0], dtype=dtype, device=logits_NV.device)
    tail_max_N.masked_fill_(live_N, float("-inf"))
    sum_exp_N = torch.zeros_like(tail_max_N)
    weighted_N = torch.zeros_like(tail_max_N) if entropy else None
    picked_NK = torch.zeros(local_NK.shape, dtype=dtype, device=logits_NV.device)
    if columns.valid == 0:
        return TailPartials(tail_max_N, sum_exp_N, picked_NK, weighted_N)
    for part in live_chunks(live_N, columns.valid):
        logits_nV = logits_NV[part, : columns.valid]
        local_nK = local_NK[part]
        # to() copies, except for accumulator-wide logits taken by a slice
        work_nV = logits_nV.to(dtype, copy=isinstance(part, slice))
        picked_nK = work_nV.gather(1, local_nK.clamp(min=0))
        picked_NK[part] = torch.where(local_nK >= 0, picked_nK, 0.0)
        put(work_nV, local_nK, torch.full_like(picked_nK, float("-inf")))
        max_n1 = work_nV.amax(dim=1, keepdim=True)
        work_nV.sub_(torch.where(max_n1 == float("-inf"), 0.0, max_n1))
        if temperature != 1.0:
            work_nV.div_(temperature)
        exps_nV = work_nV.exp() if entropy else work_nV.exp_()
        tail_max_N[part] = max_n1.squeeze(1)
        sum_exp_N[part] = exps_nV.sum(dim=1)
        if weighted_N is not None:
            weighted_N[part] = torch.where(exps_nV == 0, 0.0, work_nV.mul_(exps_nV)).sum(dim=1)
    return TailPartials(tail_max_N, sum_exp_N, picked_NK, weighted_N)


def write_bucket_gradient(
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
) -> None:
    """out = g_k / T at the listed columns, g_tail / T * exp((x - m) / T - log s) at the others; 0
    in padded columns and in rows that are not live. `out_NV` may be `logits_NV`."""
    dtype = accumulator_dtype(logits_NV)
    out_NV[:, columns.valid :] = 0
    zero_dead_rows(out_NV, live_N)
    if columns.valid == 0:
        return
    for part in live_chunks(live_N, columns.valid):
        in_place = out_NV.dtype == dtype and isinstance(part, slice)
        work_nV = torch.sub(
            logits_NV[part, : columns.valid],
            tail_stats.row_max_N[part].unsqueeze(1),
            out=out_NV[part, : columns.valid] if in_place else None,
        )
        if temperature != 1.0:
            work_nV.div_(temperature)
        # At a listed column this may be inf: it is written again below
        work_nV.sub_(tail_stats.log_sum_N[part].unsqueeze(1)).exp_()
        work_nV.mul_(grad_tail_N[part].unsqueeze(1) / temperature)
        put(work_nV, local_NK[part], grad_NK[part].to(dtype) / temperature)
        if not in_place:
            out_NV[part, : columns.valid] = work_nV


def put(work_nV: Tensor, local_nK: Tensor, values_nK: Tensor) -> None:
    """`values_nK` at the listed columns, in place; -1 lists nothing."""
    # A slot that lists nothing must hit some column without harm: it repeats the row's last listed
    # one, or, where there is none, gives column 0 the value it has.
    top_n1, slot_n1 = local_nK.max(dim=1, keepdim=True)
    spare_n1 = torch.where(top_n1 >= 0, values_nK.gather(1, slot_n1), work_nV[:, :1])
    listed_nK = local_nK >= 0
    work_nV.scatter_(
        1,
        torch.where(listed_nK, local_nK, top_n1).clamp(min=0),
        torch.where(listed_nK, values_nK, spare_n1),
    )
