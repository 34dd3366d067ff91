"""What the Triton backends share: online softmax, launch sizes, dtypes, and whether they are
interpreted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mopd.errors import ConfigError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _probe_kernel():  # type: ignore[no-untyped-def]
    pass


@triton.jit
def load_tile(base, column, stride_column, mask):  # type: ignore[no-untyped-def]
    """One row's columns in float32, -inf where `mask` is False; int64 offsets."""
    return tl.load(base + column.to(tl.int64) * stride_column, mask=mask, other=float("-inf")).to(
        tl.float32
    )


@triton.jit
def rescale(old_max, x, inverse_temperature):  # type: ignore[no-untyped-def]
    """(new maximum, shift of the old sums, (x - maximum) / T) of a row when tile x joins it."""
    new_max = tl.maximum(old_max, tl.max(x, axis=0))
    # Nothing finite so far: exp(-inf - -inf) would be NaN
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    shift = tl.where(old_max == float("-inf"), 0.0, (old_max - safe_max) * inverse_temperature)
    return new_max, shift, (x - safe_max) * inverse_temperature


@triton.jit
def add_tile(  # type: ignore[no-untyped-def]
    x, row_max, sum_exp, weighted, inverse_temperature, ENTROPY: tl.constexpr
):
    """Online softmax: (m, s, w) with tile x, where m is the maximum of the columns so far, s the
    sum of e = exp((x - m) / T) and w, with ENTROPY, that of e (x - m) / T."""
    new_max, shift, scaled = rescale(row_max, x, inverse_temperature)
    shrink = tl.exp(shift)
    exps = tl.exp(scaled)
    if ENTROPY:
        terms = tl.where(exps == 0.0, 0.0, scaled * exps)
        weighted = shrink * (weighted + shift * sum_exp) + tl.sum(terms, axis=0)
    return new_max, sum_exp * shrink + tl.sum(exps, axis=0), weighted


def interpreted() -> bool:
    """Whether these kernels run in Triton's interpreter.

    Triton decides per function when it is decorated: its own (tl.max) at its import, ours at ours.
    """
    return not any(isinstance(f, triton.JITFunction) for f in (_probe_kernel, tl.max))


def tile_size(columns: int, most: int) -> int:
    """Columns a program takes at a time: a power of 2 from 16 to `most`."""
    return int(min(most, triton.next_power_of_2(max(16, columns))))


def warps(tile: int) -> int:
    """Warps of a program; not tuned on a device yet."""
    return 4 if tile <= 2048 else 8


def check_dtype(*tensors: Tensor) -> None:
    """ConfigError for a dtype the kernels do not compute in."""
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise ConfigError(
                f"the Triton kernels got {tensor.dtype}; expected float32, bfloat16 or float16. "
                "Set student.kernel: torch for other dtypes."
            )
