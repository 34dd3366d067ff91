"""The Triton backend of top-k buckets: one program per row, online softmax of the tail.

Same contract as `torch_buckets`; imported only when Triton is asked for. The listed ids are taken
out of the tile they lie in by a branch per id and tile that is the same for the whole program, so a
listed id costs vector work in one tile only. Any strides, int64 offsets, float32 accumulation.

Shapes: N rows, V columns of this shard, K listed ids a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mopd.kernels.partials import Columns, RowStats, TailPartials
from mopd.kernels.triton_common import add_tile, check_dtype, load_tile, tile_size, warps

MAX_TILE = 4096
"""Taking ids out of a tile holds it twice: at 8192 the compiler wants 128 registers a thread."""


@triton.jit
def _tail_kernel(  # type: ignore[no-untyped-def]  # Triton infers them
    logits_ptr,
    local_ptr,
    live_ptr,
    tail_max_ptr,
    sum_exp_ptr,
    picked_ptr,
    weighted_ptr,
    stride_row,
    stride_column,
    inverse_temperature,
    columns,
    slots,
    ENTROPY: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    listed_row = local_ptr + row * slots
    slot = tl.arange(0, SLOTS)
    tail_max = 0.0
    sum_exp = 0.0
    weighted = 0.0
    picked = tl.zeros([SLOTS], tl.float32)
    if tl.load(live_ptr + row) != 0:
        tail_max = float("-inf")
        base = logits_ptr + row * stride_row
        for begin in range(0, columns, TILE):
            column = begin + tl.arange(0, TILE)
            x = load_tile(base, column, stride_column, column < columns)
            for k in range(slots):
                listed = tl.load(listed_row + k)
                if (listed >= begin) & (listed < begin + TILE):
                    x = tl.where(column == listed, float("-inf"), x)
            tail_max, sum_exp, weighted = add_tile(
                x, tail_max, sum_exp, weighted, inverse_temperature, ENTROPY
            )
        listed_K = tl.load(listed_row + slot, mask=slot < slots, other=-1)
        picked = tl.load(base + listed_K * stride_column, mask=listed_K >= 0, other=0.0).to(
            tl.float32
        )
    tl.store(tail_max_ptr + row, tail_max)
    tl.store(sum_exp_ptr + row, sum_exp)
    tl.store(picked_ptr + row * slots + slot, picked, mask=slot < slots)
    if ENTROPY:
        tl.store(weighted_ptr + row, weighted)


@triton.jit
def _bucket_gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    local_ptr,
    live_ptr,
    tail_max_ptr,
    log_sum_ptr,
    grad_ptr,
    grad_tail_ptr,
    out_ptr,
    stride_row,
    stride_column,
    out_stride_row,
    out_stride_column,
    inverse_temperature,
    columns,
    all_columns,
    slots,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    # One pass: a tile is read before it is written, so out_ptr may be logits_ptr.
    row = tl.program_id(0).to(tl.int64)
    live = tl.load(live_ptr + row) != 0
    tail_max = tl.load(tail_max_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    scale = tl.load(grad_tail_ptr + row).to(tl.float32) * inverse_temperature
    base = logits_ptr + row * stride_row
    out = out_ptr + row * out_stride_row
    for begin in range(0, all_columns, TILE):
        column = begin + tl.arange(0, TILE)
        valid = (column < columns) & live
        x = tl.load(base + column.to(tl.int64) * stride_column, mask=valid, other=float("-inf")).to(
            tl.float32
        )
        # The listed columns too, where this may be inf: they are written again below
        softmax = tl.exp((x - tail_max) * inverse_temperature - log_sum)
        # where, not a product: a dead row's gradient may be NaN
        value = tl.where(valid, scale * softmax, 0.0)
        tl.store(
            out + column.to(tl.int64) * out_stride_column,
            value.to(out_ptr.dtype.element_ty),
            mask=column < all_columns,
        )
    tl.debug_barrier()  # every thread's tiles are stored before any listed column is
    slot = tl.arange(0, SLOTS)
    listed = tl.load(local_ptr + row * slots + slot, mask=slot < slots, other=-1)
    grad = tl.load(grad_ptr + row * slots + slot, mask=slot < slots, other=0.0).to(tl.float32)
    tl.store(
        out + listed * out_stride_column,
        (grad * inverse_temperature).to(out_ptr.dtype.element_ty),
        mask=(listed >= 0) & live,
    )


def tail_partials(
    logits_NV: Tensor,
    local_NK: Tensor,
    live_N: Tensor,
    *,
    temperature: float,
    columns: Columns,
    entropy: bool,
) -> TailPartials:
    """As `torch_buckets.tail_partials`, in float32. ConfigError for float64 logits."""
    check_dtype(logits_NV)
    rows, slots = local_NK.shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits_NV.device)

    partials = TailPartials(
        empty(rows), empty(rows), empty(rows, slots), empty(rows) if entropy else None
    )
    if rows == 0:
        return partials
    tile = tile_size(columns.valid, MAX_TILE)
    with torch.cuda.device_of(logits_NV):  # Triton launches on the current device
        _tail_kernel[(rows,)](
            logits_NV,
            local_NK.contiguous(),
            live_N.view(torch.uint8),
            partials.tail_max_N,
            partials.sum_exp_N,
            partials.picked_NK,
            partials.sum_exp_N if partials.weighted_N is None else partials.weighted_N,
            logits_NV.stride(0),
            logits_NV.stride(1),
            1.0 / temperature,
            columns.valid,
            slots,
            ENTROPY=entropy,
            SLOTS=triton.next_power_of_2(slots),
            TILE=tile,
            num_warps=warps(tile),
        )
    return partials


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
    """As `torch_buckets.write_bucket_gradient`."""
    rows, all_columns = logits_NV.shape
    if rows == 0 or all_columns == 0:
        return
    tile = tile_size(all_columns, MAX_TILE)
    with torch.cuda.device_of(logits_NV):
        _bucket_gradient_kernel[(rows,)](
            logits_NV,
            local_NK.contiguous(),
            live_N.view(torch.uint8),
            tail_stats.row_max_N,
            tail_stats.log_sum_N,
            grad_NK.contiguous(),
            grad_tail_N.contiguous(),
            out_NV,
            logits_NV.stride(0),
            logits_NV.stride(1),
            out_NV.stride(0),
            out_NV.stride(1),
            1.0 / temperature,
            columns.valid,
            all_columns,
            local_NK.shape[1],
            SLOTS=triton.next_power_of_2(local_NK.shape[1]),
            TILE=tile,
            num_warps=warps(tile),
        )
