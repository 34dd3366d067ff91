"""What of an objective cannot be meant: names, parameters nobody reads, impossible pairs.

Each refusal says why. Ranges of plain numbers are in `mopd.config.ranges`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from mopd.config.objective import (
    ObjectiveConfig,
    OrmConfig,
    ScheduleConfig,
    TeacherSignalConfig,
)
from mopd.config.objective_needs import alphas
from mopd.config.schema import Config
from mopd.config.wording import nearest, unread
from mopd.errors import ConfigError
from mopd.objective_names import (
    GAP_HIGH,
    GAP_LOW,
    POLICY_LOSS_SPECS,
    RATIOS,
    TRUNCATION_BOUNDS,
    loss_parameters,
    truncation_bounds,
    truncation_ratio,
)

UNGROUPED = ("reinforce", "ppo_gae")
"""Estimators whose baseline is not the group's: a group of one is not always 0."""


def check_objective(config: Config) -> Iterator[str]:
    """Every problem of `objective`."""
    objective = config.objective
    yield from _teacher(config)
    yield from _orm(config)
    yield from _loss(config)
    yield from _truncation(objective)
    yield from _reference(config)
    yield from _balance(config)
    yield from _aggregation(objective)
    yield from _schedule(objective.orm.alpha_schedule, "objective.orm.alpha_schedule", config)
    if objective.orm.length_reward is not None:
        yield from _schedule(objective.orm.length_reward, "objective.orm.length_reward", config)


def _reads_topk(objective: ObjectiveConfig) -> bool:
    spec = POLICY_LOSS_SPECS.get(objective.loss.name)
    return spec is not None and spec.needs_topk


def _teacher(config: Config) -> Iterator[str]:
    teacher, key = config.objective.teacher, "objective.teacher"
    if teacher.weight == 0:
        if teacher.signal != "sampled":
            yield f"{key}.signal is {teacher.signal}, but {key}.weight is 0: leave one of them out"
        yield from _without_teachers(config)
        default = TeacherSignalConfig()
        for name in ("clip", "reward_to_go", "refresh", "direction"):
            if getattr(teacher, name) != getattr(default, name):
                yield f"{key}.{name} has no effect while {key}.weight is 0; leave it out"
    if teacher.direction == "jsd":
        if teacher.jsd_beta is not None and not 0 < teacher.jsd_beta < 1:
            yield f"{key}.jsd_beta must be above 0 and below 1, got {teacher.jsd_beta:g}"
    else:
        yield from unread(teacher, {"jsd_beta": f"{key}.direction: jsd"}, key)
    if teacher.signal == "sampled":
        if teacher.direction != "reverse":
            yield (
                f"{key}.direction {teacher.direction}: the sampled token's logprob estimates the "
                "reverse KL only; take signal: topk or full"
            )
        yield from unread(teacher, {"support": f"{key}.signal: topk"}, key)
        if teacher.top_k is not None and not _reads_topk(config.objective):
            yield f"{key}.top_k goes with {key}.signal: topk and has no effect here; leave it out"
        return
    if teacher.reward_to_go:
        yield (
            f"{key}.reward_to_go goes with signal: sampled; a divergence of whole distributions "
            "has its own gradient at every token"
        )
    if not teacher.refresh:
        yield f"{key}.refresh is of the sampled advantage; signal: {teacher.signal} has none"
    if teacher.clip != 5.0:
        yield f"{key}.clip bounds the sampled advantage; signal: {teacher.signal} has none"
    if teacher.signal == "topk" and config.student.loss_head == "fused":
        yield (
            f"{key}.signal is topk and student.loss_head fused: the top-k kernel reads whole "
            "logits; take student.loss_head: logits"
        )
    if teacher.signal == "topk" and teacher.top_k is None:
        yield f"{key}.signal is topk: set {key}.top_k, how many ids a position"
    if teacher.signal == "full":
        yield from unread(teacher, dict.fromkeys(("top_k", "support"), f"{key}.signal: topk"), key)
        for name in sorted({domain.teacher for domain in config.domains.values()}):
            if name in config.teachers and config.teachers[name].endpoints:
                yield (
                    f"{key}.signal is full: the student's ranks load each teacher themselves, but "
                    f"teachers.{name} is given by endpoints; give its model, or take signal: topk"
                )


