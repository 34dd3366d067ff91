"""The torch backend: partials and gradient in chunks of rows, so that temporaries stay small.

Works on every device and dtype, float64 included. Shapes: N rows, V columns of this shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mopd.kernels.partials import Columns, Partials, RowStats
from mopd.kernels.reference import IGNORE

CHUNK_ELEMENTS = 1 << 20
"""Logits per chunk: 4 MiB of float32, which stays in a CPU's cache."""


def accumulator_dtype(logits: Tensor) -> torch.dtype:
    """float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(rows: int, columns: int) -> range:
    return range(0, rows, max(1, CHUNK_ELEMENTS // max(1, columns)))


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

    chunks = _chunks(rows, columns.valid)
    for begin in chunks:
        part = slice(begin, begin + chunks.step)
        logits = logits_NV[part, : columns.valid]
        max_n = logits.amax(dim=1, keepdim=True).to(dtype)
        scaled = logits - torch.where(max_n == float("-inf"), 0.0, max_n)
        if temperature != 1.0:
            scaled.div_(temperature)
        exps = scaled.exp() if entropy else scaled.exp_()
        row_max_N[part] = max_n.squeeze(1)
        sum_exp_N[part] = exps.sum(dim=1)
        if weighted_N is not None:
            # where: -inf * exp(-inf) is NaN, its limit is 0
            weighted_N[part] = torch.where(exps == 0, 0.0, scaled.mul_(exps)).sum(dim=1)
        picked = logits.gather(1, torch.where(owned_N, local_N, 0)[part].unsqueeze(1)).squeeze(1)
        target_logit_N[part] = torch.where(owned_N[part], picked.to(dtype), 0.0)
    for tensor in (row_max_N, sum_exp_N, weighted_N):
        if tensor is not None:
            tensor.masked_fill_(~live_N, 0.0)
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
    scale_N = torch.where(live_N, grad_N.to(dtype), 0.0) / temperature
    local_N = target_ids_N - columns.start
    owned_N = live_N & (local_N >= 0) & (local_N < columns.valid)
    local_N = torch.where(owned_N, local_N, 0)
    dead_N1 = ~live_N.unsqueeze(1)

    out_NV[:, columns.valid :] = 0
    if columns.valid == 0:
        return
    chunks = _chunks(logits_NV.shape[0], columns.valid)
    for begin in chunks:
        part = slice(begin, begin + chunks.step)
        logits = logits_NV[part, : columns.valid]
        work = torch.sub(
            logits,
            stats.row_max_N[part].unsqueeze(1),
            # in place on float32 storage this chunk's logits are overwritten, nothing is made
            out=out_NV[part, : columns.valid] if out_NV.dtype == dtype else None,
        )
        if temperature != 1.0:
            work.div_(temperature)
        work.sub_(stats.log_sum_N[part].unsqueeze(1)).exp_()
        work.mul_(-scale_N[part].unsqueeze(1))
        work.scatter_add_(1, local_N[part].unsqueeze(1), (scale_N * owned_N)[part].unsqueeze(1))
        work.masked_fill_(dead_N1[part], 0.0)  # NaN logits of an ignored row: 0 * NaN is not 0
        if out_NV.dtype != dtype:
            out_NV[part, : columns.valid] = work
