"""MATH 11: facts about the objective that have exact answers, on softmax tables in float64.

Expectations are exact, by enumeration: each of the V tokens is one sequence of length 1, "sampled"
by mu. With mu uniform, w = pi * V, and the mean over the V sequences is the expectation under pi.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from objective_cases import loss_config, objective
from torch import Tensor

from mopd.config.objective import OrmConfig
from mopd.objective.inputs import StepTotals, TokenInputs
from mopd.objective.loss import objective_loss
from mopd.objective.orm import OrmAdvantages
from mopd.objective.policy_losses import POLICY_LOSSES
from mopd.objective.stats import TokenStats


def group_advantages(
    rewards: Sequence[float | None], groups: Sequence[str], estimator: str
) -> list[float]:
    """By the estimator's own defaults."""
    return OrmAdvantages(OrmConfig(estimator=estimator)).advantages(rewards, groups)


WIDE = {"icepop_low": 0.0, "icepop_high": math.inf, "advantage_clip": 0.0}


def mopd_loss(
    student_BT: Tensor,
    sampler_BT: Tensor,
    teacher_BT: Tensor,
    mask_BT: Tensor,
    orm_B: Tensor,
    sequences: int,
    *,
    icepop_low: float = 0.5,
    icepop_high: float = 5.0,
    advantage_clip: float = 5.0,
) -> tuple[Tensor, TokenStats]:
    config = objective(
        teacher={"clip": advantage_clip}, truncation={"low": icepop_low, "high": icepop_high}
    )
    inputs = TokenInputs(mask_BT, sampler_BT, orm_B, teacher_logprobs_BT=teacher_BT)
    totals = StepTotals(float(mask_BT.sum()), sequences, sequences)
    return objective_loss(student_BT, inputs, config, totals)


def enumerated_loss(
    student_logp_V: Tensor,
    teacher_logp_V: Tensor,
    sampler_logp_V: Tensor | None = None,
    orm_V: Tensor | None = None,
    **options: float,
) -> Tensor:
    """Loss over all V one-token answers; the mean over them is under a uniform mu by default."""
    size = student_logp_V.shape[0]
    uniform = torch.full((size,), -math.log(size), dtype=torch.float64)
    loss, _ = mopd_loss(
        student_logp_V.unsqueeze(1),
        (uniform if sampler_logp_V is None else sampler_logp_V).unsqueeze(1),
        teacher_logp_V.unsqueeze(1),
        torch.ones(size, 1, dtype=torch.bool),
        torch.zeros(size, dtype=torch.float64) if orm_V is None else orm_V,
        size,
        **{**WIDE, **options},
    )
    return loss


def table(seed: int, size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(size, generator=generator, dtype=torch.float64).log_softmax(0)
    return theta, teacher


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum()


@pytest.mark.parametrize("seed", range(4))
def test_1_softmax_bandit(seed):
    """E[grad L] = p * (log(p/q) - KL), the gradient of the reverse KL itself."""
    theta, teacher = table(seed)
    (grad,) = torch.autograd.grad(enumerated_loss(theta.log_softmax(0), teacher), theta)
    p, q = theta.detach().softmax(0), teacher.exp()
    want = p * (torch.log(p / q) - kl(p, q))
    torch.testing.assert_close(grad, want, rtol=0, atol=1e-10)
    (autograd,) = torch.autograd.grad(kl(theta.softmax(0), q), theta)
    torch.testing.assert_close(grad, autograd, rtol=0, atol=1e-10)


def test_2_leaving_the_advantage_attached_changes_the_gradient():
    """The stop-gradient is felt: with A attached there is w * dA = -w more per token."""
    student = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-0.5, -2.5]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, _ = mopd_loss(student, student.detach(), teacher, mask, torch.zeros(1), 1, **WIDE)
    (grad,) = torch.autograd.grad(loss, student)
    (attached,) = torch.autograd.grad(-((teacher - student) * student).sum() / 2, student)
    torch.testing.assert_close(grad, -(teacher - student).detach() / 2, rtol=0, atol=1e-15)
    assert (grad - attached).abs().min() > 0.1


