"""The Triton backend: one program per row, online softmax, float32 accumulation.

Imported only by `mopd.kernels.select` when Triton is asked for. Reads the logits once in the
forward (no [N, V] temporary) and once in the backward, which may write over them.

Shapes: N rows, V columns of this shard. Any strides; offsets are int64, since N * V passes 2^31 at
14,200 rows of a 151,936-token vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mopd.errors import ConfigError
from mopd.kernels.partials import Columns, Partials, RowStats
from mopd.kernels.reference import IGNORE

MAX_TILE = 8192
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]  # Triton infers them
    logits_ptr,
    target_ptr,
    row_max_ptr,
    sum_exp_ptr,
    target_logit_ptr,
    owned_ptr,
    weighted_ptr,
    stride_row,
    stride_column,
    inverse_temperature,
    column_start,
    columns,
    IGNORE_ID: tl.constexpr,
    ENTROPY: tl.constexpr,
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
            x = tl.load(
                base + column.to(tl.int64) * stride_column,
                mask=column < columns,
                other=float("-inf"),
            ).to(tl.float32)
            new_max = tl.maximum(row_max, tl.max(x, axis=0))
            # Nothing finite so far: exp(-inf - -inf) would be NaN
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            shift = tl.where(
                row_max == float("-inf"), 0.0, (row_max - safe_max) * inverse_temperature
            )
            shrink = tl.exp(shift)
            scaled = (x - safe_max) * inverse_temperature
            exps = tl.exp(scaled)
            if ENTROPY:
                terms = tl.where(exps == 0.0, 0.0, scaled * exps)
                weighted = shrink * (weighted + shift * sum_exp) + tl.sum(terms, axis=0)
            sum_exp = sum_exp * shrink + tl.sum(exps, axis=0)
            row_max = new_max
        local = target - column_start
        if (local >= 0) & (local < columns):
            target_logit = tl.load(base + local.to(tl.int64) * stride_column).to(tl.float32)
            owned = 1.0
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
    base = logits_ptr + row * stride_row
    out = out_ptr + row * out_stride_row
    for begin in range(0, all_columns, TILE):
        column = begin + tl.arange(0, TILE)
        valid = column < columns
        x = tl.load(base + column.to(tl.int64) * stride_column, mask=valid, other=float("-inf")).to(
            tl.float32
        )
        softmax = tl.exp((x - row_max) * inverse_temperature - log_sum)
        onehot = tl.where(column == local, 1.0, 0.0)
        # where, not a product: an ignored row's logits and gradient may be NaN
        grad = tl.where(valid & (target != IGNORE_ID), scale * (onehot - softmax), 0.0)
        tl.store(
            out + column.to(tl.int64) * out_stride_column,
            grad.to(out_ptr.dtype.element_ty),
            mask=column < all_columns,
        )


def interpreted() -> bool:
    """Whether these kernels run in Triton's interpreter.

    Triton decides per function when it is decorated: its own (tl.max) at its import, ours at ours.
    """
    return not any(isinstance(f, triton.JITFunction) for f in (_forward_kernel, tl.max))


def _tile(columns: int) -> int:
    return min(MAX_TILE, triton.next_power_of_2(max(16, columns)))


def _warps(tile: int) -> int:
    return 4 if tile <= 2048 else 8


def _check_dtype(logits_NV: Tensor) -> None:
    if logits_NV.dtype not in _DTYPES:
        raise ConfigError(
            f"the Triton logprob kernel got {logits_NV.dtype} logits; expected float32, bfloat16 "
            "or float16. Set student.kernel: torch for other dtypes."
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
    _check_dtype(logits_NV)
    rows = logits_NV.shape[0]

    def empty_N() -> Tensor:
        return torch.empty(rows, dtype=torch.float32, device=logits_NV.device)

    partials = Partials(empty_N(), empty_N(), empty_N(), empty_N(), empty_N() if entropy else None)
    if rows == 0:
        return partials
    tile = _tile(columns.valid)
    with torch.cuda.device_of(logits_NV):  # Triton launches on the current device
        _forward_kernel[(rows,)](
            logits_NV,
            target_ids_N,
            partials.row_max_N,
            partials.sum_exp_N,
            partials.target_logit_N,
            partials.owned_N,
            partials.sum_exp_N if partials.weighted_N is None else partials.weighted_N,
            logits_NV.stride(0),
            logits_NV.stride(1),
            1.0 / temperature,
            columns.start,
            columns.valid,
            IGNORE_ID=IGNORE,
            ENTROPY=entropy,
            TILE=tile,
            num_warps=_warps(tile),
        )
    return partials


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
    tile = _tile(all_columns)
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
            num_warps=_warps(tile),
        )
