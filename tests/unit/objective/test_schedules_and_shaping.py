"""Values over the steps, and rewards by length: the ends, the middle, what is refused."""

from __future__ import annotations

import math

import pytest

from mopd.config.objective import ScheduleConfig
from mopd.errors import ConfigError
from mopd.objective.schedules import value_at
from mopd.objective.shaping import kimi_length_rewards, overlong_penalty


def values(steps, total=100, **config) -> list[float]:
    return [value_at(ScheduleConfig(**config), step, total) for step in steps]


def test_a_constant_starts_at_its_step():
    assert values([0, 9, 10, 11, 500], value=0.3, from_step=10) == [0, 0, 0.3, 0.3, 0.3]
    assert values([0, 99]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "quarter", "middle"), [("linear", 1.5, 1.0), ("cosine", 1 + math.sqrt(0.5), 1.0)]
)
def test_linear_and_cosine_go_from_value_to_end_value(kind, quarter, middle):
    shape = {"kind": kind, "value": 2.0, "end_value": 0.0, "from_step": 20, "until_step": 60}
    got = values([0, 19, 20, 30, 40, 59, 60, 61, 1000], **shape)
    assert got[:3] == [0.0, 0.0, 2.0]
    assert got[3] == pytest.approx(quarter) and got[4] == pytest.approx(middle)
    assert 0 < got[5] < 0.1 and got[6:] == [0.0, 0.0, 0.0]
    rising = {"kind": kind, "value": 0.25, "end_value": 0.75}
    assert values([0, 50, 100], total=100, **rising) == pytest.approx([0.25, 0.5, 0.75])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"kind": "linaer"}, "kind is 'linaer'; expected constant, linear or cosine"),
        ({"kind": "linear"}, "end_value None"),
        ({"kind": "cosine", "end_value": 0.0, "from_step": 100}, "step 100 to 100"),
    ],
)
def test_schedules_that_cannot_be_meant(config, text):
    with pytest.raises(ConfigError, match=text):
        values([50], **config)


def test_overlong_penalty():
    """DAPO: 0 up to L - c, linear to -1 at L, -1 beyond; L = 100, c = 20."""
    got = [overlong_penalty(n, 100, 20) for n in (0, 1, 80, 81, 90, 99, 100, 101, 1000)]
    assert got == pytest.approx([0, 0, 0, -0.05, -0.5, -0.95, -1, -1, -1])
    assert overlong_penalty(50, 100, 100) == -0.5
    for buffer in (0, -1, 101):
        with pytest.raises(ConfigError, match=f"overlong_buffer is {buffer} with a limit of 100"):
            overlong_penalty(1, 100, buffer)


def test_kimis_length_reward():
    """lambda = .5 - (len - min)/(max - min); a wrong answer gains nothing by being short."""
    got = kimi_length_rewards([10, 20, 30, 10, 30, 15], [True, True, True, False, False, False])
    assert got == pytest.approx([0.5, 0.0, -0.5, 0.0, -0.5, 0.0])
    assert kimi_length_rewards([10, 12, 30], [False, False, True])[1] == 0.0
    assert kimi_length_rewards([7, 7, 7], [True, False, True]) == [0.0] * 3
    assert kimi_length_rewards([7], [True]) == [0.0] and kimi_length_rewards([], []) == []
    for lengths in ([1, 2], [1, 1]):
        with pytest.raises(ValueError):
            kimi_length_rewards(lengths, [True])
