"""ORM advantages: how much better an answer's reward is than its group's (MATH 4).

A group is the G samples of one prompt. r are the rewards of those with a verdict, r_bar their
mean. An estimator sees all groups of the batch at once (some normalise over the batch).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mopd.errors import ConfigError, DataError
from mopd.objective.registry import lookup
from mopd.objective_names import ALL_WRONG, BASELINE_DECAY

if TYPE_CHECKING:
    from mopd.config.objective import OrmConfig

EPS = GRPO_EPS = 1e-6
"""Added to every standard deviation that divides."""

Estimator = Callable[[Sequence[Tensor]], list[Tensor]]
"""Groups of float64 rewards, [G_k] each with G_k >= 1 -> advantages of the same shapes."""


def _centred(rewards_G: Tensor) -> Tensor:
    """r - r_bar, exactly 0 where all rewards are equal (their mean is rounded)."""
    if bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


def grpo(groups: Sequence[Tensor]) -> list[Tensor]:
    """(r - r_bar) / (sigma + eps), sigma the population standard deviation: [1, 0] -> +1, -1.

    DeepSeekMath (arXiv 2402.03300). All equal, or a group of one: 0.
    """
    return [_centred(r) / (r.std(correction=0) + EPS) for r in groups]


def rloo(groups: Sequence[Tensor]) -> list[Tensor]:
    """r_i minus the mean of the others = G / (G - 1) * (r_i - r_bar); G = 1 -> 0.

    Leave-one-out REINFORCE (arXiv 2402.14740): the baseline does not know its own sample.
    """
    return [_centred(r) * (len(r) / max(len(r) - 1, 1)) for r in groups]


def dr_grpo(groups: Sequence[Tensor]) -> list[Tensor]:
    """r - r_bar (arXiv 2503.20783). Its authors pair it with a constant normaliser of the loss."""
    return [_centred(r) for r in groups]


def agapo(groups: Sequence[Tensor]) -> list[Tensor]:
    """Leave-one-out within the group, then (A - mean) / (sigma + eps) over the batch.

    EXAONE 4.0 (arXiv 2507.11407). A group whose rewards are all equal is 0 before the z-score and
    counts in it. What its authors give a group without a success is `objective.orm.all_wrong`.
    """
    advantages = rloo(groups)
    return _whitened(advantages)


def maxrl(groups: Sequence[Tensor]) -> list[Tensor]:
    """(r - r_bar) / r_bar, 0 without a success; rewards 0 and 1 only. MaxRL (arXiv 2602.02710).

    A prompt solved once in G weighs its one success by G - 1: the hardest count most.
    Raises DataError for other rewards: the formula is of a success rate.
    """
    for r in groups:
        if bool(((r != 0) & (r != 1)).any()):
            raise DataError(
                f"maxrl got the rewards {r.tolist()}; expected 0 and 1 only. Take "
                "objective.orm.reward: correct without shaping, or another estimator."
            )
    return [_centred(r) / r.mean() if bool(r.any()) else torch.zeros_like(r) for r in groups]


ORM_ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "dr_grpo": dr_grpo,
    "agapo": agapo,
    "maxrl": maxrl,
    "kimi": dr_grpo,  # K1.5: r - r_bar; its regulariser is a policy loss
}
"""The estimators without a memory. `reinforce` has one: see OrmAdvantages."""


class OrmAdvantages:
    """The configured estimator, with what it remembers between batches.

    REINFORCE without a constant baseline subtracts the running mean of the batches' mean rewards:
    b <- decay b + (1 - decay) mean, updated after use, so that no sample is in its own baseline;
    the first batch uses its own mean. Other estimators remember nothing.
    """

    def __init__(self, config: OrmConfig) -> None:
        self._config = config
        self._running: float | None = None
        self._all_wrong = ALL_WRONG if config.all_wrong is None else config.all_wrong
        if config.all_wrong is not None and config.estimator != "agapo":
            raise ConfigError(
                f"objective.orm.all_wrong is {config.all_wrong}, but the estimator "
                f"{config.estimator!r} does not read it: remove it, or take agapo"
            )
        if config.estimator == "ppo_gae":
            raise ConfigError(
                "objective.orm.estimator is 'ppo_gae', which needs a critic's values: its "
                "advantages are made where those are (mopd.student.critic)."
            )
        if config.estimator != "reinforce":
            lookup(ORM_ESTIMATORS, config.estimator, "objective.orm.estimator")
        lookup({"keep": 0, "drop": 0}, config.zero_variance, "objective.orm.zero_variance")

    def advantages(self, rewards: Sequence[float | None], groups: Sequence[str]) -> list[float]:
        """A_ORM of each sample (before alpha); samples of a group may stand anywhere.

        rewards: None where there is no verdict (the verifier failed, or there is none): advantage
            0, and the sample takes no part in any mean or deviation. A failed verifier is not a
            wrong answer.
        groups: the group's id of each sample, e.g. ``STEP:PLACE:PROMPT_ID``.
        With zero_variance `drop`, groups whose rewards are all equal are left out in the same way
        and get 0. With `whiten`, (A - mean) / (sigma + eps) over all that are left.
        Updates the running baseline: call it once a batch.
        Raises DataError for a reward that is not finite, ValueError where the lengths differ.
        """
        config = self._config
        members = _members(rewards, groups)
        all_rewards = [reward for reward in rewards if reward is not None]
        if config.zero_variance == "drop":
            flat = zero_variance_groups(rewards, groups)
            members = {group: places for group, places in members.items() if group not in flat}
        values = [_tensor([rewards[i] for i in places]) for places in members.values()]
        by_group = self._estimate(values, all_rewards)
        if config.whiten:
            by_group = _whitened(by_group)
        if self._all_wrong:
            by_group = [
                torch.full_like(r, self._all_wrong) if bool((r <= 0).all()) else a
                for r, a in zip(values, by_group, strict=True)
            ]
        return _scatter(len(rewards), members, by_group)

    def _estimate(self, values: list[Tensor], all_rewards: list[float]) -> list[Tensor]:
        config = self._config
        if config.estimator != "reinforce":
            return lookup(ORM_ESTIMATORS, config.estimator, "objective.orm.estimator")(values)
        if config.baseline is not None:
            return [r - config.baseline for r in values]
        if not all_rewards:
            return []
        mean = math.fsum(all_rewards) / len(all_rewards)
        before = mean if self._running is None else self._running
        decay = BASELINE_DECAY if config.baseline_decay is None else config.baseline_decay
        self._running = decay * before + (1 - decay) * mean
        return [r - before for r in values]

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"running_baseline": self._running}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._running = state["running_baseline"]


def zero_variance_groups(rewards: Sequence[float | None], groups: Sequence[str]) -> set[str]:
    """Ids of the groups with at least one verdict whose rewards are all equal."""
    return {
        group
        for group, places in _members(rewards, groups).items()
        if len({rewards[i] for i in places}) == 1
    }


def _members(rewards: Sequence[float | None], groups: Sequence[str]) -> dict[str, list[int]]:
    """group -> places of its samples with a verdict."""
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
    return members


def _tensor(rewards: Sequence[float | None]) -> Tensor:
    return torch.tensor(rewards, dtype=torch.float64)


def _scatter(
    size: int, members: Mapping[str, Sequence[int]], by_group: Sequence[Tensor]
) -> list[float]:
    advantages = [0.0] * size
    for places, values in zip(members.values(), by_group, strict=True):
        for place, value in zip(places, values.tolist(), strict=True):
            advantages[place] = value
    return advantages


def _whitened(by_group: Sequence[Tensor]) -> list[Tensor]:
    """(A - mean) / (sigma + eps) over all samples of all groups; exactly 0 where all are equal."""
    if not by_group:
        return []
    sizes = [len(a) for a in by_group]
    flat = torch.cat(list(by_group))
    scaled = _centred(flat) / (flat.std(correction=0) + EPS)
    return list(scaled.split(sizes))
