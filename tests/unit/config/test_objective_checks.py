"""Objectives that cannot be meant are refused at start-up, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mopd.config import Config, check_config, config_warnings
from mopd.config.objective_needs import needs_teacher, sampler_top_k, teacher_top_k

Load = Callable[..., Config]
SECOND = "domains.code.verifier=exact_match"
"""The good configuration's second domain has no verifier; rewards need one."""

REFUSED: list[tuple[Sequence[str], str]] = [
    # the teacher's part
    (["objective.teacher.weight=0"], "no domain that is drawn has an alpha above 0"),
    (
        ["objective.teacher.weight=0", "domains.math.alpha=1", "domains.math.weight=0"],
        "no domain that is drawn has an alpha above 0",
    ),
    (
        ["objective.teacher.weight=0", "domains.math.alpha=1"],
        "domains.code has alpha 0 and objective.teacher.weight is 0",
    ),
    (
        [
            "objective.teacher.weight=0",
            "objective.orm={alpha: 1, estimator: reinforce, zero_variance: drop}",
            "train.samples_per_prompt=1",
        ],
        "every answer would be left out",
    ),
    (
        ["objective.orm.alpha=1", SECOND, "objective.orm.alpha_schedule.from_step=1000"],
        "alpha_schedule is 0 for the whole run",
    ),
    (
        ["objective.orm={alpha: 1, estimator: agapo, all_wrong: -0.1, overlong_buffer: 2}", SECOND],
        "all_wrong is for groups whose rewards are all 0",
    ),
    (
        ["objective.balance={kind: gap, exponent: 2000}"],
        "exponent must be at least 0 and at most 10",
    ),
    (
        [
            "objective.teacher.weight=0",
            "objective.teacher.signal=topk",
            "objective.teacher.top_k=4",
        ],
        "signal is topk, but objective.teacher.weight is 0",
    ),
    (
        ["objective.teacher={weight: 0, clip: 2}", "objective.orm.alpha=1", SECOND],
        "clip has no effect while objective.teacher.weight is 0",
    ),
    (
        ["objective.teacher={signal: topk, top_k: 4, refresh: false}"],
        "refresh is of the sampled advantage",
    ),
    (["objective.teacher={signal: topk, top_k: 259}"], "top_k 259 is not below the 259 ids"),
    (["objective.orm.estimator=ppo_gae"], "estimator has no effect: no domain has an alpha"),
    (["objective.orm.whiten=true"], "whiten has no effect: no domain has an alpha above 0"),
    (["objective.truncation={kind: none, ratio: old}"], "ratio has no effect with kind: none"),
    (["objective.teacher.direction=forward"], "estimates the reverse KL only"),
    (["objective.teacher.jsd_beta=0.3"], "jsd_beta goes with objective.teacher.direction: jsd"),
    (["objective.teacher.top_k=4"], "top_k goes with objective.teacher.signal: topk"),
    (["objective.teacher.support=student"], "support goes with objective.teacher.signal: topk"),
    (["objective.teacher.signal=topk"], "set objective.teacher.top_k"),
    (
        ["objective.teacher.signal=topk", "objective.teacher.top_k=4", "objective.teacher.clip=1"],
        "clip bounds the sampled advantage",
    ),
    (
        [
            "objective.teacher.signal=topk",
            "objective.teacher.top_k=4",
            "objective.teacher.reward_to_go=true",
        ],
        "reward_to_go goes with signal: sampled",
    ),
    (
        [
            "objective.teacher.signal=topk",
            "objective.teacher.top_k=4",
            "student.loss_head=fused",
        ],
        "top-k kernel reads whole logits",
    ),
    (["objective.teacher.signal=full"], "is given by endpoints"),
    # outcome rewards
    (["objective.orm.baseline=0.5"], "baseline goes with objective.orm.estimator: reinforce"),
    (["objective.orm.all_wrong=-0.1"], "all_wrong goes with objective.orm.estimator: agapo"),
    (
        [
            "objective.orm.estimator=reinforce",
            "objective.orm.baseline=0.5",
            "objective.orm.baseline_decay=0.5",
        ],
        "baseline is a constant",
    ),
    (
        ["objective.orm.estimator=maxrl", "objective.orm.reward=score"],
        "maxrl is defined for rewards of 0 and 1",
    ),
    (["objective.orm.overlong_buffer=100000"], "expected 1 to rollout.max_response_tokens"),
    (
        ["objective.orm.alpha_schedule.kind=linear"],
        "alpha_schedule.end_value is needed by kind: linear",
    ),
    (
        ["objective.orm.alpha_schedule.end_value=0.1"],
        "alpha_schedule.end_value goes with objective.orm.alpha_schedule.kind",
    ),
    (
        [
            "objective.orm.alpha_schedule={kind: cosine, end_value: 0}",
            "objective.orm.alpha_schedule.from_step=5",
            "objective.orm.alpha_schedule.until_step=5",
        ],
        "until_step 5 must be after from_step 5",
    ),
    # policy loss and truncation
    (["objective.loss.name=cispo"], "objective.loss.clip_high is required"),
    (["objective.loss.delta=0.1"], "does not read it"),
    (["objective.loss={name: dppo_topk, delta: 0.1}"], "set objective.teacher.top_k"),
    (["objective.truncation={kind: tis, low: 0.5}"], "has no such bound"),
    (
        ["objective.loss.name=ppo", "objective.truncation.ratio=current"],
        "would be weighed twice",
    ),
    # reference, balance, aggregation
    (["objective.kl.weight=0.1"], "go with a kind"),
    (["objective.kl.kind=k2"], "objective.kl.weight is 0"),
    (
        ["objective.kl={kind: k3, weight: 0.1, reference: math_rll}"],
        "no teacher 'math_rll'; did you mean 'math_rl'",
    ),
    (["objective.balance.exponent=1"], "exponent goes with objective.balance.kind: gap"),
    (["objective.balance={kind: gap, exponent: -1}"], "diverges"),
    (["objective.balance.targets={math: 1}"], "targets go with kind"),
    (["objective.balance={kind: token_share, targets: {math: 1}}"], "no target for code"),
    (
        ["objective.balance={kind: token_share, targets: {math: 1, code: 1, cod: 1}}"],
        "targets.cod: there is no such domain; did you mean 'code'",
    ),
    (
        ["objective.aggregation=token", "objective.denominator=kept"],
        "denominator kept goes with aggregation: sequence only",
    ),
    (["objective.aggregation=constant"], "set objective.constant_length"),
    (["objective.constant_length=10"], "goes with aggregation: constant"),
    # updates and sampling
    (["train.minibatches=100000"], "a prompt's answers stay together"),
    (["train.sampling.min_priority=0.1"], "min_priority goes with train.sampling.order"),
    (["train.sampling.retire_after=4"], "retire_after goes with train.sampling.retire_above"),
    (["train.sampling.order=curriculum"], "set domains.math.prompts.difficulty"),
    (
        ["train.sampling.dynamic_rounds=1", "train.samples_per_prompt=1"],
        "a group of one answer never differs",
    ),
]


