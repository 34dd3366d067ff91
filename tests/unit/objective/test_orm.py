"""ORM advantages: values from the formulas, groups by id, and verdicts that never came."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest

from mopd.config.objective import OrmConfig
from mopd.errors import ConfigError, DataError
from mopd.objective.orm import (
    GRPO_EPS,
    ORM_ESTIMATORS,
    OrmAdvantages,
    zero_variance_groups,
)


def group_advantages(
    rewards: Sequence[float | None], groups: Sequence[str], estimator: str
) -> list[float]:
    """By the estimator's own defaults."""
    return OrmAdvantages(OrmConfig(estimator=estimator)).advantages(rewards, groups)


def test_values_of_each_estimator():
    rewards, groups = [1.0, 0.0, 0.0, 0.5], ["g"] * 4
    mean, sigma = 0.375, statistics.pstdev(rewards)
    for name, want in {
        "dr_grpo": [r - mean for r in rewards],
        "grpo": [(r - mean) / (sigma + GRPO_EPS) for r in rewards],
        "rloo": [r - (sum(rewards) - r) / 3 for r in rewards],
        "kimi": [r - mean for r in rewards],
    }.items():
        assert group_advantages(rewards, groups, name) == pytest.approx(want, abs=1e-12), name
    assert group_advantages([1.0, 0.0], ["g", "g"], "grpo") == pytest.approx([1, -1], abs=1e-5)


@pytest.mark.parametrize("name", sorted(ORM_ESTIMATORS))
def test_c16_no_verdict_is_not_a_wrong_answer(name):
    """[1, None, 0]: baseline over {1, 0}; the failed sample gets 0; the mean is finite."""
    got = group_advantages([1.0, None, 0.0], ["g", "g", "g"], name)
    want = group_advantages([1.0, 0.0], ["g", "g"], name)
    assert got == [want[0], 0.0, want[1]]
    assert want[0] > 0 > want[1] and want[0] == -want[1]
    assert group_advantages([None, None], ["g", "g"], name) == [0.0, 0.0]
    assert group_advantages([], [], name) == []


@pytest.mark.parametrize("name", sorted(ORM_ESTIMATORS))
def test_c17_groups_go_by_id_in_any_order(name):
    """Groups [1,0,1,0] and [0,0,1,1], two samples dropped, shuffled: each by its own group."""
    samples = [("a", r) for r in (1.0, 0.0, 1.0, 0.0)] + [("b", r) for r in (0.0, 0.0, 1.0, 1.0)]
    del samples[7], samples[1]  # a: 1 1 0, b: 0 0 1
    solo = {
        group: group_advantages([r for g, r in samples if g == group], [group] * 3, name)
        for group in "ab"
    }
    want = {("a", 1.0): solo["a"][0], ("a", 0.0): solo["a"][2]}
    want |= {("b", 0.0): solo["b"][0], ("b", 1.0): solo["b"][2]}
    assert want["a", 1.0] != want["b", 1.0]
    for seed in range(5):
        shuffled = random.Random(seed).sample(samples, len(samples))
        got = group_advantages([r for _, r in shuffled], [g for g, _ in shuffled], name)
        assert got == pytest.approx([want[sample] for sample in shuffled], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        (n, r)
        for n in sorted(ORM_ESTIMATORS)
        for r in (0.0, 1.0, 0.1, 1 / 3)
        if n != "maxrl" or r in (0, 1)
    ],
)
def test_equal_rewards_and_lone_samples_are_exactly_zero(name, reward):
    for size in (1, 2, 3, 7):
        got = group_advantages([reward] * size, ["g"] * size, name)
        assert got == [0.0] * size


def test_bad_input():
    with pytest.raises(ConfigError, match=r"orm.estimator is 'grop'.*Did you mean 'grpo'"):
        group_advantages([1.0], ["g"], "grop")
    for reward in (math.nan, math.inf):
        with pytest.raises(DataError, match=r"sample 1 \(group 'h'\)"):
            group_advantages([1.0, reward], ["g", "h"], "grpo")
    with pytest.raises(ValueError):
        group_advantages([1.0, 0.0], ["g"], "grpo")


