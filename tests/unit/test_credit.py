"""From scored answers to what the student trains on: alphas, shaping, filters, balance, state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from mopd.config.objective import ScheduleConfig
from mopd.config.schema import Config, DomainConfig
from mopd.credit import Credit
from mopd.errors import ConfigError
from mopd.types import Prompt, Rollout, ScoredSample, TrainSample, Verdict

PROMPTS = {name: Prompt(f"{name}/0", name, "q", (1,)) for name in ("math", "code")}


def config(**objective: Any) -> Config:
    """`objective` keys are dotted: orm__alpha=1."""
    made = Config(
        domains={"math": DomainConfig(teacher="t", alpha=0.5), "code": DomainConfig(teacher="u")}
    )
    made.train.steps, made.rollout.max_response_tokens = 10, 10
    for dotted, value in objective.items():
        part: Any = made.objective
        *path, key = dotted.split("__")
        for name in path:
            part = getattr(part, name)
        assert hasattr(part, key), dotted
        setattr(part, key, value)
    return made


def sample(
    k: int,
    correct: bool | None,
    *,
    domain: str = "math",
    length: int = 2,
    teacher: float | None = -1.0,
    reference: float | None = None,
) -> ScoredSample:
    rollout = Rollout(
        f"0:0:{domain}/0:{k}", PROMPTS[domain], (7,) * length, (-1.5,) * length, 0, "stop"
    )
    return ScoredSample(
        rollout,
        None if teacher is None else (teacher,) * length,
        None if correct is None else Verdict(correct, float(correct)),
        reference_logprobs=None if reference is None else (reference,) * length,
    )


def advantages(samples: Sequence[TrainSample]) -> list[float]:
    return [round(s.orm_advantage, 6) for s in samples]


def test_each_domain_has_its_alpha_and_the_schedule_multiplies_it() -> None:
    schedule = ScheduleConfig(kind="linear", value=1.0, end_value=0.0)
    credit = Credit(config(orm__alpha=2.0, orm__estimator="dr_grpo", orm__alpha_schedule=schedule))
    scored = [
        sample(0, True),
        sample(1, False),
        sample(0, True, domain="code"),
        sample(1, False, domain="code"),
    ]
    assert advantages(credit.samples(scored, 0)[0]) == [0.25, -0.25, 1.0, -1.0]
    assert advantages(credit.samples(scored, 5)[0]) == [0.125, -0.125, 0.5, -0.5]
    assert credit.samples(scored, 5)[1]["alpha_factor"] == 0.5


def test_a_flat_group_keeps_its_distillation_part_and_is_left_out_without_one() -> None:
    scored = [sample(0, True), sample(1, True), sample(0, True, domain="code")]
    scored.append(sample(1, False, domain="code"))
    drop = {"orm__alpha": 1.0, "orm__zero_variance": "drop", "orm__estimator": "reinforce"}
    both, metrics = Credit(config(**drop, orm__baseline=0.0)).samples(scored, 0)
    assert advantages(both) == [0.0, 0.0, 1.0, 0.0]  # alpha of math is .5, its group is flat
    assert metrics["zero_variance_groups"] == 0.5
    alone, _ = Credit(config(**drop, orm__baseline=0.0, teacher__weight=0.0)).samples(scored, 0)
    assert [s.domain for s in alone] == ["code", "code"]
    assert all(s.teacher_logprobs is None for s in alone)


def test_without_a_teachers_part_only_a_verdict_makes_a_sample() -> None:
    scored = [sample(0, True, teacher=None), sample(1, None, teacher=None)]
    kept, _ = Credit(config(teacher__weight=0.0, orm__alpha=1.0)).samples(scored, 0)
    assert [s.sample_id for s in kept] == ["0:0:math/0:0"]
    kept, _ = Credit(config(orm__alpha=1.0)).samples(scored, 0)
    assert kept == []  # asked for, and missing


def test_a_sample_that_its_reference_did_not_score_is_dropped() -> None:
    made = config(kl__kind="k2", kl__weight=0.1, kl__reference="u")
    scored = [sample(0, True, reference=-2.0), sample(1, True)]
    kept, _ = Credit(made).samples(scored, 0)
    assert [s.reference_logprobs for s in kept] == [(-2.0, -2.0)]


def test_length_shaping_changes_the_reward_before_the_advantage() -> None:
    scored = [sample(0, True, length=2), sample(1, True, length=10), sample(2, False, length=9)]
    made = config(orm__alpha=1.0, orm__estimator="reinforce", orm__baseline=0.0)
    made.domains["math"].alpha = None
    made.objective.orm.overlong_buffer = 4
    assert advantages(Credit(made).samples(scored, 0)[0]) == [1.0, 0.0, -0.75]
    made.objective.orm.overlong_buffer = None
    made.objective.orm.length_reward = ScheduleConfig(value=0.5, from_step=3)
    credit = Credit(made)
    assert advantages(credit.samples(scored, 2)[0]) == [1.0, 1.0, 0.0]
    # lambda = 1/2 - (n - 2) / 8: .5, -.5 and min(0, -.375)
    assert advantages(credit.samples(scored, 3)[0]) == [1.25, 0.75, -0.1875]


def test_balance_gives_short_answers_their_share() -> None:
    made = config(balance__kind="token_share", aggregation="token")
    scored = [sample(0, None, length=80), sample(0, None, domain="code", length=4)]
    kept, metrics = Credit(made).samples(scored, 0)
    assert [round(s.weight, 3) for s in kept] == [0.525, 10.5]  # MATH 7
    assert metrics["domain/code/weight"] == pytest.approx(10.5)
    assert [s.weight for s in Credit(config()).samples(scored, 0)[0]] == [1.0, 1.0]


def test_the_gap_is_that_to_the_teacher_and_is_clipped_as_the_advantage() -> None:
    made = config(balance__kind="gap", balance__low=1e-6)
    scored = [sample(0, None, teacher=-1.0), sample(0, None, domain="code", teacher=-100.0)]
    kept, _ = Credit(made).samples(scored, 0)  # gaps .5 and 5 (clip) nats, equal sequence shares
    assert kept[1].weight / kept[0].weight == pytest.approx(10.0)


def test_the_running_baseline_is_saved_and_goes_on() -> None:
    made = config(orm__alpha=1.0, orm__estimator="reinforce")
    first, straight = [sample(0, True), sample(1, False)], Credit(made)
    straight.samples(first, 0)
    resumed = Credit(made)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    after = [sample(0, True), sample(1, True)]
    assert resumed.samples(after, 1)[0] == straight.samples(after, 1)[0]
    assert advantages(Credit(made).samples(after, 1)[0]) == [0.0, 0.0]  # without it: not the same
    with pytest.raises(ConfigError, match="made with 'reinforce'"):
        Credit(config(orm__estimator="ppo_gae")).load_state_dict(straight.state_dict())


def test_a_critic_is_given_rewards_not_advantages() -> None:
    made = config(orm__estimator="ppo_gae", orm__alpha=0.5, teacher__weight=0.0)
    made.domains["math"].alpha = None
    credit = Credit(made)
    kept, _ = credit.samples([sample(0, True), sample(1, False), sample(2, None)], 0)
    assert [(s.reward, s.reward_weight, s.orm_advantage) for s in kept] == [
        (1.0, 0.5, 0.0),
        (0.0, 0.5, 0.0),
    ]
    credit.load_state_dict(json.loads(json.dumps(credit.state_dict())))
