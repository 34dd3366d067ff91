"""RMSNorm on the CPU by the kernel that vLLM has for it.

vLLM 0.32 compiles RMSNorm for the CPU (``torch.ops._C.rms_norm``) but offers that kernel to GPUs
only; on the CPU every norm is six small torch operations, 17 to 28 microseconds where the kernel
takes 4 to 10. A small model has four norms a layer, so that they were 7% of a decoding step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

_PROVIDER = "mopd_cpu"

PRIORITY = {"rms_norm": [_PROVIDER, "native"], "fused_add_rms_norm": [_PROVIDER, "native"]}
"""vLLM's ``ir_op_priority``: ours, and vLLM's own operations where ours does not apply."""


def register() -> None:
    """Tell vLLM of the kernel; nothing uses it until `PRIORITY` is given to an engine."""
    if _PROVIDER in ir.ops.rms_norm.impls:
        return

    current_platform.import_kernels()
    here = all(hasattr(torch.ops._C, name) for name in PRIORITY)  # else vLLM's own are used

    @ir.ops.rms_norm.register_impl(_PROVIDER, supported=here, supports_args=_norm_fits)
    def rms_norm(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> torch.Tensor:
        x = x.contiguous()  # the norms of queries and keys see views
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out

    @ir.ops.fused_add_rms_norm.register_impl(
        _PROVIDER, supported=here, supports_args=_add_fits, inplace=True
    )
    def fused_add_rms_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual


def _norm_fits(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype


def _add_fits(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    whole = x.is_contiguous() and x_residual.is_contiguous() and x_residual.dtype == x.dtype
    return whole and _norm_fits(x, weight, epsilon, variance_size)
