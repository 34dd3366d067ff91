"""The sampling rules of a run: resolved from the configuration, made into orders, compared.

`Rules` is what decides which prompts are drawn, as plain JSON: it is saved with every checkpoint,
and a run resumes under the same rules only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mopd.config.schema import SamplingConfig
from mopd.data.history import PassHistory
from mopd.data.orders import Curriculum, Order, Prioritised, Shuffled
from mopd.errors import ConfigError, DataError
from mopd.types import Prompt

READS = {
    "shuffle": (),
    "prioritised": ("min_priority",),
    "curriculum": ("curriculum_start", "curriculum_steps"),
}
"""Order -> the keys that only it reads."""
MIN_PRIORITY, CURRICULUM_START, RETIRE_AFTER = 0.05, 0.2, 4
"""What the keys of these names are when null: ours, no paper publishes them."""

Rules = Mapping[str, Any]
"""Keys of `SamplingConfig`; those that nothing reads are None."""


def resolve_rules(sampling: SamplingConfig, total_steps: int | None) -> dict[str, Any]:
    """The rules of a configuration, each null resolved to its default if something reads it.

    Raises:
        ConfigError: names the key, what it has and what it may have; a key that nothing reads.
    """
    order = sampling.order
    if order not in READS:
        raise ConfigError(f"train.sampling.order: {order!r} is not one of {', '.join(READS)}")
    for reader, keys in READS.items():
        for key in keys:
            if reader != order and getattr(sampling, key) is not None:
                raise ConfigError(
                    f"train.sampling.{key} would have no effect: train.sampling.order is {order}, "
                    f"only {reader} reads it; leave one of the two out"
                )
    rules: dict[str, Any] = {"order": order}
    rules |= {key: None for keys in READS.values() for key in keys}
    rules |= {"retire_above": sampling.retire_above, "retire_after": None}
    if order == "prioritised":
        rules["min_priority"] = _share("min_priority", sampling.min_priority, MIN_PRIORITY)
    if order == "curriculum":
        start = _share("curriculum_start", sampling.curriculum_start, CURRICULUM_START)
        steps = sampling.curriculum_steps
        steps = total_steps if steps is None else steps
        if steps is None or steps < 1:
            raise ConfigError(
                "train.sampling.order curriculum needs curriculum_steps (or train.steps) of 1 or "
                f"more, got {steps}"
            )
        rules |= {"curriculum_start": start, "curriculum_steps": steps}
    if sampling.retire_above is None:
        if sampling.retire_after is not None:
            raise ConfigError(
                "train.sampling.retire_after would have no effect: retire_above is not set; set "
                "it (ScaleRL: 0.9), or leave both out"
            )
        return rules
    _share("retire_above", sampling.retire_above, 1.0)
    rules["retire_after"] = RETIRE_AFTER if sampling.retire_after is None else sampling.retire_after
    if rules["retire_after"] < 1:
        raise ConfigError(
            f"train.sampling.retire_after must be at least 1, got {sampling.retire_after}"
        )
    return rules


def make_order(
    name: str, prompts: Sequence[Prompt], seed: int, history: PassHistory, rules: Rules
) -> Order:
    """The order of one domain's prompts; DataError when a curriculum lacks a difficulty."""
    if rules["order"] == "prioritised":
        return Prioritised(name, len(prompts), seed, history, rules["min_priority"])
    if rules["order"] == "curriculum":
        start, steps = rules["curriculum_start"], rules["curriculum_steps"]
        return Curriculum(name, _difficulties(name, prompts), seed, start, steps)
    return Shuffled(name, len(prompts), seed)


def require_same_rules(saved: Rules, now: Rules) -> None:
    """DataError names the first rule of a checkpoint that this run does not have."""
    for key in now:
        if saved.get(key) != now[key]:
            raise DataError(
                f"the checkpoint was made with train.sampling.{key} {_shown(saved.get(key))}, "
                f"this run has {_shown(now[key])}; set train.sampling.{key} back, or start a run "
                "of another name"
            )


def _share(key: str, value: float | None, default: float) -> float:
    """Above 0 (else no prompt could be drawn, or every one would be retired) and at most 1."""
    if value is None:
        return default
    if not 0 < value <= 1:
        raise ConfigError(f"train.sampling.{key} must be above 0 and at most 1, got {value}")
    return value


def _difficulties(name: str, prompts: Sequence[Prompt]) -> list[float]:
    """Of every prompt; DataError names the prompt (its number is the row's) that has none."""
    found: list[float] = []
    for prompt in prompts:
        if prompt.difficulty is None or not math.isfinite(prompt.difficulty):
            raise DataError(
                f"domain {name!r}: train.sampling.order curriculum needs a finite "
                f"difficulty for every prompt, but {prompt.id!r} has {prompt.difficulty}; name "
                f"the field that holds it in domains.{name}.prompts.difficulty"
            )
        found.append(prompt.difficulty)
    return found


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