def _sampler() -> Tensor:
    return torch.tensor([0.4, 0.3, 0.15, 0.1, 0.03, 0.02], dtype=torch.float64)


def _mu_mean(theta: Tensor, teacher: Tensor, log_mu: Tensor, mu: Tensor, **options) -> Tensor:
    """Gradient of sum_y mu(y) L(y), where the trainer is *told* log_mu for each y."""
    total = torch.zeros_like(theta)
    for y in range(len(mu)):
        logp = theta.log_softmax(0)[y : y + 1]
        loss = enumerated_loss(logp, teacher[y : y + 1], log_mu[y : y + 1], **options)
        total += mu[y] * torch.autograd.grad(loss, theta)[0]
    return total


def test_3_raw_weights_are_exact_under_another_sampler():
    theta, teacher = table(3)
    mu = _sampler()
    grad = _mu_mean(theta, teacher, mu.log(), mu)
    p, q = theta.detach().softmax(0), teacher.exp()
    want = p * (torch.log(p / q) - kl(p, q))
    torch.testing.assert_close(grad, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [("tis", None, 1.5), ("mis", None, 1.5), ("raw", None, None), ("none", None, None)],
)
def test_3_what_each_truncation_takes_for_pi(kind, low, high):
    """The expectation under mu is the sum over y of mu w A grad log pi, with that kind's w."""
    theta, teacher = table(3)
    mu = _sampler()
    p, q = theta.detach().softmax(0), teacher.exp()
    ratio = p / mu
    weight = {
        "tis": ratio.clamp(max=1.5),
        "mis": torch.where(ratio <= 1.5, ratio, 0.0),
        "raw": ratio,
        "none": torch.ones_like(ratio),
    }[kind]
    want = -((mu * weight * torch.log(q / p)).unsqueeze(1) * (torch.eye(6) - p)).sum(0)
    logp = theta.log_softmax(0).unsqueeze(1)
    config = objective(teacher={"clip": 0.0}, truncation={"kind": kind, "low": low, "high": high})
    ones = torch.ones(6, 1, dtype=torch.bool)
    inputs = TokenInputs(
        ones, mu.log().unsqueeze(1), torch.zeros(6), teacher_logprobs_BT=teacher.unsqueeze(1),
        domain_weight_B=6 * mu,
    )  # fmt: skip
    loss, _ = objective_loss(logp, inputs, config, StepTotals(6, 6, 6))
    (grad,) = torch.autograd.grad(loss, theta)
    torch.testing.assert_close(grad, want, rtol=0, atol=1e-12)
    exact = p * (torch.log(p / q) - kl(p, q))
    assert ((grad - exact).abs().max() < 1e-12) == (kind == "raw"), "only the raw ratio is exact"


def test_3_a_sequence_is_kept_or_dropped_by_its_geometric_mean():
    """seq_mask: rows of mean log-ratio 0, ln 2, .7, and ln 1/2 with one wild token."""
    two = math.log(2) - 1e-9  # inside, whatever rounding does
    log_ratio = torch.tensor(
        [[3.0, -3.0], [two, two], [0.0, 1.4], [-4.0, 4 - 2 * two]], dtype=torch.float64
    )
    student = torch.full((4, 2), -1.0, dtype=torch.float64, requires_grad=True)
    inputs = TokenInputs(
        torch.ones(4, 2, dtype=torch.bool), student.detach() - log_ratio, torch.ones(4)
    )
    config = objective(teacher={"weight": 0.0}, truncation={"kind": "seq_mask"})
    loss, stats = objective_loss(student, inputs, config, StepTotals(8, 4, 4))
    (grad,) = torch.autograd.grad(loss, student)
    assert stats.kept_BT.all(1).tolist() == [True, True, False, True]
    kept = torch.tensor([[True], [True], [False], [True]])
    want = torch.where(kept, -log_ratio.exp() / 8, 0.0)
    torch.testing.assert_close(grad, want, rtol=1e-12, atol=0)


