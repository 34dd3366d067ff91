"""MATH 11.2: what k1, k2 and k3 descend on when they are losses."""

from __future__ import annotations

import math

import pytest
import torch
from objective_cases import UNWEIGHTED, objective, tensor
from torch import Tensor

from mopd.objective.inputs import StepTotals, TokenInputs
from mopd.objective.loss import objective_loss
from mopd.objective.reference_kl import REFERENCE_KL, k2, k3

P0, Q = tensor([0.5, 0.3, 0.15, 0.05]), tensor([0.1, 0.2, 0.3, 0.4])
MU = tensor([0.4, 0.1, 0.2, 0.3])


def expected_gradient(kind: str, mu: Tensor, by_own_teacher: bool = False) -> Tensor:
    """d/dtheta of the regulariser's loss, exactly: each token once, weighed by mu."""
    theta = P0.log().requires_grad_()
    logp = theta.log_softmax(0)
    reference = {"teacher_logprobs_BT" if by_own_teacher else "reference_logprobs_BT": Q.log()}
    inputs = TokenInputs(
        mask_BT=torch.ones(4, 1, dtype=torch.bool),
        sampler_logprobs_BT=mu.log().unsqueeze(1),
        orm_advantage_B=torch.zeros(4),
        domain_weight_B=mu * 4,  # the mean over 4 rows becomes the mean under mu
        **{name: values.unsqueeze(1) for name, values in reference.items()},
    )
    config = objective(
        teacher={"weight": 0.0}, truncation=UNWEIGHTED, kl={"kind": kind, "weight": 2.0}
    )
    loss, _ = objective_loss(logp.unsqueeze(1), inputs, config, StepTotals(4, 4, 4))
    return torch.autograd.grad(loss, theta)[0] / 2.0


def gradient_of(divergence) -> Tensor:
    theta = P0.log().requires_grad_()
    return torch.autograd.grad(divergence(theta.softmax(0)), theta)[0]


REVERSE = gradient_of(lambda p: (p * (p / Q).log()).sum())
FORWARD = gradient_of(lambda p: (Q * (Q / p).log()).sum())


@pytest.mark.parametrize("mu", [P0, MU], ids=["on-policy", "another sampler"])
@pytest.mark.parametrize("own", [True, False], ids=["own teacher", "a reference"])
def test_2_k2_has_the_reverse_kls_gradient_and_k3_the_forward_kls(mu, own):
    torch.testing.assert_close(expected_gradient("k2", mu, own), REVERSE, rtol=0, atol=1e-12)
    torch.testing.assert_close(expected_gradient("k3", mu, own), FORWARD, rtol=0, atol=1e-12)
    assert (REVERSE - FORWARD).abs().max() > 0.05


def test_2_k1_has_no_gradient_in_expectation_and_is_not_offered():
    theta = P0.log().requires_grad_()
    k1 = (P0 * (theta.log_softmax(0) - Q.log())).sum()
    (gradient,) = torch.autograd.grad(k1, theta)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-15)
    assert set(REFERENCE_KL) == {"k2", "k3"}


def test_their_values_estimate_the_kl():
    gap = P0.log() - Q.log()
    kl = (P0 * gap).sum()
    assert (P0 * k3(gap)).sum().item() == pytest.approx(kl.item(), abs=1e-14)
    near = tensor([0.001, -0.002])
    assert k2(near).tolist() == pytest.approx([0.5e-6, 2e-6])
    assert k3(near).tolist() == pytest.approx(k2(near).tolist(), rel=1e-2)
    assert k3(tensor([-200.0])).item() == pytest.approx(math.exp(200) - 201)


def test_the_regulariser_is_measured_before_its_weight():
    inputs = TokenInputs(
        mask_BT=tensor([[True, True, False]], dtype=None),
        sampler_logprobs_BT=tensor([[-1.0, -9.0, math.nan]]),  # the second is dropped
        orm_advantage_B=tensor([0.0]),
        reference_logprobs_BT=tensor([[-3.0, -3.0, math.nan]]),
    )
    config = objective(teacher={"weight": 0.0}, kl={"kind": "k2", "weight": 0.1})
    student = tensor([[-1.0, -1.0, -1.0]]).requires_grad_()
    loss, stats = objective_loss(student, inputs, config, StepTotals(2, 1, 1))
    assert loss.item() == pytest.approx(0.1 * 2.0 / 2)
    assert stats.reference_kl_BT.tolist() == [[2.0, 0.0, 0.0]]