def _without_teachers(config: Config) -> Iterator[str]:
    """With no distillation part, every domain that is drawn needs something to learn from."""
    objective = config.objective
    if objective.kl.kind != "none":
        return
    drawn = {name: alpha for name, alpha in alphas(config).items() if config.domains[name].weight}
    if not any(alpha > 0 for alpha in drawn.values()):
        yield (
            "objective.teacher.weight is 0 and no domain that is drawn has an alpha above 0: "
            "nothing to learn from. Set objective.orm.alpha, or give the teachers a weight"
        )
    else:
        for name in sorted(name for name, alpha in drawn.items() if not alpha > 0):
            yield (
                f"domains.{name} has alpha 0 and objective.teacher.weight is 0: its answers would "
                f"teach nothing; give it an alpha, or set domains.{name}.weight to 0"
            )
    if objective.orm.zero_variance == "drop" and config.train.samples_per_prompt == 1:
        yield (
            "objective.orm.zero_variance is drop and train.samples_per_prompt 1: a group of one "
            "always has equal rewards, so that every answer would be left out"
        )


def _largest(schedule: ScheduleConfig, steps: int) -> float:
    """The largest value that a schedule takes within the run."""
    if schedule.from_step >= steps:
        return 0.0
    return max(schedule.value, schedule.end_value or 0.0)


def _orm(config: Config) -> Iterator[str]:
    orm, key = config.objective.orm, "objective.orm"
    if orm.estimator != "reinforce":
        yield from unread(
            orm, dict.fromkeys(("baseline", "baseline_decay"), f"{key}.estimator: reinforce"), key
        )
    elif orm.baseline is not None and orm.baseline_decay is not None:
        yield f"{key}.baseline is a constant, so {key}.baseline_decay has no effect; leave one out"
    if orm.estimator != "agapo":
        yield from unread(orm, {"all_wrong": f"{key}.estimator: agapo"}, key)
    if orm.estimator != "ppo_gae":
        names = ("gae_gamma", "gae_lambda", "critic_lr")
        yield from unread(orm, dict.fromkeys(names, f"{key}.estimator: ppo_gae"), key)
    shaped = orm.overlong_buffer is not None or orm.length_reward is not None
    if orm.estimator == "maxrl" and (orm.reward != "correct" or shaped):
        yield (
            f"{key}.estimator maxrl is defined for rewards of 0 and 1: take reward: correct, "
            "without overlong_buffer and length_reward"
        )
    if orm.all_wrong and (shaped or orm.zero_variance == "drop"):
        yield (
            f"{key}.all_wrong is for groups whose rewards are all 0: overlong_buffer and "
            "length_reward change those rewards, zero_variance: drop leaves the groups out"
        )
    steps = config.train.steps
    if not any(alpha > 0 for alpha in alphas(config).values()):
        default = OrmConfig()
        read = ("alpha", "alpha_schedule", "reward")  # the reward also decides what is resampled
        for field in dataclasses.fields(orm):
            if field.name not in read and getattr(orm, field.name) != getattr(default, field.name):
                yield f"{key}.{field.name} has no effect: no domain has an alpha above 0"
    else:
        if not _largest(orm.alpha_schedule, steps) > 0:
            yield f"{key}.alpha_schedule is 0 for the whole run (train.steps {steps})"
    if orm.length_reward is not None and not _largest(orm.length_reward, steps) > 0:
        yield f"{key}.length_reward is 0 for the whole run (train.steps {steps})"
    limit = config.rollout.max_response_tokens
    if orm.overlong_buffer is not None and not 1 <= orm.overlong_buffer <= limit:
        yield (
            f"{key}.overlong_buffer is {orm.overlong_buffer}; expected 1 to "
            f"rollout.max_response_tokens ({limit})"
        )
    alone = config.train.samples_per_prompt == 1
    if alone and orm.length_reward is not None:
        yield f"{key}.length_reward compares the answers of one prompt: sample 2 or more"
    for name, alpha in alphas(config).items():
        if not alpha > 0:
            continue
        own = config.domains[name].alpha is not None
        source = f"domains.{name}.alpha" if own else f"{key}.alpha"
        if config.domains[name].verifier is None:
            yield (
                f"{source} is {alpha:g}, but domains.{name} has no verifier to reward its "
                f"answers: give it one, or set domains.{name}.alpha to 0"
            )
        elif alone and orm.estimator not in UNGROUPED:
            yield (
                f"{source} is {alpha:g}, but with train.samples_per_prompt 1 a group is its own "
                f"baseline and {key}.estimator {orm.estimator!r} is always 0: sample 2 or more, "
                "or set alpha to 0"
            )
            return


def _loss(config: Config) -> Iterator[str]:
    objective = config.objective
    if objective.loss.name not in POLICY_LOSS_SPECS:
        return  # already said, with the names
    try:
        loss_parameters(objective.loss)
    except ConfigError as error:
        yield str(error)
    if POLICY_LOSS_SPECS[objective.loss.name].needs_topk and objective.teacher.top_k is None:
        yield (
            f"objective.loss.name is {objective.loss.name}: set objective.teacher.top_k, how many "
            "ids a position"
        )
    if POLICY_LOSS_SPECS[objective.loss.name].needs_topk and config.student.loss_head == "fused":
        yield (
            f"objective.loss.name is {objective.loss.name} and student.loss_head fused: the top-k "
            "kernel reads whole logits; take student.loss_head: logits"
        )


