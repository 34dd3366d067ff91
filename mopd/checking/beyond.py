"""Faults of files that a faulty configuration does not keep from being found, so that a user sees
both at once. What a part of the configuration that is wrong would be needed for is left out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mopd.config.model_files import read_model_limits
from mopd.config.schema import Config
from mopd.data.prompts import DomainData, check_lengths, load_domain
from mopd.data.verifier_check import check_verifiers
from mopd.errors import Faults, MopdError
from mopd.model_folders import (
    context_limits,
    load_tokenizer,
    require_same_tokenizer,
    teacher_folders,
)

_LIST = re.compile(r"^(.*) \(\d+ problems\):\n  - ", re.DOTALL)


def require_files(config: Config, problems: Sequence[str]) -> None:
    """Look at tokenizers, prompt files, lengths and verifiers as `mopd.build.prepare` does.

    `problems` are those of `check_config`; each begins with the key that it is about. Raises what
    `prepare` would.
    """

    def right(*keys: str) -> bool:
        return not any(p.startswith(key) for p in problems for key in keys)

    if not right("student.model"):
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    faults = Faults()
    student = Path(config.student.model)
    good = {n: t for n, t in config.teachers.items() if right(f"teachers.{n}.", f"teachers.{n} ")}
    domains = {
        name: domain
        for name, domain in config.domains.items()
        if right(*(f"domains.{name}.{part}" for part in ("prompts", "verifier", "held_out")))
    }
    found: dict[str, DomainData] = {}
    with faults.collected():
        tokenizer = load_tokenizer(student)
        with faults.collected():
            require_same_tokenizer(student, teacher_folders(replace(config, teachers=good)))
        for name, domain in domains.items():
            with faults.collected():
                known = list(config.domains)
                found[name] = load_domain(name, domain, tokenizer, known_domains=known)
        if right("rollout.max_response_tokens", "domains."):
            with faults.collected():
                theirs = {n: d for n, d in config.domains.items() if d.teacher in good}
                only = replace(config, teachers=good, domains=theirs)
                limits = context_limits(only, read_model_limits(student), teacher_folders(only))
                check_lengths(found, config.rollout.max_response_tokens, limits)
        for name, data in found.items():
            with faults.collected():
                check_verifiers({name: domains[name]}, {name: data.held_out or data.train})
    faults.raise_any()


def each_of(error: MopdError) -> Iterator[str]:
    """Every fault that an error stands for, by itself, with what the list of it was headed by."""
    for text in error.faults or (str(error),):
        head = _LIST.match(text)
        if head is None:
            yield text
        else:
            for one in text[head.end() :].split("\n  - "):
                yield f"{head[1]}: {one}"
