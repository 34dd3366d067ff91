"""What a run reads before it loads any model: tokenizers, prompts, lengths, verifiers.

Everything wrong with them is told at once. `mopd.build.prepare` reads them for a run; `mopd check`
reads also those of a faulty configuration, without the parts that its faults are about.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mopd.config.model_files import ModelLimits, read_model_limits
from mopd.config.schema import Config, DomainConfig, EvaluationSetConfig
from mopd.data.evaluation_sets import as_domain, load_set
from mopd.data.prompts import DomainData, check_lengths, load_domain
from mopd.data.verifier_check import check_verifiers
from mopd.errors import Faults
from mopd.model_folders import (
    context_limits,
    load_tokenizer,
    require_known_ids,
    require_same_tokenizer,
    teacher_folders,
)
from mopd.student.opening import require_trainable


@dataclass(frozen=True)
class Inputs:
    """What was read, and found right."""

    tokenizer: Any
    """The student's Hugging Face tokenizer."""
    limits: ModelLimits
    """Of the student's checkpoint."""
    domains: dict[str, DomainData]
    sets: dict[str, DomainData]
    """Held-out sets beside the domains' own: general ones and benchmarks."""


def read_inputs(config: Config, problems: Sequence[str] = ()) -> Inputs:
    """Read everything; leave out what one of `problems` is about, or would be needed for.

    Args:
        problems: those of `check_config`; each begins with the key that it is about. None may be
            about student.model, without which nothing can be read.

    Raises:
        ConfigError, DataError, ModelError: naming the key, file, row or checkpoint, and what to do;
            every fault at once, but for those that a student without a readable tokenizer or
            config.json hides.
    """
    assert not concern(problems, "student.model")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a run never fetches anything by itself
    student = Path(config.student.model)
    tokenizer, limits = load_tokenizer(student), read_model_limits(student)
    teachers = {n: t for n, t in config.teachers.items() if not concern(problems, f"teachers.{n}")}
    domains = {
        name: domain
        for name, domain in config.domains.items()
        if not concern(
            problems, *(f"domains.{name}.{key}" for key in ("prompts", "verifier", "held_out"))
        )
    }
    faults = Faults()
    folders: dict[str, Path] = {}
    with faults.collected():
        folders = teacher_folders(replace(config, teachers=teachers))
        require_same_tokenizer(student, folders)
    with faults.collected():
        require_known_ids(student, limits, tokenizer)
    if not concern(problems, "student"):
        with faults.collected():
            require_trainable(config.student)
    found, sets = Inputs(tokenizer, limits, {}, {}), further_sets(config)
    for name, domain in domains.items():
        with faults.collected():
            known = list(config.domains)
            found.domains[name] = load_domain(name, domain, tokenizer, known_domains=known)
    for name, (key, each) in sets.items():
        if not concern(problems, key):
            with faults.collected():
                found.sets[name] = load_set(key, name, each, tokenizer)
    everything = {**found.domains, **found.sets}
    if not concern(problems, "rollout.max_response_tokens"):
        with faults.collected():
            served = {n: d for n, d in config.domains.items() if d.teacher in teachers}
            models = context_limits(
                replace(config, teachers=teachers, domains=served), limits, folders
            )
            check_lengths(everything, config.rollout.max_response_tokens, models)
    asked = {name: data.held_out or data.train for name, data in everything.items()}
    for name, judged in judged_of(config).items():
        if name in asked:
            with faults.collected():
                check_verifiers({name: judged}, asked)
    faults.raise_any()
    return found


def concern(problems: Sequence[str], *keys: str) -> bool:
    """Whether one of `problems` is about one of `keys`, or about a key below it."""
    return any(p.startswith((f"{k}.", f"{k} ", f"{k}:")) for p in problems for k in keys)


def further_sets(config: Config) -> dict[str, tuple[str, EvaluationSetConfig]]:
    """General sets and benchmarks, none of which is trained on: name -> (its key, its settings)."""
    return {
        name: (f"evaluation.{kind}.{name}", each)
        for kind in ("general", "benchmarks")
        for name, each in getattr(config.evaluation, kind).items()
    }


def load_sets(config: Config, tokenizer: Any) -> dict[str, DomainData]:
    """The prompts of every further set; raises as `load_set` does, for the first one at fault."""
    sets = further_sets(config)
    return {name: load_set(key, name, each, tokenizer) for name, (key, each) in sets.items()}


def judged_of(config: Config) -> dict[str, DomainConfig]:
    """Domain or further set -> its prompts' and verifier's configuration."""
    sets = further_sets(config)
    return {**config.domains, **{name: as_domain(each) for name, (_, each) in sets.items()}}
