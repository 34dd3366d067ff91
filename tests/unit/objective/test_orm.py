"""ORM advantages: values from the formulas, groups by id, and verdicts that never came."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from mopd.errors import ConfigError, DataError
from mopd.objective.orm import GRPO_EPS, ORM_ESTIMATORS, group_advantages


def test_values_of_each_estimator():
    rewards, groups = [1.0, 0.0, 0.0, 0.5], ["g"] * 4
    mean, sigma = 0.375, statistics.pstdev(rewards)
    for name, want in {
        "dr_grpo": [r - mean for r in rewards],
        "grpo": [(r - mean) / (sigma + GRPO_EPS) for r in rewards],
        "rloo": [r - (sum(rewards) - r) / 3 for r in rewards],
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


@pytest.mark.parametrize("name", sorted(ORM_ESTIMATORS))
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_and_lone_samples_are_exactly_zero(name, reward):
    if name == "maxrl" and reward not in (0.0, 1.0):
        pytest.skip("binary rewards only")
    for size in (1, 2, 3, 7):
        got = group_advantages([reward] * size, ["g"] * size, name)
        assert got == [0.0] * size


def test_bad_input():
    with pytest.raises(ConfigError, match=r"objective.orm is 'grop'.*Did you mean 'grpo'"):
        group_advantages([1.0], ["g"], "grop")
    for reward in (math.nan, math.inf):
        with pytest.raises(DataError, match=r"sample 1 \(group 'h'\)"):
            group_advantages([1.0, reward], ["g", "h"], "grpo")
    with pytest.raises(ValueError):
        group_advantages([1.0, 0.0], ["g"], "grpo")
