"""The schedule at its corners."""

from __future__ import annotations

import pytest

from mopd.config.schema import OptimizerConfig
from mopd.errors import ConfigError
from mopd.student.schedule import learning_rate


def rates(schedule: str, warmup: int = 2, total: int = 6) -> list[float]:
    config = OptimizerConfig(lr=1.0, min_lr=0.2, warmup_steps=warmup, schedule=schedule)
    return [learning_rate(step, config, total) for step in range(total)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        # (1 + cos(pi/4)) / 2 = .853553...
        ("cosine", [0.5, 1.0, 0.2 + 0.8 * 0.8535534, 0.6, 0.2 + 0.8 * 0.1464466, 0.2]),
    ],
)
def test_warms_up_then_falls_to_the_last_step(schedule: str, expected: list[float]) -> None:
    assert rates(schedule) == pytest.approx(expected)


def test_no_warmup_and_a_run_shorter_than_its_warmup() -> None:
    assert rates("linear", warmup=0, total=2) == pytest.approx([0.6, 0.2])
    assert rates("cosine", warmup=10, total=2) == pytest.approx([0.1, 0.2])
    config = OptimizerConfig(lr=1.0, min_lr=0.2, warmup_steps=0, schedule="linear")
    assert learning_rate(99, config, 10) == pytest.approx(0.2)  # past the end it stays


def test_unknown_schedule() -> None:
    with pytest.raises(ConfigError, match=r"schedule is 'cos'.*constant, linear, cosine"):
        rates("cos")
