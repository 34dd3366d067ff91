"""Values that change with the step: alpha's factor, the length reward's weight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mopd.errors import ConfigError

if TYPE_CHECKING:
    from mopd.config.objective import ScheduleConfig


def value_at(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """The value at `step`, counted from 0: 0 before `from_step`, then by `kind`:

    constant  value
    linear    value -> end_value over [from_step, until_step]
    cosine    the same ends, end + (value - end) (1 + cos(pi f)) / 2 at the fraction f between

    until_step and after: end_value; until_step null: total_steps.
    Raises ConfigError for an unknown kind, a missing end_value and an empty interval.
    """
    if schedule.kind not in ("constant", "linear", "cosine"):
        raise ConfigError(
            f"schedule kind is {schedule.kind!r}; expected constant, linear or cosine"
        )
    if schedule.kind == "constant":
        return schedule.value if step >= schedule.from_step else 0.0
    until = total_steps if schedule.until_step is None else schedule.until_step
    if schedule.end_value is None or until <= schedule.from_step:
        raise ConfigError(
            f"a {schedule.kind} schedule from step {schedule.from_step} to {until} with end_value "
            f"{schedule.end_value}; expected an end_value, and until_step after from_step"
        )
    if step < schedule.from_step:
        return 0.0
    if step >= until:
        return schedule.end_value
    done = (step - schedule.from_step) / (until - schedule.from_step)
    left = 1 - done if schedule.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.end_value + (schedule.value - schedule.end_value) * left
