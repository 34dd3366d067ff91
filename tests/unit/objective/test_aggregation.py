"""MATH 6: the check values, C21, and what each aggregation weighs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from objective_cases import objective, run, tensor

from mopd.objective.inputs import StepTotals, TokenInputs

ONLY_ORM = {"teacher": {"weight": 0.0}, "truncation": {"kind": "none"}}


def batch(lengths, losses, groups=None) -> tuple[np.ndarray, TokenInputs]:
    """Rows of `lengths` live tokens whose per-token loss is `losses`: A log pi with log pi = -1."""
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    groups = list(range(len(lengths))) if groups is None else groups
    inside = [sum(n for n, g in zip(lengths, groups, strict=True) if g == own) for own in groups]
    return np.full(mask.shape, -1.0), TokenInputs(
        mask_BT=tensor(mask, torch.bool),
        sampler_logprobs_BT=tensor(np.full(mask.shape, -1.0)),
        orm_advantage_B=tensor(losses),
        group_tokens_B=tensor(inside),
    )


@pytest.mark.parametrize(
    ("aggregation", "want"), [("token", 0.2), ("sequence", 0.5), ("constant", 0.1)]
)
def test_check_values(aggregation, want):
    """Lengths 2 and 8, per-token losses 1 and 0; constant: L = 10, two sequences."""
    config = objective(
        aggregation=aggregation,
        constant_length=10.0 if aggregation == "constant" else None,
        **ONLY_ORM,
    )
    loss, gradient, _ = run(*batch([2, 8], [1.0, 0.0]), config)
    assert loss == pytest.approx(want, abs=1e-15)
    np.testing.assert_allclose(gradient[0, :2].numpy(), -want / 2)


def test_prompt_mean_is_over_the_tokens_of_a_prompts_group_then_over_prompts():
    """Group a: lengths 2 and 8 with losses 1 and 0 -> .2; group b: length 5, loss 3 -> 3."""
    config = objective(aggregation="prompt", **ONLY_ORM)
    student, inputs = batch([2, 8, 5], [1.0, 0.0, 3.0], groups=["a", "a", "b"])
    loss, gradient, stats = run(student, inputs, config, StepTotals(15, 3, 2))
    assert loss == pytest.approx((0.2 + 3.0) / 2, abs=1e-15)
    assert gradient[0, 0].item() == pytest.approx(-1 / 10 / 2)
    assert stats.prompt_share_B.tolist() == pytest.approx([0.2, 0.8, 1.0])


def test_c21_the_token_mean_is_the_steps_not_the_ranks():
    """Rank 0: one token of loss 4; rank 1: three tokens of loss 0: 1.0, not 2.0."""
    config, totals = objective(aggregation="token", **ONLY_ORM), StepTotals(4, 2, 2)
    shares = [run(*batch([n], [a]), config, totals)[0] for n, a in ((1, 4.0), (3, 0.0))]
    assert sum(shares) == 1.0


def test_the_sequence_mean_by_kept_tokens():
    """One of two tokens is outside the band: /2 as printed, /1 by what is kept."""
    student, inputs = batch([2], [1.0])
    sampler = inputs.sampler_logprobs_BT.clone()
    sampler[0, 1] = -9.0
    inputs = TokenInputs(inputs.mask_BT, sampler, inputs.orm_advantage_B)
    for denominator, want in (("response", 0.5), ("kept", 1.0)):
        config = objective(teacher={"weight": 0.0}, denominator=denominator)
        assert run(student, inputs, config)[0] == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "constant"])
def test_c22_nothing_live_is_exactly_nothing(aggregation):
    config = objective(
        aggregation=aggregation,
        constant_length=3.0 if aggregation == "constant" else None,
        **ONLY_ORM,
    )
    dead = TokenInputs(
        mask_BT=torch.zeros(2, 3, dtype=torch.bool),
        sampler_logprobs_BT=torch.full((2, 3), float("nan")),
        orm_advantage_B=torch.full((2,), float("inf")),
        group_tokens_B=torch.zeros(2),
        domain_weight_B=torch.full((2,), float("nan")),
    )
    for totals in (StepTotals(0, 0, 0), StepTotals(7, 3, 2)):
        loss, gradient, stats = run(np.full((2, 3), np.nan), dead, config, totals)
        assert loss == 0.0 and torch.equal(gradient, torch.zeros_like(gradient))
        assert not stats.kept_BT.any() and stats.prompt_share_B.sum() == 0
