"""What of `domains`, their prompts and verifiers cannot be meant. Reads no prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mopd.config.names import check_names
from mopd.config.schema import Config, DomainConfig, PromptsConfig, VerifierConfig
from mopd.config.wording import nearest

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$")

_TASK_ONLY = "params size seed template key_fields unordered_key".split()

_HARNESS_ONLY = ("lm_eval_folder", "fewshot")


def check_domains(config: Config) -> Iterator[str]:
    if not config.domains:
        yield "no domains: nothing to train on"
    elif not any(domain.weight > 0 for domain in config.domains.values()):
        yield "every domain has weight 0: nothing to train on"
    yield from check_names(config.domains, "domains", "domain")
    for name, domain in config.domains.items():
        key = f"domains.{name}"
        if domain.teacher not in config.teachers:
            hint = nearest(domain.teacher, config.teachers) or "; no teachers are given"
            if domain.teacher.strip()[:1] in ("[", "{") or "," in domain.teacher:
                hint = "; a domain has exactly one teacher, by name"
            yield f"{key}.teacher: there is no teacher {domain.teacher!r}{hint}"
        yield from check_prompts(domain, key)
        yield from check_verifier(domain, key)


def check_prompts(domain: DomainConfig, key: str) -> Iterator[str]:
    prompts, defaults = domain.prompts, PromptsConfig()
    given = [name for name in ("jsonl", "task", "lm_eval") if getattr(prompts, name) is not None]
    if len(given) > 1:
        both = "both " if len(given) == 2 else ""
        yield f"{key}.prompts has {both}{' and '.join(given)}: set all but one of them to null"
        return
    if not given:
        yield f"{key}.prompts needs jsonl (a file) or task (a reasoning-gym task)"
        return
    if prompts.lm_eval is not None:
        yield from _harness_prompts(domain, key)
        return
    for field in _HARNESS_ONLY:
        if getattr(prompts, field) != getattr(defaults, field):
            yield f"{key}.prompts.{field} goes with lm_eval and has no effect without it"
    if prompts.task is not None:
        if prompts.held_out_jsonl is not None:
            yield f"{key}.prompts.held_out_jsonl goes with jsonl, not with task"
        if domain.held_out >= prompts.size:
            yield (
                f"{key}.held_out ({domain.held_out}) leaves nothing of prompts.size "
                f"({prompts.size}) to train on"
            )
        return
    for field in _TASK_ONLY:
        if getattr(prompts, field) != getattr(defaults, field):
            yield f"{key}.prompts.{field} goes with task and has no effect on a jsonl file"
    for field in ("jsonl", "held_out_jsonl"):
        file = getattr(prompts, field)
        if file is not None and not Path(file).is_file():
            yield f"{key}.prompts.{field}: no such file: {file} (working directory {Path.cwd()})"
    if prompts.held_out_jsonl is not None and prompts.jsonl is not None:
        if Path(prompts.held_out_jsonl).resolve() == Path(prompts.jsonl).resolve():
            yield f"{key}.prompts: jsonl and held_out_jsonl are the same file"


def _harness_prompts(domain: DomainConfig, key: str) -> Iterator[str]:
    """A task of lm-evaluation-harness: a test set, with a judge of its own."""
    prompts, defaults = domain.prompts, PromptsConfig()
    if key.startswith("domains."):
        yield (
            f"{key}.prompts.lm_eval is a test set and is never trained on; it goes under "
            "evaluation.general or evaluation.benchmarks"
        )
    for field in ("held_out_jsonl", "difficulty", *_TASK_ONLY):
        if getattr(prompts, field) != getattr(defaults, field):
            yield f"{key}.prompts.{field} has no effect on a task of lm-evaluation-harness"
    if prompts.lm_eval_folder is not None and not Path(prompts.lm_eval_folder).is_dir():
        yield f"{key}.prompts.lm_eval_folder: no such folder: {prompts.lm_eval_folder}"
    if domain.verifier is None or domain.verifier.name != "lm_eval":
        yield f"{key}.verifier: a task of lm-evaluation-harness is judged by itself: lm_eval"


def check_verifier(domain: DomainConfig, key: str) -> Iterator[str]:
    verifier = domain.verifier
    if verifier is None:
        return
    if (verifier.name is None) == (verifier.target is None):
        got = "neither" if verifier.name is None else "both"
        yield f"{key}.verifier needs either name or target (package.module:function), got {got}"
        return
    defaults = VerifierConfig()
    for field in ("memory_gib", "network", "env"):
        if verifier.target is None and getattr(verifier, field) != getattr(defaults, field):
            yield f"{key}.verifier.{field} bounds code of yours (target); {verifier.name} is ours"
    if verifier.target is not None and not _TARGET.match(verifier.target):
        yield (
            f"{key}.verifier.target: {verifier.target!r} is not of the form package.module:function"
        )
    elif verifier.name == "reasoning_gym" and domain.prompts.task is None:
        yield (
            f"{key}.verifier: reasoning_gym scores its own tasks only, and {key}.prompts names "
            "no task"
        )
    elif verifier.name == "lm_eval" and domain.prompts.lm_eval is None:
        yield (
            f"{key}.verifier: lm_eval judges tasks of lm-evaluation-harness only, and "
            f"{key}.prompts.lm_eval names none"
        )
