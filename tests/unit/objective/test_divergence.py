"""Divergences of whole distributions: C09, limits, optima and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from objective_cases import tensor

from mopd.errors import ConfigError
from mopd.objective.divergence import full_divergence, topk_divergence

DIRECTIONS = [("reverse", None), ("forward", None), ("jsd", 0.3), ("jsd", 0.5)]


def in_floats(p, q, direction, beta) -> float:
    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    if direction == "reverse":
        return kl(p, q)
    if direction == "forward":
        return kl(q, p)
    mixture = [beta * y + (1 - beta) * x for x, y in zip(p, q, strict=True)]
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


def fold(p, ids) -> list[float]:
    return [p[i] for i in ids] + [sum(x for i, x in enumerate(p) if i not in ids)]


def draw(seed: int, size: int = 7):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(size)), rng.dirichlet(np.ones(size))


def test_c09_top_1_with_a_tail_is_the_exact_kl_and_a_truncated_sum_is_not():
    student, teacher = tensor([0.6, 0.4]).log().requires_grad_(), tensor([0.9, 0.1]).log()
    value = topk_divergence(student, teacher, torch.tensor([0]), "reverse")
    assert value.item() == pytest.approx(0.31124, abs=5e-6)
    assert 0.6 * math.log(0.6 / 0.9) == pytest.approx(-0.24328, abs=5e-6)
    (gradient,) = torch.autograd.grad(value, student)
    exact = full_divergence(student, teacher, "reverse")
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, student)[0])
    assert gradient.abs().min() > 0.1


@pytest.mark.parametrize(("direction", "beta"), DIRECTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients(direction, beta, seed):
    p, q = draw(seed)
    ids = [5, 0, 2]
    for function, fold_ids in ((full_divergence, None), (topk_divergence, ids)):
        extra = () if fold_ids is None else (torch.tensor(ids),)
        # any constant may be added to logits
        student = (tensor(p).log() + 3).requires_grad_()
        value = function(student, tensor(q).log() - 2, *extra, direction, beta)
        pair = (p, q) if fold_ids is None else (fold(p, ids), fold(q, ids))
        assert value.item() == pytest.approx(in_floats(*pair, direction, beta), abs=1e-12)
        (gradient,) = torch.autograd.grad(value, student)
        for v in range(len(p)):
            ends = []
            for step in (1e-6, -1e-6):
                moved = p * np.exp(step * (np.arange(len(p)) == v))
                moved = moved / moved.sum()
                pair = (moved, q) if fold_ids is None else (fold(moved, ids), fold(q, ids))
                ends.append(in_floats(*pair, direction, beta))
            assert gradient[v].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)


@pytest.mark.parametrize(("direction", "beta"), DIRECTIONS)
def test_folding_is_a_lower_bound_that_is_exact_on_the_whole_vocabulary(direction, beta):
    p, q = (tensor(x).log() for x in draw(4))
    full = full_divergence(p, q, direction, beta)
    folded = [topk_divergence(p, q, torch.arange(k), direction, beta).item() for k in range(1, 8)]
    assert all(a <= b + 1e-15 for a, b in zip(folded, folded[1:], strict=False))
    assert folded[-1] == pytest.approx(full.item(), abs=1e-14) and folded[0] < full
    batch = topk_divergence(
        p.expand(2, 7), q.expand(2, 7), torch.tensor([[1], [6]]), direction, beta
    )
    assert batch.shape == (2,) and batch[0] != batch[1]


@pytest.mark.parametrize(("direction", "beta"), DIRECTIONS)
def test_the_optimum_is_the_teacher_on_the_support(direction, beta):
    # no probability below .05: the flat corner of the simplex takes thousands of steps
    p, q = (tensor(0.65 * x + 0.05).log() for x in draw(6))
    ids, theta = torch.tensor([1, 4]), p.clone()
    for _ in range(300):
        leaf = theta.requires_grad_()
        (gradient,) = torch.autograd.grad(topk_divergence(leaf, q, ids, direction, beta), leaf)
        theta = (leaf - 4.0 * gradient).detach()
    torch.testing.assert_close(theta.softmax(0)[ids], q.exp()[ids], rtol=0, atol=1e-4)
    zero = topk_divergence(q.requires_grad_(), q.detach(), ids, direction, beta)
    assert abs(zero.item()) < 1e-15
    assert torch.autograd.grad(zero, q)[0].abs().max() < 1e-15


def test_jsd_goes_over_into_both_kls():
    p, q = (tensor(x).log() for x in draw(8))
    small = 1e-6
    assert full_divergence(p, q, "jsd", small).item() / small == pytest.approx(
        full_divergence(p, q, "forward").item(), rel=1e-4
    )
    assert full_divergence(p, q, "jsd", 1 - small).item() / small == pytest.approx(
        full_divergence(p, q, "reverse").item(), rel=1e-4
    )


def test_probability_0_adds_nothing_in_value_and_gradient():
    student = tensor([0.0, 1.0, -math.inf]).requires_grad_()
    teacher = tensor([0.0, 0.0, 0.0])
    value = full_divergence(student, teacher, "reverse")
    (gradient,) = torch.autograd.grad(value, student)
    assert math.isfinite(value.item()) and gradient[2] == 0 and gradient.isfinite().all()


def test_refusals():
    p = tensor([0.0, 0.0])
    with pytest.raises(ConfigError, match="direction is 'backward'"):
        full_divergence(p, p, "backward")
    for beta in (None, 0.0, 1.0):
        with pytest.raises(ConfigError, match="jsd_beta is"):
            full_divergence(p, p, "jsd", beta)
