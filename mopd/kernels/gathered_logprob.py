"""The Triton backend of gathered logprobs: one program per row, online softmax in float32.

Imported only when Triton is asked for. Reads the logits once in the forward (no [N, V] temporary)
and once in the backward, which may write over them; rows to be ignored are not read at all. Where
one shard holds the vocabulary, the forward's one launch also finishes the row's numbers: a dozen
small launches after it would cost a tenth of its time.

Shapes: N rows, V columns of this shard. Any strides; offsets are int64, since N * V passes 2^31 at
14,200 rows of a 151,936-token vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mopd.kernels.partials import Columns, Partials, RowStats
from mopd.kernels.reference import IGNORE
from mopd.kernels.triton_common import add_tile, check_dtype, load_tile, tile_size, warps
from mopd.kernels.vocab_parallel import Combined, refuse_stray

MAX_TILE = 8192


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]  # Triton infers them
    logits_ptr,
    target_ptr,
    row_max_ptr,
    sum_exp_ptr,
    target_logit_ptr,
    owned_ptr,
    weighted_ptr,
    teacher_ptr,
    advantage_ptr,
    stride_row,
    stride_column,
    inverse_temperature,
    column_start,
    columns,
    IGNORE_ID: tl.constexpr,
    ENTROPY: tl.constexpr,
    FINISH: tl.constexpr,
    TEACHER: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    row_max = float("-inf")
    sum_exp = 0.0
    weighted = 0.0
    target_logit = 0.0
    owned = 0.0
    if target == IGNORE_ID:
        row_max = 0.0
    else:
        base = logits_ptr + row * stride_row
        for begin in range(0, columns, TILE):
            column = begin + tl.arange(0, TILE)
            x = load_tile(base, column, stride_column, column < columns)
            row_max, sum_exp, weighted = add_tile(
                x, row_max, sum_exp, weighted, inverse_temperature, ENTROPY
            )
        local = target - column_start
        if (local >= 0) & (local < columns):
            target_logit = tl.load(base + local.to(tl.int64) * stride_column).to(tl.float32)
            owned = 1.0
    if FINISH:
        # The outputs in the partials' places: log sum, logprob, logsumexp, entropy, advantage
        log_sum = 0.0
        logprob = 0.0
        logsumexp = 0.0
        entropy = 0.0
        advantage = 0.0
        if target != IGNORE_ID:
            log_sum = tl.log(sum_exp)
            logprob = (target_logit - row_max) * inverse_temperature - log_sum
            logprob = tl.where(owned == 0.0, float("nan"), logprob)  # an id out of the vocabulary
            logsumexp = row_max * inverse_temperature + log_sum
            if ENTROPY:
                entropy = log_sum - weighted / sum_exp
            if TEACHER:
                advantage = tl.load(teacher_ptr + row).to(tl.float32) - logprob
        tl.store(row_max_ptr + row, row_max)
        tl.store(sum_exp_ptr + row, log_sum)
        tl.store(target_logit_ptr + row, logprob)
        tl.store(owned_ptr + row, logsumexp)
        if ENTROPY:
            tl.store(weighted_ptr + row, entropy)
        if TEACHER:
            tl.store(advantage_ptr + row, advantage)
    else:
        tl.store(row_max_ptr + row, row_max)
        tl.store(sum_exp_ptr + row, sum_exp)
        tl.store(target_logit_ptr + row, target_logit)
        tl.store(owned_ptr + row, owned)
        if ENTROPY:
            tl.store(weighted_ptr + row, weighted)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    target_ptr,
    row_max_ptr,
    log_sum_ptr,
    grad_ptr,
    out_ptr,
    stride_row,
    stride_column,
    out_stride_row,
    out_stride_column,
    inverse_temperature,
    column_start,
    columns,
    all_columns,
    IGNORE_ID: tl.constexpr,
    TILE: tl.constexpr,
):
    # One pass: a tile is read before it is written, so out_ptr may be logits_ptr.
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    row_max = tl.load(row_max_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    scale = tl.load(grad_ptr + row).to(tl.float32) * inverse_temperature
    local = target - column_start
    live = target != IGNORE_ID
    base = logits_ptr + row * stride_row
    out = out_ptr + row * out_stride_row
    for begin in range(0, all_columns, TILE):
        column = begin + tl.arange(0, TILE)
        valid = (column < columns) & live
        x = tl.load(base + column.to(tl.int64) * stride_column, mask=valid, other=float("-inf")).to(
            tl.float32
        )
        softmax = tl.exp((x - row_max) * inverse_temperature - log_sum)
        onehot = tl.where(column == local, 1.0, 0.0)
        # where, not a product: an ignored row's logits and gradient may be NaN
        grad = tl.where(valid, scale * (onehot - softmax), 0.0)
        tl.store(
            out + column.to(tl.int64) * out_stride_column,
            grad.to(out_ptr.dtype.element_ty),
            mask=column < all_columns,
        )


def row_partials(
    logits_NV: Tensor,
    target_ids_N: Tensor,
    *,
    temperature: float,
    columns: Columns,
    entropy: bool,
) -> Partials:
    """Partials of every row; same contract as `torch_rows.row_partials`, accumulated in float32."""
    numbers = _launch(logits_NV, target_ids_N, None, temperature, columns, entropy, finish=False)
    row_max_N, sum_exp_N, target_logit_N, owned_N, weighted_N, _ = numbers
    return Partials(row_max_N, sum_exp_N, target_logit_N, owned_N, weighted_N if entropy else None)


def finished_scores(
    logits_NV: Tensor,
    target_ids_N: Tensor,
    teacher_logprobs_N: Tensor | None,
    *,
    temperature: float,
    columns: Columns,
    entropy: bool,
) -> Combined:
    """`row_partials` and `vocab_parallel.combine` in one launch, of a vocabulary in one shard."""
    numbers = _launch(
        logits_NV, target_ids_N, teacher_logprobs_N, temperature, columns, entropy, finish=True
    )
    row_max_N, log_sum_N, logprobs_N, logsumexp_N, entropy_N, advantage_N = numbers
    if logits_NV.device.type == "cpu":
        local_N = target_ids_N - columns.start
        outside_N = (local_N < 0) | (local_N >= columns.valid)
        refuse_stray(outside_N & (target_ids_N != IGNORE), target_ids_N)
    return Combined(
        logprobs_N,
        entropy_N if entropy else None,
        logsumexp_N,
        None if teacher_logprobs_N is None else advantage_N,
        RowStats(row_max_N, log_sum_N),
    )


def _launch(
    logits_NV: Tensor,
    target_ids_N: Tensor,
    teacher_logprobs_N: Tensor | None,
    temperature: float,
    columns: Columns,
    entropy: bool,
    finish: bool,
) -> list[Tensor]:
    """6 times [N] float32: what the kernel stores, in the order of its pointers."""
    check_dtype(logits_NV)
    rows = logits_NV.shape[0]
    numbers = [torch.empty(rows, dtype=torch.float32, device=logits_NV.device) for _ in range(6)]
    if rows == 0:
        return numbers
    row_max_N, sum_exp_N, target_logit_N, owned_N, weighted_N, advantage_N = numbers
    tile = tile_size(columns.valid, MAX_TILE)
    with torch.cuda.device_of(logits_NV):  # Triton launches on the current device
        _forward_kernel[(rows,)](
            logits_NV,
            target_ids_N,
            row_max_N,
            sum_exp_N,
            target_logit_N,
            owned_N,
            weighted_N,
            advantage_N if teacher_logprobs_N is None else teacher_logprobs_N.contiguous(),
            advantage_N,
            logits_NV.stride(0),
            logits_NV.stride(1),
            1.0 / temperature,
            columns.start,
            columns.valid,
            IGNORE_ID=IGNORE,
            ENTROPY=entropy,
            FINISH=finish,
            TEACHER=teacher_logprobs_N is not None,
            TILE=tile,
            num_warps=warps(tile),
        )
    return numbers


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
    """out = g / T * (onehot - softmax); same contract as `torch_rows.write_gradient`."""
    rows, all_columns = logits_NV.shape
    if rows == 0 or all_columns == 0:
        return
    tile = tile_size(all_columns, MAX_TILE)
    with torch.cuda.device_of(logits_NV):
        _backward_kernel[(rows,)](
            logits_NV,
            target_ids_N,
            stats.row_max_N,
            stats.log_sum_N,
            grad_N.contiguous(),
            out_NV,
            logits_NV.stride(0),
            logits_NV.stride(1),
            out_NV.stride(0),
            out_NV.stride(1),
            1.0 / temperature,
            columns.start,
            columns.valid,
            all_columns,
            IGNORE_ID=IGNORE,
            TILE=tile,
            num_warps=warps(tile),
        )