def test_3_icepop_is_the_sum_over_kept_tokens_only():
    theta, teacher = table(3)
    mu = _sampler()
    p, q = theta.detach().softmax(0), teacher.exp()
    kept = (p / mu >= 0.5) & (p / mu <= 5.0)
    assert 0 < int(kept.sum()) < len(mu), "the example must drop something"
    want = torch.zeros_like(p)
    for y in torch.nonzero(kept).flatten().tolist():
        onehot = torch.zeros_like(p)
        onehot[y] = 1
        want -= p[y] * torch.log(q[y] / p[y]) * (onehot - p)
    grad = _mu_mean(theta, teacher, mu.log(), mu, icepop_low=0.5, icepop_high=5.0)
    torch.testing.assert_close(grad, want, rtol=0, atol=1e-10)


def test_3_sampling_temperature_without_its_weight_is_biased():
    """Samples of T = 0.5 reported with T = 1 logprobs give w = 1 and a wrong gradient; with the
    logprobs of the distribution they were drawn from the gradient is exact."""
    theta, teacher = table(5)
    p, q = theta.detach().softmax(0), teacher.exp()
    mu = (theta.detach() / 0.5).softmax(0)
    want = p * (torch.log(p / q) - kl(p, q))
    right = _mu_mean(theta, teacher, mu.log(), mu)
    wrong = _mu_mean(theta, teacher, p.log(), mu)
    torch.testing.assert_close(right, want, rtol=0, atol=1e-10)
    assert (wrong - want).abs().max() > 1e-2


class TinyModel(torch.nn.Module):
    """Position-dependent logits, so that a shift by one reads another distribution."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(9, 9, generator=generator, dtype=torch.float64))

    def response_logprobs(self, ids_BS: Tensor, prompt: int, shift: int = 0) -> Tensor:
        """[B, R]: position s-1 predicts token s; `shift` is the fault planted by the test."""
        logp_BSV = self.table[ids_BS].log_softmax(-1)
        predicting = logp_BSV[:, prompt - 1 + shift : ids_BS.shape[1] - 1 + shift]
        return predicting.gather(2, ids_BS[:, prompt:].unsqueeze(2)).squeeze(2)


def _assert_stationary(model: TinyModel, ids: Tensor, teacher_shift: int) -> None:
    student = model.response_logprobs(ids, prompt=2)
    with torch.no_grad():
        teacher = model.response_logprobs(ids, prompt=2, shift=teacher_shift)
    mask = torch.ones(student.shape, dtype=torch.bool)
    mask[0, 1:] = False  # a one-token response among longer ones (C06: every batch shape)
    loss, stats = mopd_loss(
        student, student.detach(), teacher, mask, torch.zeros(len(ids)), len(ids)
    )
    (grad,) = torch.autograd.grad(loss, model.table)
    assert stats.advantage_BT.abs().max() < 1e-9
    assert abs(loss.item()) < 1e-9
    assert grad.abs().max() < 1e-9


def test_4_c06_teacher_equal_to_the_student_is_stationary_and_a_shift_is_seen():
    model = TinyModel()
    ids = torch.randint(0, 9, (3, 7), generator=torch.Generator().manual_seed(1))
    _assert_stationary(model, ids, teacher_shift=0)
    with pytest.raises(AssertionError):
        _assert_stationary(model, ids, teacher_shift=-1)


@pytest.mark.parametrize("loss_name", sorted(POLICY_LOSSES))
def test_4_every_loss_is_stationary_at_the_teacher(loss_name):
    student = torch.tensor([[-1.0, -0.2, -2.5]], dtype=torch.float64, requires_grad=True)
    logp = student.detach()
    topk = torch.full((1, 3, 2), -1.0, dtype=torch.float64)
    for shift in (0, 1):
        inputs = TokenInputs(
            torch.ones(1, 3, dtype=torch.bool),
            logp,
            torch.zeros(1),
            old_logprobs_BT=logp,
            teacher_logprobs_BT=logp.roll(shift, 1),
            student_topk_BTK=topk,
            sampler_topk_BTK=topk,
        )
        loss, stats = objective_loss(
            student, inputs, objective(loss=loss_config(loss_name)), StepTotals(3, 1, 1)
        )
        (grad,) = torch.autograd.grad(loss, student)
        largest = max(stats.advantage_BT.abs().max(), grad.abs().max(), loss.abs())
        assert (largest < 1e-12) == (shift == 0)


def _descend(theta: Tensor, loss_of, steps: int, lr: float) -> None:
    for _ in range(steps):
        (grad,) = torch.autograd.grad(loss_of(theta), theta)
        with torch.no_grad():
            theta -= lr * grad


def test_5_fixed_point_of_distillation_plus_orm():
    """A_ORM = r - mean(r) with weight alpha: p* is proportional to q exp(alpha r)."""
    theta, teacher = table(8, size=4)
    reward = torch.tensor([0.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    alpha = 0.7

    def loss_of(parameters: Tensor) -> Tensor:
        p = parameters.detach().softmax(0)
        orm = alpha * (reward - (p * reward).sum())
        return enumerated_loss(parameters.log_softmax(0), teacher, orm_V=orm)

    best = (teacher + alpha * reward).log_softmax(0)
    at_best = best.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(at_best), at_best)
    assert grad.abs().max() < 1e-12
    at_teacher = teacher.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(at_teacher), at_teacher)
    assert grad.abs().max() > 1e-2
    _descend(theta, loss_of, steps=800, lr=1.0)
    torch.testing.assert_close(theta.detach().softmax(0), best.exp(), rtol=0, atol=1e-5)


def test_6_two_domains_converge_each_to_its_own_teacher():
    """Disjoint prompts (rows), one batch, one step's denominator: each row meets its teacher."""
    generator = torch.Generator().manual_seed(4)
    theta = torch.randn(2, 5, generator=generator, dtype=torch.float64).requires_grad_()
    teachers = torch.randn(2, 5, generator=generator, dtype=torch.float64).log_softmax(1)

    def loss_of(parameters: Tensor) -> Tensor:
        loss, _ = mopd_loss(
            parameters.log_softmax(1).reshape(10, 1),
            torch.full((10, 1), -math.log(5), dtype=torch.float64),
            teachers.reshape(10, 1),
            torch.ones(10, 1, dtype=torch.bool),
            torch.zeros(10, dtype=torch.float64),
            10,
            **WIDE,
        )
        return loss

    _descend(theta, loss_of, steps=1500, lr=1.0)
    reached = theta.detach().softmax(1)
    torch.testing.assert_close(reached, teachers.exp(), rtol=0, atol=1e-5)
    assert kl(reached[0], teachers[1].exp()) > 0.05, "the two teachers must differ"


