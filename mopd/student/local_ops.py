"""Autograd functions for the layers that run without Transformer Engine.

Each stands for a chain of torch operations that reads and writes its tensors several times and
whose derivative torch puts together from as many pieces again. On a CPU a small model's step is
bound by those passes over memory and by the Python between them, not by its matrix products. The
formulas are the plain ones; tests hold values and gradients against them in float64.

Legend: N rows, H width, D head size, F feed-forward size, e an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = (mean(x^2) + eps)^(-1/2) of each row; in float32 at least.

    With g = dL/dy: dL/dw = sum over rows of g x r, and dL/dx = r (g w) - x r^3 (g w . x) / H. The
    products g x are made once; both sums over them are matrix-vector products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        rows = _wide(x.reshape(-1, width))
        y = rows.square()
        # Not vector_norm, which saves a pass: the root and the square of it lose a bit of every
        # row's scale. So the values are torch's own, bit for bit.
        scale_N1 = y.mean(1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(rows if rows.dtype is not x.dtype else x, weight, scale_N1)
        return torch.mul(rows, scale_N1, out=y).mul_(weight).to(x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale_N1 = ctx.saved_tensors
        width = grad.shape[-1]
        rows, wide = x.reshape(-1, width), _wide(grad.reshape(-1, width))
        weight_H = _wide(weight)
        product_NH = wide * rows
        dot_N1 = (product_NH @ weight_H).unsqueeze_(1)
        weight_grad = (scale_N1.view(-1) @ product_NH).to(weight.dtype)
        factor_N1 = scale_N1.pow(3).mul_(dot_N1).div_(-width)
        grad_x = torch.mul(wide, weight_H, out=product_NH).mul_(scale_N1)
        grad_x.addcmul_(rows, factor_N1)
        return grad_x.to(grad.dtype).view(grad.shape), weight_grad, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H] -> [..., H]; the sums in float32 where `x` is narrower."""
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _Rotate(torch.autograd.Function):
    """Pairs (a, b) -> (a cos - b sin, b cos + a sin): its transpose turns the other way."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        width = 2 * cos.shape[-1]
        _turn(_pairs(t, width, interleaved), _pairs(out, width, False), cos, sin, 1)
        out[..., width:] = t[..., width:]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        width = 2 * cos.shape[-1]
        _turn(_pairs(grad, width, False), _pairs(out, width, ctx.interleaved), cos, sin, -1)
        out[..., width:] = grad[..., width:]
        return out, None, None, None


def _pairs(t: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return t[..., 0:width:2], t[..., 1:width:2]
    return t[..., : width // 2], t[..., width // 2 : width]


def _turn(
    source: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, sign: int
) -> None:
    (a, b), (x, y) = source, out
    torch.mul(a, cos, out=x).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=y).addcmul_(a, sin, value=sign)


def rotate(t: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotary positions: [S, ..., D] -> the same shape, the first 2 * cos.shape[-1] entries turned.

    cos, sin: broadcast against half of those; no gradient. Pairs are (i, i + half), or (2i, 2i + 1)
    on the way in with `interleaved`; the result has them as halves in either case.
    """
    return _Rotate.apply(t, cos, sin, interleaved)  # type: ignore[no-any-return]


class _Experts(torch.autograd.Function):
    """y_e = (silu(x_e G_e^T) * (x_e U_e^T) * p_e) W_e^T for the rows of each expert."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs_N: Tensor, counts: Sequence[int], *weights: Tensor
    ) -> Tensor:
        into_both, back = weights[0::2], weights[1::2]
        h_N2F = x.new_empty(len(x), into_both[0].shape[0])
        for x_n, weight, h_n in zip(x.split(counts), into_both, h_N2F.split(counts), strict=True):
            torch.mm(x_n, weight.t(), out=h_n)
        gate_NF, up_NF = h_N2F.chunk(2, 1)
        scaled_NF = F.silu(gate_NF).mul_(up_NF).mul_(probs_N.unsqueeze(1))
        y = x.new_empty(len(x), back[0].shape[0])
        for a_n, weight, y_n in zip(scaled_NF.split(counts), back, y.split(counts), strict=True):
            torch.mm(a_n, weight.t(), out=y_n)
        ctx.save_for_backward(x, probs_N, h_N2F, scaled_NF, *weights)
        ctx.counts = counts
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, probs_N, h_N2F, scaled_NF, *weights = ctx.saved_tensors
        counts, into_both, back = ctx.counts, weights[0::2], weights[1::2]
        grad_y = grad_y.contiguous()
        wanted = ctx.needs_input_grad[3:]
        grads: list[Tensor | None] = [None] * len(weights)
        grad_a = torch.empty_like(scaled_NF)
        parts = zip(
            grad_y.split(counts), back, grad_a.split(counts), scaled_NF.split(counts), strict=True
        )
        for e, (g_n, weight, out_n, a_n) in enumerate(parts):
            torch.mm(g_n, weight, out=out_n)
            if wanted[2 * e + 1]:
                grads[2 * e + 1] = _weight_gradient(weight, g_n, a_n)
        gate_NF, up_NF = h_N2F.chunk(2, 1)
        act_NF = F.silu(gate_NF)
        grad_h = torch.empty_like(h_N2F)
        grad_gate, grad_up = grad_h.chunk(2, 1)
        torch.mul(grad_a, act_NF, out=grad_up)
        probs_grad = torch.linalg.vecdot(grad_up, up_NF) if ctx.needs_input_grad[1] else None
        grad_up.mul_(probs_N.unsqueeze(1))
        grad_a.mul_(up_NF).mul_(probs_N.unsqueeze(1))
        torch.ops.aten.silu_backward.grad_input(grad_a, gate_NF, grad_input=grad_gate)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        rows = grad_x.split(counts) if grad_x is not None else [None] * len(counts)
        for e, (g_n, weight, x_n, out_n) in enumerate(
            zip(grad_h.split(counts), into_both, x.split(counts), rows, strict=True)
        ):
            if out_n is not None:
                torch.mm(g_n, weight, out=out_n)
            if wanted[2 * e]:
                grads[2 * e] = _weight_gradient(weight, g_n, x_n)
        return grad_x, probs_grad, None, *grads


def _weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """grad^T x, for autograd; or None once it was added where Megatron would add it."""
    main = getattr(weight, "main_grad", None)
    if main is None or main.dtype is not grad.dtype:
        return grad.t() @ x
    main.addmm_(grad.t(), x)
    return None


def gated_experts(
    x: Tensor, probs_N: Tensor, counts: Sequence[int], weights: Sequence[Tensor]
) -> Tensor:
    """[N, H] tokens in order of their expert -> [N, H]: each one's gated MLP, times `probs_N`.

    counts: tokens of each expert. weights: of each expert in turn, gate and up [2F, H], then down
    [H, F]. A weight that has Megatron's `main_grad`, of the same type, has its gradient added there
    and gets none from autograd.
    """
    return _Experts.apply(x, probs_N, list(counts), *weights)  # type: ignore[no-any-return]