def _truncation(objective: ObjectiveConfig) -> Iterator[str]:
    known = objective.loss.name in POLICY_LOSS_SPECS and objective.truncation.ratio in RATIOS
    if not known or objective.truncation.kind not in TRUNCATION_BOUNDS:
        return  # already said, with the names
    if objective.truncation.kind == "none" and objective.truncation.ratio != "auto":
        yield (
            "objective.truncation.ratio has no effect with kind: none, which compares nothing; "
            "leave it out"
        )
    checks: tuple[Callable[[], object], ...] = (
        lambda: truncation_bounds(objective.truncation),
        lambda: truncation_ratio(objective),
    )
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)


def _reference(config: Config) -> Iterator[str]:
    kl, key = config.objective.kl, "objective.kl"
    if kl.kind == "none":
        if kl.weight != 0 or kl.reference is not None:
            yield f"{key}.weight and {key}.reference go with a kind (k2 or k3); kind is none"
    elif kl.weight == 0:
        yield f"{key}.kind is {kl.kind}, but {key}.weight is 0"
    if kl.reference is not None and kl.reference not in config.teachers:
        hint = nearest(kl.reference, config.teachers)
        yield f"{key}.reference: there is no teacher {kl.reference!r}{hint}"
    elif kl.reference is not None and kl.kind == "k3" and config.teachers[kl.reference].mixture:
        yield (
            f"{key}.reference: {kl.reference} is a mixture, whose scores are no probabilities "
            "(they lack a constant of the context), and k3 needs them; take k2, or one teacher"
        )


def _balance(config: Config) -> Iterator[str]:
    balance, key = config.objective.balance, "objective.balance"
    if balance.kind != "gap":
        yield from unread(
            balance, dict.fromkeys(("exponent", "low", "high"), f"{key}.kind: gap"), key
        )
    else:
        if balance.exponent is not None and balance.exponent < 0:
            yield (
                f"{key}.exponent is {balance.exponent:g}: a weight that falls with the gap feeds "
                "the domain that needs it least and diverges; expected 0 or more"
            )
        if config.objective.teacher.weight == 0:
            yield f"{key}.kind gap follows the distance to the teachers, whose weight is 0"
        for name, domain in config.domains.items():
            if domain.teacher in config.teachers and config.teachers[domain.teacher].mixture:
                yield (
                    f"{key}.kind gap follows mean |A|, and teachers.{domain.teacher} of "
                    f"domains.{name} is a mixture, whose scores lack a constant of the context: "
                    "take token_share, or one teacher"
                )
        low = GAP_LOW if balance.low is None else balance.low
        high = GAP_HIGH if balance.high is None else balance.high
        if not 0 < low <= high:
            yield f"{key}: expected 0 < low <= high, got low {low:g} and high {high:g}"
    if balance.kind == "none" and balance.targets:
        yield f"{key}.targets go with kind token_share or gap; kind is none"
    for name, target in balance.targets.items():
        if name not in config.domains:
            yield f"{key}.targets.{name}: there is no such domain{nearest(name, config.domains)}"
        if not target > 0:
            yield f"{key}.targets.{name} must be above 0, got {target:g}"
    drawn = {name for name, domain in config.domains.items() if domain.weight > 0}
    if balance.targets and (missing := sorted(drawn - set(balance.targets))):
        yield f"{key}.targets: no target for {', '.join(missing)}"


def _aggregation(objective: ObjectiveConfig) -> Iterator[str]:
    if objective.denominator == "kept" and objective.aggregation != "sequence":
        yield (
            "objective.denominator kept goes with aggregation: sequence only: elsewhere the "
            "count of kept tokens of the whole step would be needed before its first forward pass"
        )
    if objective.aggregation == "constant" and objective.constant_length is None:
        yield "objective.aggregation is constant: set objective.constant_length (tokens)"
    if objective.aggregation != "constant" and objective.constant_length is not None:
        yield "objective.constant_length goes with aggregation: constant; leave it out"


def _schedule(schedule: ScheduleConfig, key: str, config: Config) -> Iterator[str]:
    if schedule.kind == "constant":
        yield from unread(
            schedule, dict.fromkeys(("end_value", "until_step"), f"{key}.kind: linear, cosine"), key
        )
        return
    if schedule.end_value is None:
        yield f"{key}.end_value is needed by kind: {schedule.kind}"
    until = config.train.steps if schedule.until_step is None else schedule.until_step
    if until <= schedule.from_step:
        yield f"{key}: until_step {until} must be after from_step {schedule.from_step}"
