"""ORM advantages: how much better an answer's reward is than its group's (MATH 4).

A group is the G samples of one prompt. r are the rewards of those with a verdict, r_bar their
mean. An estimator sees all groups of the batch at once (some estimators normalise over the batch).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mopd.errors import DataError
from mopd.objective.registry import lookup

GRPO_EPS = 1e-6

Estimator = Callable[[Sequence[Tensor]], list[Tensor]]
"""Groups of float64 rewards, [G_k] each with G_k >= 1 -> advantages of the same shapes."""


def _centred(rewards_G: Tensor) -> Tensor:
    """r - r_bar, exactly 0 where all rewards are equal (their mean is rounded)."""
    if bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


def grpo(groups: Sequence[Tensor]) -> list[Tensor]:
    """(r - r_bar) / (sigma + eps), sigma the population standard deviation: [1, 0] -> +1, -1."""
    return [_centred(r) / (r.std(correction=0) + GRPO_EPS) for r in groups]


def rloo(groups: Sequence[Tensor]) -> list[Tensor]:
    """r_i minus the mean of the others = G / (G - 1) * (r_i - r_bar); G = 1 -> 0."""
    return [_centred(r) * (len(r) / max(len(r) - 1, 1)) for r in groups]


def dr_grpo(groups: Sequence[Tensor]) -> list[Tensor]:
    """r - r_bar. Its authors pair it with a constant normaliser of the loss."""
    return [_centred(r) for r in groups]


ORM_ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "rloo": rloo, "dr_grpo": dr_grpo}


def group_advantages(
    rewards: Sequence[float | None], groups: Sequence[str], estimator: str
) -> list[float]:
    """Advantage of each sample within its own group; samples of a group may stand anywhere.

    rewards: None where there is no verdict (the verifier failed, or there is none): advantage 0,
        and the sample takes no part in its group's baseline. A failed verifier is not a wrong
        answer.
    groups: the group's id of each sample, e.g. ``STEP:PROMPT_ID``.
    Raises ConfigError for an unknown estimator, DataError for a reward that is not finite,
    ValueError where the two sequences differ in length.
    """
    estimate = lookup(ORM_ESTIMATORS, estimator, "objective.orm")
    members: dict[str, list[int]] = {}
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if reward is None:
            continue
        if not math.isfinite(reward):
            raise DataError(
                f"reward of sample {index} (group {group!r}) is {reward}; expected a finite "
                "number, or None where the verifier could not judge. Mend that domain's verifier."
            )
        members.setdefault(group, []).append(index)
    by_group = [
        torch.tensor([rewards[i] for i in indices], dtype=torch.float64)
        for indices in members.values()
    ]
    advantages = [0.0] * len(rewards)
    for indices, values in zip(members.values(), estimate(by_group), strict=True):
        for index, value in zip(indices, values.tolist(), strict=True):
            advantages[index] = value
    return advantages
