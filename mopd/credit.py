"""From scored samples to what the student trains on: rewards, advantages, domain weights.

    reward (shaped) -> A_ORM within the group -> alpha_domain(step) * A_ORM     MATH 4, 8
    domain weights for the loss                                               MATH 7

Pure bookkeeping on the driver; the teacher's part of the advantage is taken where log pi is known,
in the student's ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mopd.config.objective_needs import alphas, needs_teacher
from mopd.config.schema import Config
from mopd.errors import ConfigError
from mopd.objective.balance import DomainShare, domain_weights
from mopd.objective.orm import OrmAdvantages, zero_variance_groups
from mopd.objective.schedules import value_at
from mopd.objective.shaping import kimi_length_rewards, overlong_penalty
from mopd.types import ScoredSample, TrainSample, group_of


class Credit:
    """Gives every live sample its part of the loss. Its state is part of a checkpoint."""

    def __init__(self, config: Config) -> None:
        self._config = config
        # A critic makes advantages of rewards where the values are, in the student's ranks.
        critic = config.objective.orm.estimator == "ppo_gae"
        self._orm = None if critic else OrmAdvantages(config.objective.orm)
        self._alphas = alphas(config)

    def samples(
        self, scored: Sequence[ScoredSample], step: int
    ) -> tuple[list[TrainSample], dict[str, float]]:
        """(what the student trains on, metrics) for the answers of step `step`, counted from 0.

        A sample without teacher scores is dropped where the objective asks its teacher (never
        scored by another domain's teacher, never zero-filled). One without a verdict keeps its
        distillation part; its ORM part is 0 and it is no part of its group's baseline. Without a
        distillation part it has nothing to say and is left out.
        """
        objective = self._config.objective
        groups = [group_of(sample.rollout.sample_id) for sample in scored]
        rewards = [reward_of(sample, objective.orm.reward) for sample in scored]
        rewards = self._shaped(scored, rewards, groups, step)
        flat = zero_variance_groups(rewards, groups)
        metrics = {"zero_variance_groups": len(flat) / max(len(set(groups)), 1)}
        advantages = [0.0] * len(scored)
        if self._orm is not None:
            advantages = self._orm.advantages(rewards, groups)
        # Without a distillation part, a group that is left out of the ORM part says nothing.
        silent = flat if objective.orm.zero_variance == "drop" else set()
        factor = value_at(objective.orm.alpha_schedule, step, self._config.train.steps)
        metrics["alpha_factor"] = factor
        asked, has_reference = needs_teacher(objective), objective.kl.reference is not None
        live = [
            TrainSample(
                sample_id=sample.rollout.sample_id,
                domain=sample.rollout.prompt.domain,
                prompt_ids=sample.rollout.prompt.token_ids,
                response_ids=sample.rollout.response_ids,
                sampler_logprobs=sample.rollout.sampler_logprobs,
                teacher_logprobs=sample.teacher_logprobs if asked else None,
                orm_advantage=factor * self._alphas[sample.rollout.prompt.domain] * advantage,
                reward=reward if self._orm is None and group not in silent else None,
                reward_weight=factor * self._alphas[sample.rollout.prompt.domain],
                reference_logprobs=sample.reference_logprobs,
                teacher_topk=sample.teacher_topk,
                sampler_topk=sample.rollout.topk,
                routed_experts=sample.rollout.routed_experts,
            )
            for sample, reward, group, advantage in zip(
                scored, rewards, groups, advantages, strict=True
            )
            if (sample.teacher_logprobs is not None or not asked)
            and (sample.reference_logprobs is not None or not has_reference)
            and (objective.teacher.weight > 0 or (reward is not None and group not in silent))
        ]
        weights = self._domain_weights(live)
        metrics |= {f"domain/{name}/weight": value for name, value in weights.items()}
        if weights:
            live = [replace(sample, weight=weights[sample.domain]) for sample in live]
        return live, metrics

    def _shaped(
        self,
        scored: Sequence[ScoredSample],
        rewards: Sequence[float | None],
        groups: Sequence[str],
        step: int,
    ) -> list[float | None]:
        """Rewards with the overlong penalty and the length reward, where they are asked for."""
        orm, limit = self._config.objective.orm, self._config.rollout.max_response_tokens
        lengths = [len(sample.rollout.response_ids) for sample in scored]
        shaped = list(rewards)
        if orm.overlong_buffer is not None:
            shaped = [
                None if r is None else r + overlong_penalty(n, limit, orm.overlong_buffer)
                for r, n in zip(shaped, lengths, strict=True)
            ]
        if orm.length_reward is not None:
            weight = value_at(orm.length_reward, step, self._config.train.steps)
            members: dict[str, list[int]] = {}
            for place, (group, reward) in enumerate(zip(groups, rewards, strict=True)):
                if reward is not None:
                    members.setdefault(group, []).append(place)
            for places in members.values():
                bonus = kimi_length_rewards(
                    [lengths[i] for i in places], [rewards[i] == 1 for i in places]
                )
                for i, b in zip(places, bonus, strict=True):
                    shaped[i] = (shaped[i] or 0.0) + weight * b
        return shaped

    def _domain_weights(self, live: Sequence[TrainSample]) -> dict[str, float]:
        if self._config.objective.balance.kind == "none":
            return {}
        return domain_weights(
            self._config.objective.balance,
            self._config.objective.aggregation,
            {
                name: domain_share(
                    [s for s in live if s.domain == name], self._config.objective.teacher.clip
                )
                for name in sorted({s.domain for s in live})
            },
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "estimator": self._config.objective.orm.estimator,
            "orm": {} if self._orm is None else self._orm.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; ConfigError if another estimator left it."""
        own = self._config.objective.orm.estimator
        if state.get("estimator") != own:
            raise ConfigError(
                f"objective.orm.estimator is {own!r}, but the checkpoint was made with "
                f"{state.get('estimator')!r}; resume with that one, or start a run of another name"
            )
        if self._orm is not None:
            self._orm.load_state_dict(state["orm"])


def reward_of(sample: ScoredSample, kind: str) -> float | None:
    """The outcome reward, or None where there is no verdict."""
    if sample.verdict is None:
        return None
    return float(sample.verdict.correct) if kind == "correct" else sample.verdict.score


def domain_share(samples: Sequence[TrainSample], clip: float) -> DomainShare:
    """What one domain brings to the step: tokens, sequences, prompts, and its gap to the teacher.

    The gap is the mean |clip(log T - log mu)| per token, nats: mu, the sampler's, stands for pi,
    which is known only after the forward pass, so that no split of the step can change it.
    """
    gaps = [
        min(abs(t - m), clip) if clip > 0 else abs(t - m)
        for s in samples
        if s.teacher_logprobs is not None
        for t, m in zip(s.teacher_logprobs, s.sampler_logprobs, strict=True)
    ]
    return DomainShare(
        tokens=sum(len(s.response_ids) for s in samples),
        sequences=len(samples),
        prompts=len({group_of(s.sample_id) for s in samples}),
        gap=sum(gaps) / len(gaps) if gaps else 0.0,
    )
