"""What the Triton backends share: launch sizes, dtypes, and whether they are interpreted."""

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
