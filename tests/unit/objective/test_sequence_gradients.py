"""MATH 11.7: two tokens, every sequence enumerated: token-level and reward-to-go gradients."""

from __future__ import annotations

import torch
from objective_cases import objective
from torch import Tensor

from mopd.objective.inputs import StepTotals, TokenInputs
from mopd.objective.loss import objective_loss

V = 3
FIRST, SECOND = (axis.flatten() for axis in torch.meshgrid(*[torch.arange(V)] * 2, indexing="ij"))


def tables(seed: int) -> Tensor:
    """[1 + V, V]: logits of the first token, then of the second after each first."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + V, V, generator=generator, dtype=torch.float64)


def token_logprobs(theta: Tensor) -> Tensor:
    """[V * V, 2]: of both tokens of every sequence."""
    logp = theta.log_softmax(-1)
    return torch.stack([logp[0, FIRST], logp[1 + FIRST, SECOND]], dim=1)


def gradient(theta: Tensor, teacher: Tensor, **of_teacher: bool) -> Tensor:
    """Exact expectation over y ~ pi of the objective's gradient (sum over a sequence's tokens)."""
    theta = theta.clone().requires_grad_()
    logp = token_logprobs(theta)
    probability = logp.detach().sum(1).exp()
    size = V * V
    inputs = TokenInputs(
        mask_BT=torch.ones(size, 2, dtype=torch.bool),
        sampler_logprobs_BT=logp.detach(),
        orm_advantage_B=torch.zeros(size),
        teacher_logprobs_BT=token_logprobs(teacher),
        domain_weight_B=probability * size,
    )
    config = objective(
        teacher={"clip": 0.0, **of_teacher}, aggregation="constant", constant_length=1.0
    )
    loss, _ = objective_loss(logp, inputs, config, StepTotals(2 * size, size, size))
    return torch.autograd.grad(loss, theta)[0]


def test_7_token_level_is_the_state_detached_gradient_and_reward_to_go_the_full_one():
    theta, teacher = tables(0), tables(1)

    def kl_of_states(parameters: Tensor) -> Tensor:
        p, logp, logq = (
            parameters.softmax(-1),
            parameters.log_softmax(-1),
            teacher.log_softmax(-1),
        )
        return (p * (logp - logq)).sum(-1)

    leaf = theta.clone().requires_grad_()
    by_state = kl_of_states(leaf)
    reached = leaf.softmax(-1)[0]
    state_detached = by_state[0] + (reached.detach() * by_state[1:]).sum()
    full = by_state[0] + (reached * by_state[1:]).sum()
    (want_token,) = torch.autograd.grad(state_detached, leaf, retain_graph=True)
    (want_full,) = torch.autograd.grad(full, leaf)

    # the full one is the gradient of the KL of whole sequences
    log_ratio = (token_logprobs(leaf) - token_logprobs(teacher)).sum(1)
    sequence_kl = (token_logprobs(leaf).sum(1).exp() * log_ratio).sum()
    (of_sequences,) = torch.autograd.grad(sequence_kl, leaf)
    torch.testing.assert_close(want_full, of_sequences, rtol=0, atol=1e-12)

    token = gradient(theta, teacher)
    to_go = gradient(theta, teacher, reward_to_go=True)
    torch.testing.assert_close(token, want_token, rtol=0, atol=1e-12)
    torch.testing.assert_close(to_go, want_full, rtol=0, atol=1e-12)
    assert (token - to_go).abs().max() > 1e-2, "they must differ"
    assert (token[1:] - to_go[1:]).abs().max() < 1e-12, "the last token has nothing to go to"


def test_reward_to_go_sums_over_live_tokens_and_clips_each():
    teacher = torch.tensor([[1.0, 50.0, -9.0, 2.0]], dtype=torch.float64)
    student = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    inputs = TokenInputs(
        mask_BT=torch.tensor([[True, False, True, True]]),
        sampler_logprobs_BT=torch.zeros(1, 4),
        orm_advantage_B=torch.tensor([0.25]),
        teacher_logprobs_BT=teacher,
    )
    config = objective(teacher={"clip": 5.0, "reward_to_go": True, "weight": 0.5})
    _, stats = objective_loss(student, inputs, config, StepTotals(3, 1, 1))
    assert stats.advantage_BT.tolist() == [[-0.75, 0.0, -1.25, 1.25]]
    assert stats.gap_BT.tolist() == [[1.0, 0.0, 5.0, 2.0]]
    assert stats.clipped_BT.tolist() == [[False, False, True, False]]