def advantages(rewards, groups, **config) -> list[float]:
    return OrmAdvantages(OrmConfig(**config)).advantages(rewards, groups)


REWARDS, GROUPS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.25, 0.0, 0.0], list("aaabbbcc")


def leave_one_out(rewards, groups) -> list[float]:
    found = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [
            r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i
        ]
        found.append(reward - sum(others) / len(others) if others else 0.0)
    return found


def z_scores(values) -> list[float]:
    mean, sigma = statistics.fmean(values), statistics.pstdev(values)
    return [(v - mean) / (sigma + 1e-6) for v in values]


def test_agapo_is_leave_one_out_then_a_z_score_over_the_batch():
    want = z_scores(leave_one_out(REWARDS, GROUPS))
    assert advantages(REWARDS, GROUPS, estimator="agapo") == pytest.approx(want, abs=1e-12)
    # all wrong: exactly 0 by the formula, and so is a batch of it
    assert want[6] == pytest.approx(0, abs=1e-12)
    assert advantages([0.0] * 4, list("aabb"), estimator="agapo") == [0.0] * 4


def test_agapos_constant_for_a_group_without_a_success():
    got = advantages(REWARDS, GROUPS, estimator="agapo", all_wrong=-0.1)
    assert got[:6] == pytest.approx(z_scores(leave_one_out(REWARDS, GROUPS))[:6])
    assert got[6:] == [-0.1, -0.1]
    # whitened or not, the constant is the advantage
    whitened = advantages(REWARDS, GROUPS, estimator="agapo", all_wrong=-0.1, whiten=True)
    assert whitened[6:] == [-0.1, -0.1]


def test_maxrl_divides_by_the_success_rate():
    rewards, groups = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0], list("aaaabbcc")
    got = advantages(rewards, groups, estimator="maxrl")
    assert got == pytest.approx([3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    with pytest.raises(DataError, match="expected 0 and 1 only"):
        advantages([0.5, 0.0], ["a", "a"], estimator="maxrl")


def test_reinforce_with_a_constant_baseline():
    got = advantages([1.0, None, 0.0, 1.0], list("aabc"), estimator="reinforce", baseline=0.25)
    assert got == [0.75, 0.0, -0.25, 0.75]


def test_reinforces_running_baseline_never_contains_its_own_batch_but_the_first():
    orm = OrmAdvantages(OrmConfig(estimator="reinforce", baseline_decay=0.5))
    assert orm.advantages([1.0, 0.0, None], list("abc")) == [0.5, -0.5, 0.0]
    assert orm.advantages([1.0, 1.0], list("ab")) == [0.5, 0.5]  # b = .5 still
    saved = orm.state_dict()
    assert orm.advantages([0.0], ["a"]) == [-0.75]  # b = .5 * .5 + .5 * 1
    assert orm.advantages([None], ["a"]) == [0.0]  # no verdict: the baseline stays
    assert orm.advantages([0.0], ["a"]) == [-0.375]
    again = OrmAdvantages(OrmConfig(estimator="reinforce", baseline_decay=0.5))
    again.load_state_dict(saved)
    assert again.advantages([0.0], ["a"]) == [-0.75]
    default = OrmAdvantages(OrmConfig(estimator="reinforce"))
    assert default.advantages([1.0], ["a"]) == [0.0] and default.advantages([0.0], ["a"]) == [-1.0]
    assert default.advantages([0.0], ["a"]) == [pytest.approx(-0.9)]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "kimi"])
def test_whitening_is_over_the_batch_and_leaves_those_without_a_verdict_alone(estimator):
    rewards, groups = [*REWARDS, None], [*GROUPS, "a"]
    plain = advantages(rewards, groups, estimator=estimator)
    got = advantages(rewards, groups, estimator=estimator, whiten=True)
    assert got == pytest.approx([*z_scores(plain[:-1]), 0.0], abs=1e-9)
    assert got != pytest.approx(plain, abs=1e-2)
    assert advantages([1.0, 1.0], ["a", "a"], estimator=estimator, whiten=True) == [0.0, 0.0]
    assert advantages([None], ["a"], estimator=estimator, whiten=True) == [0.0]


