"""The student's own autograd functions against plain torch, in float64: values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mopd.student.local_ops import gated_experts, rms_norm, rotate


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def assert_same_function(
    ours: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> None:
    """Values, and gradients of a random weighting of them, to 1e-10 of the largest."""
    results = []
    for function in (ours, plain):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = function(*leaves)
        gradients = torch.autograd.grad((out * draw(*out.shape, seed=99)).sum(), leaves)
        results.append([out.detach(), *gradients])
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < 1e-10 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("shape", [(5, 8), (3, 2, 4, 8), (1, 8), (0, 8)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    if 0 in shape:
        x = draw(*shape).requires_grad_()
        weight = draw(8, seed=1).requires_grad_()
        rms_norm(x, weight, 1e-6).sum().backward()
        assert weight.grad is not None and weight.grad.eq(0).all()
        return
    assert_same_function(
        lambda x, w: rms_norm(x, w, 1e-3),
        lambda x, w: x * (x.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt() * w,
        [draw(*shape), draw(8, seed=1)],
    )


def test_rms_norm_of_a_view_and_of_zeros() -> None:
    """Keys are a slice of the fused projection; a row of zeros has finite gradients."""
    whole = draw(6, 2, 24)
    assert_same_function(
        lambda x, w: rms_norm(x[..., 8:16], w, 1e-6),
        lambda x, w: F.rms_norm(x[..., 8:16], (8,), w, 1e-6),
        [whole, draw(8, seed=1)],
    )
    zeros = torch.zeros(2, 8, dtype=torch.float64)
    assert_same_function(
        lambda x, w: rms_norm(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, (8,), w, 1e-6),
        [zeros, draw(8, seed=1)],
    )


def test_rms_norm_in_float32_is_torchs() -> None:
    x, w = draw(300, 96).float(), draw(96, seed=1).float()
    assert rms_norm(x, w, 1e-6).equal(F.rms_norm(x, (96,), w, 1e-6))


def test_rms_norm_in_bfloat16_sums_in_float32() -> None:
    x, w = draw(64, 128).bfloat16(), draw(128, seed=1).bfloat16()
    exact = F.rms_norm(x.double(), (128,), w.double(), 1e-6)
    got = rms_norm(x, w, 1e-6)
    assert got.dtype is torch.bfloat16
    plain = F.rms_norm(x, (128,), w, 1e-6)
    assert (got - exact).abs().max() <= 1.01 * (plain - exact).abs().max()
    x.requires_grad_()
    assert torch.autograd.grad(rms_norm(x, w, 1e-6).sum(), x)[0].dtype is torch.bfloat16


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 6])
def test_rotate(interleaved: bool, width: int) -> None:
    """As the complex product; entries past `width` stay."""
    angle = draw(5, 1, 1, width // 2, seed=1)

    def plain(t: Tensor) -> Tensor:
        turned, rest = t[..., :width], t[..., width:]
        halves = (
            (turned[..., 0::2], turned[..., 1::2])
            if interleaved
            else (turned[..., : width // 2], turned[..., width // 2 :])
        )
        product = torch.complex(*(h.contiguous() for h in halves)) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.cat((product.real, product.imag, rest), -1)

    cos, sin = angle.cos(), angle.sin()
    assert_same_function(
        lambda t: rotate(t, cos, sin, interleaved=interleaved), plain, [draw(5, 2, 3, 8)]
    )
    whole = draw(5, 2, 3, 16)
    assert_same_function(  # of a view
        lambda t: rotate(t[..., 4:12], cos, sin, interleaved=interleaved),
        lambda t: plain(t[..., 4:12]),
        [whole],
    )


COUNTS = [3, 0, 5, 1]


def experts(seed: int = 1) -> list[Tensor]:
    """Of four experts: gate and up [2 x 6, 8], down [8, 6]."""
    shapes = [(12, 8), (8, 6)] * len(COUNTS)
    return [draw(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def plain_experts(x: Tensor, probs: Tensor, *weights: Tensor) -> Tensor:
    out = []
    for e, (rows, p) in enumerate(zip(x.split(COUNTS), probs.split(COUNTS), strict=True)):
        gate, up = (rows @ weights[2 * e].t()).chunk(2, -1)
        out.append((F.silu(gate) * up * p[:, None]) @ weights[2 * e + 1].t())
    return torch.cat(out)


def test_gated_experts() -> None:
    assert_same_function(
        lambda x, p, *w: gated_experts(x, p, COUNTS, w),
        plain_experts,
        [draw(9, 8), draw(9, seed=50), *experts()],
    )


def test_gated_experts_add_to_megatrons_gradients() -> None:
    """Twice, as two micro-batches do; autograd then has none for those weights."""
    weights = [torch.nn.Parameter(w) for w in experts()]
    x, probs = draw(9, 8).requires_grad_(), draw(9, seed=50)
    expected = torch.autograd.grad(plain_experts(x, probs, *weights).square().sum(), weights)
    for weight in weights[:-1]:
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    for _ in range(2):
        gated_experts(x, probs, COUNTS, weights).square().sum().backward()
    for weight, gradient in zip(weights[:-1], expected, strict=False):
        assert weight.grad is None
        assert torch.allclose(weight.main_grad, 2 * gradient, rtol=1e-10)  # type: ignore[attr-defined]
    assert torch.allclose(weights[-1].grad, 2 * expected[-1], rtol=1e-10)


def test_frozen_experts_get_no_gradient() -> None:
    weights = [torch.nn.Parameter(w, requires_grad=i > 1) for i, w in enumerate(experts())]
    weights[0].main_grad = torch.zeros_like(weights[0])  # type: ignore[attr-defined]
    gated_experts(draw(9, 8), draw(9, seed=50), COUNTS, weights).sum().backward()
    assert weights[0].grad is None and weights[0].main_grad.eq(0).all()  # type: ignore[attr-defined]
    assert weights[1].grad is None and weights[4].grad is not None
