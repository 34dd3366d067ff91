"""The objective that a configuration amounts to, in a few lines: every default filled in."""

from __future__ import annotations

import math

from mopd.config.objective import ScheduleConfig
from mopd.config.objective_needs import alphas
from mopd.config.schema import Config
from mopd.objective_names import (
    JSD_BETA,
    SUPPORT,
    loss_parameters,
    truncation_bounds,
    truncation_ratio,
)

_RATIO = {"current": "pi/mu", "old": "pi_old/mu"}


def objective_lines(config: Config) -> dict[str, str]:
    """Part -> what it is, of a configuration that `check_config` finds nothing wrong with."""
    objective = config.objective
    lines = {
        "teacher": _teacher(config),
        "outcome rewards": _orm(config),
        "loss": _with(objective.loss.name, loss_parameters(objective.loss)),
        "truncation": _truncation(config),
        "aggregation": objective.aggregation,
    }
    if objective.aggregation == "constant":
        lines["aggregation"] += f", length {objective.constant_length:g}"
    if objective.denominator != "response":
        lines["aggregation"] += f", over the {objective.denominator} tokens"
    if objective.balance.kind != "none":
        targets = ", ".join(f"{name} {t:g}" for name, t in objective.balance.targets.items())
        lines["balance"] = f"{objective.balance.kind}, targets {targets or 'equal'}"
    if objective.kl.kind != "none":
        towards = objective.kl.reference or "each sample's own teacher"
        lines["KL"] = f"{objective.kl.kind} x {objective.kl.weight:g} toward {towards}"
    updates = config.train.epochs * config.train.minibatches
    lines["a step"] = (
        f"{config.train.prompts_per_step} prompts x {config.train.samples_per_prompt} answers of "
        f"the {config.rollout.source}, {updates} update{'s' * (updates != 1)}"
    )
    return lines


def _teacher(config: Config) -> str:
    teacher = config.objective.teacher
    if teacher.weight == 0:
        return "no part in it"
    text = f"{teacher.weight:g} x {teacher.signal}, {teacher.direction} KL"
    if teacher.direction == "jsd":
        text += f" (beta {JSD_BETA if teacher.jsd_beta is None else teacher.jsd_beta:g})"
    if teacher.signal == "topk":
        text += f", {teacher.top_k} ids of the {teacher.support or SUPPORT}"
    if teacher.signal == "sampled":
        text += f", clipped to +-{teacher.clip:g} nats" if teacher.clip else ", not clipped"
        text += ", reward-to-go" if teacher.reward_to_go else ""
    return text


def _orm(config: Config) -> str:
    orm, found = config.objective.orm, alphas(config)
    if not any(found.values()):
        return "no part in them"
    values = set(found.values())
    shown = ", ".join(f"{name} {alpha:g}" for name, alpha in found.items())
    text = f"alpha {values.pop():g}" if len(values) == 1 else f"alpha {shown}"
    text += f" x {orm.estimator} of {'right or wrong' if orm.reward == 'correct' else 'scores'}"
    if (orm.alpha_schedule.kind, orm.alpha_schedule.value) != ("constant", 1.0) or (
        orm.alpha_schedule.from_step
    ):
        text += f", {_schedule(orm.alpha_schedule)}"
    if orm.whiten:
        text += ", whitened"
    if orm.zero_variance == "drop":
        text += ", groups of equal rewards left out"
    if orm.overlong_buffer is not None:
        text += f", overlong penalty in the last {orm.overlong_buffer} tokens"
    if orm.length_reward is not None:
        text += f", length reward {_schedule(orm.length_reward)}"
    return text


def _truncation(config: Config) -> str:
    kind = config.objective.truncation.kind
    if kind == "none":
        return "none: every token counts 1"
    low, high = truncation_bounds(config.objective.truncation)
    text = f"{kind} on {_RATIO[truncation_ratio(config.objective)]}"
    if low > 0:
        return f"{text}, {low:g} to {high:g}"
    return text if math.isinf(high) else f"{text}, up to {high:g}"


def _schedule(schedule: ScheduleConfig) -> str:
    text = f"{schedule.value:g}"
    if schedule.end_value is not None:
        text += f" to {schedule.end_value:g} ({schedule.kind})"
    return f"{text} from step {schedule.from_step}" if schedule.from_step else text


def _with(name: str, parameters: dict[str, float]) -> str:
    """``dapo (clip_low 0.2, clip_high 0.28)``."""
    shown = ", ".join(f"{key} {value:g}" for key, value in parameters.items())
    return f"{name} ({shown})" if shown else name
