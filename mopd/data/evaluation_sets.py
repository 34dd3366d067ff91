"""Held-out sets beside the domains' own: read as a domain's prompts are, but without a split."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from mopd.config.schema import DomainConfig, EvaluationSetConfig
from mopd.data.prompts import DomainData, load_domain
from mopd.errors import ConfigError, DataError, MopdError


def as_domain(cfg: EvaluationSetConfig) -> DomainConfig:
    """The set's prompts and verifier in the shape in which domains have them."""
    return DomainConfig(teacher="", prompts=cfg.prompts, verifier=cfg.verifier, held_out=0)


def load_set(key: str, name: str, cfg: EvaluationSetConfig, tokenizer: Any) -> DomainData:
    """All prompts of the set as ``held_out``, or the `items` whose texts hash lowest.

    Args:
        key: where it is configured, e.g. ``evaluation.general.common``; for messages.

    Raises:
        DataError, ConfigError: as `load_domain` does; or fewer items than asked for.
    """
    try:
        data = load_domain(name, as_domain(cfg), tokenizer)
    except MopdError as error:
        raise error.reworded(f"domains.{name}", key) from error
    prompts = data.train
    if prompts and prompts[0].choices and key.startswith("evaluation.benchmarks"):
        raise ConfigError(
            f"{key}: lm_eval {cfg.prompts.lm_eval} compares likelihoods of given choices, which is "
            "asked by mopd evaluate alone, while a domain's score is taken during training too; "
            "put it under evaluation.general"
        )
    if cfg.items is not None:
        if cfg.items > len(prompts):
            raise DataError(
                f"{key}.items is {cfg.items}, but the set has only {len(prompts)} different items"
            )
        # By content, as held-out splits are, so that neither order nor additions elsewhere matter.
        by_hash = sorted(prompts, key=lambda p: hashlib.sha256(p.text.encode()).hexdigest())
        chosen = {prompt.id for prompt in by_hash[: cfg.items]}
        prompts = [prompt for prompt in prompts if prompt.id in chosen]
    return replace(data, train=[], held_out=prompts)