def test_c15_three_token_vocabulary():
    """sum p A = -KL(S||T); dA/dtheta = 0; the gradient is A * grad log S exactly."""
    theta, teacher = table(1, size=3)
    p = theta.detach().softmax(0)
    logp = theta.log_softmax(0).unsqueeze(1)
    mask = torch.ones(3, 1, dtype=torch.bool)
    loss, stats = mopd_loss(
        logp, logp.detach(), teacher.unsqueeze(1), mask, torch.zeros(3), 3, **WIDE
    )
    advantage = stats.advantage_BT.squeeze(1)
    assert not advantage.requires_grad
    assert (p * advantage).sum().item() == pytest.approx(-kl(p, teacher.exp()).item(), abs=1e-12)
    (grad,) = torch.autograd.grad(loss, theta)
    want = -((torch.eye(3, dtype=torch.float64) - p) * advantage.unsqueeze(1)).sum(0) / 3
    torch.testing.assert_close(grad, want, rtol=0, atol=1e-14)


def test_group_advantages_feed_the_loss():
    """The ORM part of one group has mean 0, so at teacher = student equal answers do not move."""
    orm = torch.tensor(group_advantages([1.0, 0.0], ["g", "g"], "dr_grpo"), dtype=torch.float64)
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loss = enumerated_loss(theta.log_softmax(0), theta.detach().log_softmax(0), orm_V=orm)
    (grad,) = torch.autograd.grad(loss, theta)
    torch.testing.assert_close(grad, torch.tensor([-0.25, 0.25], dtype=torch.float64))
