"""A teacher that is the geometric mean of others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mopd.config import Config
from mopd.config.checks import check_config, config_warnings
from mopd.config.placement import roles
from mopd.config.teachers import answering, asked_teachers, members_of

Load = Callable[..., Config]
BLEND = ("domains.math.teacher=blend", "teachers.blend.mixture={math_rl: 0.25, code_rl: 0.75}")


def test_a_mixture_is_asked_through_its_members(loaded: Load) -> None:
    config = loaded(*BLEND)
    assert check_config(config) == []
    assert members_of(config, "blend") == {"math_rl": 0.25, "code_rl": 0.75}
    assert members_of(config, "math_rl") == {"math_rl": 1.0}
    assert asked_teachers(config) == {"math_rl", "code_rl"}
    assert answering(config, "blend") == "code_rl"
    assert "teacher math_rl" in [role.name for role in roles(config)]
    assert not [text for text in config_warnings(config) if "no domain names it" in text]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("teachers.blend.mixture={math_rl: 0.5, code_rl: 0.6}", "sum to 1.1, expected 1"),
        ("teachers.blend.mixture={math_rl: 1.0, code_rl: 0.0}", "not within (0, 1]"),
        ("teachers.blend.mixture={math_rl: 0.25, blend: 0.75}", "'blend' is no teacher"),
        ("teachers.blend.timeout_s=3", "teachers.blend.timeout_s has no effect on a mixture"),
        ("teachers.blend.model=teacher", "teachers.blend.model has no effect on a mixture"),
        ("objective.teacher.signal=topk", "signal is topk: take sampled"),
        ("objective.balance.kind=gap", "scores lack a constant of the context"),
        ("objective.kl={kind: k3, weight: 1, reference: blend}", "whose scores are no prob"),
    ],
)
def test_what_a_mixture_cannot_be(loaded: Load, override: str, says: str) -> None:
    problems = check_config(loaded(*BLEND, override))
    assert any(says in problem for problem in problems), problems


def test_the_reference_policy_is_started_and_no_warning_says_otherwise(loaded: Load) -> None:
    config = loaded(
        "domains.math.teacher=code_rl",
        "objective.kl={kind: k2, weight: 0.1, reference: math_rl}",
    )
    assert asked_teachers(config) == {"math_rl", "code_rl"}
    assert not [text for text in config_warnings(config) if "no domain names it" in text]