def test_whitening_takes_the_mean_out():
    got = advantages(
        [1.0, 1.0, 0.0, 1.0], list("abcd"), estimator="reinforce", baseline=0.0, whiten=True
    )
    assert got == pytest.approx(z_scores([1.0, 1.0, 0.0, 1.0]))


def test_dropping_groups_whose_rewards_are_all_equal():
    assert zero_variance_groups([1, 1, 0, 0, 1, None, None], list("aabbbcd")) == {"a"}
    assert zero_variance_groups([0.5, None, 1, 0], list("aabb")) == {"a"}
    assert zero_variance_groups([0.5, 1.0], ["a", "a"]) == set()
    rewards, groups = [1.0, 1.0, 1.0, 0.0], list("aabb")
    for estimator, keep, drop in (
        ("reinforce", [0.5, 0.5, 0.5, -0.5], [0.0, 0.0, 0.5, -0.5]),
        ("dr_grpo", [0.0, 0.0, 0.5, -0.5], [0.0, 0.0, 0.5, -0.5]),
    ):
        baseline = {"baseline": 0.5} if estimator == "reinforce" else {}
        assert advantages(rewards, groups, estimator=estimator, **baseline) == keep
        got = advantages(rewards, groups, estimator=estimator, zero_variance="drop", **baseline)
        assert got == drop
    # the dropped take no part in the batch's deviation: one more group of zeros changes nothing
    for options in ({"estimator": "agapo"}, {"estimator": "dr_grpo", "whiten": True}):
        got = advantages(rewards, groups, zero_variance="drop", **options)
        assert got[2:] == advantages([1.0, 0.0], ["b", "b"], **options) and got[:2] == [0.0, 0.0]
        assert advantages(rewards, groups, **options)[2] > got[2] + 0.1


def test_unknown_and_unbuilt_estimators():
    with pytest.raises(ConfigError, match="estimator is 'rlooo'.*Did you mean 'rloo'"):
        OrmAdvantages(OrmConfig(estimator="rlooo"))
    with pytest.raises(ConfigError, match="ppo_gae.*needs a critic"):
        OrmAdvantages(OrmConfig(estimator="ppo_gae"))
    with pytest.raises(ConfigError, match="all_wrong is -0.1, but the estimator 'grpo'"):
        OrmAdvantages(OrmConfig(all_wrong=-0.1))
    with pytest.raises(ConfigError, match="zero_variance is 'dropp'"):
        OrmAdvantages(OrmConfig(zero_variance="dropp"))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "agapo", "maxrl", "reinforce"])
def test_random_batches_against_the_formulas(estimator, seed):
    """Groups of 1 to 6, verdicts missing at random, in any order."""
    draw = random.Random(seed)
    samples = [
        (group, draw.choice([0.0, 1.0, 1.0, None]))
        for group in "abcdef"
        for _ in range(draw.randint(1, 6))
    ]
    draw.shuffle(samples)
    groups, rewards = [g for g, _ in samples], [r for _, r in samples]
    known = {g: [r for h, r in samples if h == g and r is not None] for g in groups}
    want = []
    for group, reward in samples:
        if reward is None:
            want.append(0.0)
            continue
        inside, mean = known[group], statistics.fmean(known[group])
        size = len(inside)
        want.append(
            {
                "grpo": (reward - mean) / (statistics.pstdev(inside) + 1e-6),
                "rloo": (sum(inside) - size * reward) / -(size - 1) if size > 1 else 0.0,
                "dr_grpo": reward - mean,
                "agapo": (sum(inside) - size * reward) / -(size - 1) if size > 1 else 0.0,
                "maxrl": (reward - mean) / mean if mean else 0.0,
                "reinforce": reward - statistics.fmean(r for r in rewards if r is not None),
            }[estimator]
        )
    if estimator == "agapo":
        live = [a for a, r in zip(want, rewards, strict=True) if r is not None]
        scores = iter(z_scores(live))
        want = [0.0 if r is None else next(scores) for r in rewards]
    got = advantages(rewards, groups, estimator=estimator)
    assert got == pytest.approx(want, abs=1e-9)
    assert all(math.isfinite(a) for a in got)
