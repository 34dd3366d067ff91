"""What of a step's updates and of the drawing of prompts cannot be meant."""

from __future__ import annotations

from collections.abc import Iterator

from mopd.config.schema import Config, SamplingConfig
from mopd.config.wording import unread


def check_train(config: Config) -> Iterator[str]:
    """Every problem of `train.sampling` and of the updates of a step."""
    yield from _updates(config)
    yield from _sampling(config)


def _updates(config: Config) -> Iterator[str]:
    train = config.train
    if train.minibatches > train.prompts_per_step:
        yield (
            f"train.minibatches is {train.minibatches}, more than train.prompts_per_step "
            f"({train.prompts_per_step}): a prompt's answers stay together"
        )


def _sampling(config: Config) -> Iterator[str]:
    sampling, key = config.train.sampling, "train.sampling"
    if sampling.order != "prioritised":
        yield from unread(sampling, {"min_priority": f"{key}.order: prioritised"}, key)
    if sampling.order != "curriculum":
        names = ("curriculum_start", "curriculum_steps")
        yield from unread(sampling, dict.fromkeys(names, f"{key}.order: curriculum"), key)
    else:
        for name, domain in config.domains.items():
            if domain.prompts.difficulty is None and domain.weight > 0:
                yield f"{key}.order is curriculum: set domains.{name}.prompts.difficulty"
    if sampling.retire_above is None:
        yield from unread(sampling, {"retire_after": f"{key}.retire_above"}, key)
    yield from _needs_verdicts(config, sampling, key)


def _needs_verdicts(config: Config, sampling: SamplingConfig, key: str) -> Iterator[str]:
    wanted = [
        name
        for name, asked in (
            ("order prioritised", sampling.order == "prioritised"),
            ("retire_above", sampling.retire_above is not None),
            ("dynamic_rounds", sampling.dynamic_rounds > 0),
        )
        if asked
    ]
    if wanted and not any(domain.verifier for domain in config.domains.values()):
        yield f"{key}: {', '.join(wanted)} need verdicts, and no domain has a verifier"
    if sampling.dynamic_rounds > 0 and config.train.samples_per_prompt == 1:
        yield f"{key}.dynamic_rounds: a group of one answer never differs; sample 2 or more"
