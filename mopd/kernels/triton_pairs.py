"""The Triton backend of whole-vocabulary divergences: one program per row, both logits together.

Same contract as `torch_pairs`; imported only when Triton is asked for. One read of both logits for
the normalisers and a KL, one more for the JSD, one read and one write for the gradient. Any
strides, int64 offsets, float32 accumulation.

Shapes: N rows, V columns of this shard. x: student's logits, y: teacher's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mopd.kernels.pair_partials import PairPartials, PairStats, PairSums
from mopd.kernels.partials import Columns, RowStats
from mopd.kernels.triton_common import check_dtype, load_tile, rescale, tile_size, warps

MAX_TILE = 4096
"""Two tiles are held at once."""

_DIRECTIONS = {"reverse": 0, "forward": 1, "jsd": 2}


@triton.jit
def _pair_kernel(  # type: ignore[no-untyped-def]  # Triton infers them
    a_ptr,
    b_ptr,
    live_ptr,
    a_max_ptr,
    a_sum_ptr,
    b_max_ptr,
    b_sum_ptr,
    weighted_ptr,
    a_stride_row,
    a_stride_column,
    b_stride_row,
    b_stride_column,
    a_inverse_temperature,
    b_inverse_temperature,
    columns,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    a_max = 0.0
    b_max = 0.0
    a_sum = 0.0
    b_sum = 0.0
    weighted = 0.0
    if tl.load(live_ptr + row) != 0:
        a_max = float("-inf")
        b_max = float("-inf")
        for begin in range(0, columns, TILE):
            column = begin + tl.arange(0, TILE)
            a = load_tile(a_ptr + row * a_stride_row, column, a_stride_column, column < columns)
            b = load_tile(b_ptr + row * b_stride_row, column, b_stride_column, column < columns)
            a_max, a_shift, a_scaled = rescale(a_max, a, a_inverse_temperature)
            b_max, b_shift, b_scaled = rescale(b_max, b, b_inverse_temperature)
            a_exps = tl.exp(a_scaled)
            a_shrink = tl.exp(a_shift)
            if WEIGHTED:
                terms = tl.where(a_exps == 0.0, 0.0, (a_scaled - b_scaled) * a_exps)
                moved = weighted + (a_shift - b_shift) * a_sum
                # where: an infinite sum of columns that weigh nothing any more
                weighted = tl.where(a_shrink == 0.0, 0.0, a_shrink * moved) + tl.sum(terms, axis=0)
            a_sum = a_sum * a_shrink + tl.sum(a_exps, axis=0)
            b_sum = b_sum * tl.exp(b_shift) + tl.sum(tl.exp(b_scaled), axis=0)
    tl.store(a_max_ptr + row, a_max)
    tl.store(a_sum_ptr + row, a_sum)
    tl.store(b_max_ptr + row, b_max)
    tl.store(b_sum_ptr + row, b_sum)
    tl.store(weighted_ptr + row, weighted)


@triton.jit
def _jsd_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    live_ptr,
    x_max_ptr,
    x_log_sum_ptr,
    y_max_ptr,
    y_log_sum_ptr,
    value_ptr,
    mean_ptr,
    x_stride_row,
    x_stride_column,
    y_stride_row,
    y_stride_column,
    x_inverse_temperature,
    y_inverse_temperature,
    beta,
    columns,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    student = 0.0
    teacher = 0.0
    if tl.load(live_ptr + row) != 0:
        x_max = tl.load(x_max_ptr + row)
        x_log_sum = tl.load(x_log_sum_ptr + row)
        y_max = tl.load(y_max_ptr + row)
        y_log_sum = tl.load(y_log_sum_ptr + row)
        for begin in range(0, columns, TILE):
            column = begin + tl.arange(0, TILE)
            x = load_tile(x_ptr + row * x_stride_row, column, x_stride_column, column < columns)
            y = load_tile(y_ptr + row * y_stride_row, column, y_stride_column, column < columns)
            p = tl.exp((x - x_max) * x_inverse_temperature - x_log_sum)
            q = tl.exp((y - y_max) * y_inverse_temperature - y_log_sum)
            mixed = beta * q + (1.0 - beta) * p
            student += tl.sum(_times_log_ratio(p, mixed, p), axis=0)
            teacher += tl.sum(_times_log_ratio(q, mixed, q), axis=0)
    tl.store(value_ptr + row, beta * teacher + (1.0 - beta) * student)
    tl.store(mean_ptr + row, student)


@triton.jit
def _times_log_ratio(p, mixed, weight):  # type: ignore[no-untyped-def]
    """weight * log(p / mixed), 0 where p is 0 (mixed may be 0 there too)."""
    some = p != 0.0
    return tl.where(some, weight * tl.log(tl.where(some, p / tl.where(some, mixed, 1.0), 1.0)), 0.0)


@triton.jit
def _pair_gradient_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    live_ptr,
    x_max_ptr,
    x_log_sum_ptr,
    y_max_ptr,
    y_log_sum_ptr,
    mean_ptr,
    grad_ptr,
    out_ptr,
    x_stride_row,
    x_stride_column,
    y_stride_row,
    y_stride_column,
    out_stride_row,
    out_stride_column,
    x_inverse_temperature,
    y_inverse_temperature,
    beta,
    columns,
    all_columns,
    DIRECTION: tl.constexpr,
    TILE: tl.constexpr,
):
    # One pass: a tile is read before it is written, so out_ptr may be x_ptr.
    row = tl.program_id(0).to(tl.int64)
    live = tl.load(live_ptr + row) != 0
    x_max = tl.load(x_max_ptr + row)
    x_log_sum = tl.load(x_log_sum_ptr + row)
    y_max = tl.load(y_max_ptr + row)
    y_log_sum = tl.load(y_log_sum_ptr + row)
    mean = tl.load(mean_ptr + row)
    scale = tl.load(grad_ptr + row).to(tl.float32) * x_inverse_temperature
    for begin in range(0, all_columns, TILE):
        column = begin + tl.arange(0, TILE)
        valid = (column < columns) & live
        x = load_tile(x_ptr + row * x_stride_row, column, x_stride_column, valid)
        y = load_tile(y_ptr + row * y_stride_row, column, y_stride_column, valid)
        logp = (x - x_max) * x_inverse_temperature - x_log_sum
        logq = (y - y_max) * y_inverse_temperature - y_log_sum
        p = tl.exp(logp)
        if DIRECTION == 0:
            value = tl.where(p == 0.0, 0.0, p * (logp - logq - mean))
        elif DIRECTION == 1:
            value = p - tl.exp(logq)
        else:
            mixed = beta * tl.exp(logq) + (1.0 - beta) * p
            value = (1.0 - beta) * (_times_log_ratio(p, mixed, p) - mean * p)
        # where, not a product: a dead row's gradient may be NaN
        value = tl.where(valid, scale * value, 0.0)
        tl.store(
            out_ptr + row * out_stride_row + column.to(tl.int64) * out_stride_column,
            value.to(out_ptr.dtype.element_ty),
            mask=column < all_columns,
        )


def pair_partials(
    a_NV: Tensor,
    b_NV: Tensor,
    live_N: Tensor,
    *,
    a_temperature: float,
    b_temperature: float,
    columns: Columns,
    weighted: bool,
) -> PairPartials:
    """As `torch_pairs.pair_partials`, in float32. ConfigError for float64 logits."""
    check_dtype(a_NV, b_NV)
    rows = a_NV.shape[0]
    numbers_5N = torch.empty((5, rows), dtype=torch.float32, device=a_NV.device)
    partials = PairPartials(*numbers_5N)
    if rows == 0:
        return partials
    tile = tile_size(columns.valid, MAX_TILE)
    with torch.cuda.device_of(a_NV):  # Triton launches on the current device
        _pair_kernel[(rows,)](
            a_NV,
            b_NV,
            live_N.view(torch.uint8),
            *numbers_5N,
            a_NV.stride(0),
            a_NV.stride(1),
            b_NV.stride(0),
            b_NV.stride(1),
            1.0 / a_temperature,
            1.0 / b_temperature,
            columns.valid,
            WEIGHTED=weighted,
            TILE=tile,
            num_warps=warps(tile),
        )
    return partials


def jsd_sums(
    x_NV: Tensor,
    y_NV: Tensor,
    live_N: Tensor,
    student: RowStats,
    teacher: RowStats,
    *,
    temperature: float,
    teacher_temperature: float,
    columns: Columns,
    beta: float,
) -> PairSums:
    """As `torch_pairs.jsd_sums`."""
    rows = x_NV.shape[0]
    value_N, mean_N = torch.empty((2, rows), dtype=torch.float32, device=x_NV.device)
    if rows == 0:
        return PairSums(value_N, mean_N)
    tile = tile_size(columns.valid, MAX_TILE)
    with torch.cuda.device_of(x_NV):
        _jsd_kernel[(rows,)](
            x_NV,
            y_NV,
            live_N.view(torch.uint8),
            student.row_max_N,
            student.log_sum_N,
            teacher.row_max_N,
            teacher.log_sum_N,
            value_N,
            mean_N,
            x_NV.stride(0),
            x_NV.stride(1),
            y_NV.stride(0),
            y_NV.stride(1),
            1.0 / temperature,
            1.0 / teacher_temperature,
            beta,
            columns.valid,
            TILE=tile,
            num_warps=warps(tile),
        )
    return PairSums(value_N, mean_N)


def write_pair_gradient(
    x_NV: Tensor,
    y_NV: Tensor,
    live_N: Tensor,
    stats: PairStats,
    grad_N: Tensor,
    out_NV: Tensor,
    *,
    direction: str,
    beta: float,
    temperature: float,
    teacher_temperature: float,
    columns: Columns,
) -> None:
    """As `torch_pairs.write_pair_gradient`."""
    rows, all_columns = out_NV.shape
    if rows == 0 or all_columns == 0:
        return
    tile = tile_size(all_columns, MAX_TILE)
    with torch.cuda.device_of(x_NV):
        _pair_gradient_kernel[(rows,)](
            x_NV,
            y_NV,
            live_N.view(torch.uint8),
            stats.student.row_max_N,
            stats.student.log_sum_N,
            stats.teacher.row_max_N,
            stats.teacher.log_sum_N,
            stats.mean_N,
            grad_N.contiguous(),
            out_NV,
            x_NV.stride(0),
            x_NV.stride(1),
            y_NV.stride(0),
            y_NV.stride(1),
            out_NV.stride(0),
            out_NV.stride(1),
            1.0 / temperature,
            1.0 / teacher_temperature,
            beta,
            columns.valid,
            all_columns,
            DIRECTION=_DIRECTIONS[direction],
            TILE=tile,
            num_warps=warps(tile),
        )
