"""The learning rate of a step."""

from __future__ import annotations

import math

from mopd.config.schema import OptimizerConfig
from mopd.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Linear warm-up to `lr` at step `warmup_steps` - 1, then down to `min_lr` at the last step.

    `step` counts from 0. `constant` stays at `lr` after the warm-up.
    """
    if config.schedule not in SCHEDULES:
        raise ConfigError(
            f"student.optimizer.schedule is {config.schedule!r}; expected one of "
            f"{', '.join(SCHEDULES)}."
        )
    done = step + 1
    if done <= config.warmup_steps:
        return config.lr * done / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (done - config.warmup_steps) / span)
    left = 1.0 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left