@pytest.mark.parametrize(("overrides", "says"), REFUSED, ids=[text for _, text in REFUSED])
def test_refused_with_the_reason(loaded: Load, overrides: Sequence[str], says: str) -> None:
    problems = check_config(loaded(*overrides))
    assert any(says in problem for problem in problems), problems


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.teacher={signal: topk, top_k: 8, direction: jsd, jsd_beta: 0.1}"],
        ["objective.teacher.reward_to_go=true", "train.epochs=2", "train.minibatches=2"],
        ["objective.teacher.weight=0", "objective.orm.alpha=1", SECOND],
        ["objective.orm.alpha=1", "objective.orm.estimator=reinforce", SECOND],
        ["objective.kl={kind: k2, weight: 0.1, reference: math_rl}"],
        ["objective.kl={kind: k2, weight: 0.1, reference: self}"],
        ["objective.loss={name: gspo}", "objective.truncation={kind: seq_mask}"],
        ["objective.balance={kind: gap, targets: {math: 1, code: 3}}"],
        ["student.loss_head=fused"],
    ],
)
def test_accepted(loaded: Load, overrides: Sequence[str]) -> None:
    assert check_config(loaded(*overrides)) == []


def test_what_an_objective_needs_is_asked_for(loaded: Load) -> None:
    plain = loaded().objective
    assert (needs_teacher(plain), teacher_top_k(plain), sampler_top_k(plain)) == (True, 0, 0)
    alone = loaded("objective.teacher.weight=0").objective
    assert not needs_teacher(alone)
    own = loaded("objective.teacher.weight=0", "objective.kl={kind: k2, weight: 1}").objective
    assert needs_teacher(own)
    other = loaded(
        "objective.teacher.weight=0", "objective.kl={kind: k2, weight: 1, reference: math_rl}"
    ).objective
    assert not needs_teacher(other)
    theirs = loaded("objective.teacher={signal: topk, top_k: 8}").objective
    assert (teacher_top_k(theirs), sampler_top_k(theirs)) == (8, 0)
    ours = loaded("objective.teacher={signal: topk, top_k: 8, support: student}").objective
    assert (teacher_top_k(ours), sampler_top_k(ours)) == (8, 8)
    dppo = loaded(
        "objective.loss={name: dppo_topk, delta: 0.1}", "objective.teacher.top_k=5"
    ).objective
    assert (teacher_top_k(dppo), sampler_top_k(dppo)) == (0, 5)


def test_warnings_say_what_will_do_nothing(loaded: Load) -> None:
    assert any("pi equals pi_old" in w for w in config_warnings(loaded("objective.loss.name=ppo")))
    two = loaded("objective.loss.name=ppo", "train.epochs=2")
    assert not any("pi equals pi_old" in w for w in config_warnings(two))
    heavy = loaded("objective.orm.alpha=1", SECOND)
    assert any("outcome rewards decide nearly alone" in w for w in config_warnings(heavy))


@pytest.mark.parametrize(
    ("changes", "says", "mended"),
    [
        (["objective.teacher.refresh=false"], "there is nothing to take anew", ["train.epochs=2"]),
        (
            ["train.epochs=2", "objective.truncation.kind=none"],
            "no ratio corrects the later updates",
            ["objective.truncation.kind=raw"],
        ),
        (
            ["objective.teacher={signal: topk, top_k: 4}", "objective.loss.name=gspo"],
            "the policy loss has no advantage to weigh",
            ["objective.orm.alpha=0.1", SECOND],
        ),
        (
            ["train.sampling.dynamic_rounds=2", "domains.math.verifier=exact_match"],
            "is lost for nothing",
            ["objective.orm.alpha=0.1", SECOND],
        ),
    ],
)
def test_what_teaches_nothing_is_told(
    loaded: Load, changes: Sequence[str], says: str, mended: Sequence[str]
) -> None:
    assert any(says in text for text in config_warnings(loaded(*changes)))
    assert not any(says in text for text in config_warnings(loaded(*changes, *mended)))
