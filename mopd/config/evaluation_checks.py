"""What of `evaluation` cannot be meant. Pure reading."""

from __future__ import annotations

from collections.abc import Iterator

from mopd.config.domain_checks import check_prompts, check_verifier
from mopd.config.names import check_names
from mopd.config.schema import Config, DomainConfig, EvaluationConfig
from mopd.config.wording import nearest


def check_evaluation(config: Config) -> Iterator[str]:
    evaluation, defaults = config.evaluation, EvaluationConfig()
    taken = dict.fromkeys(config.domains, "domains")
    for kind, sets in (("general", evaluation.general), ("benchmarks", evaluation.benchmarks)):
        yield from check_names(sets, f"evaluation.{kind}", "set")
        for name, each in sets.items():
            key = f"evaluation.{kind}.{name}"
            if name in taken:
                yield f"{key}: {taken[name]} has that name already; results are kept by it"
            taken.setdefault(name, f"evaluation.{kind}")
            # Such a set is read as a domain is, without a split.
            alike = DomainConfig(prompts=each.prompts, verifier=each.verifier, held_out=0)
            yield from check_prompts(alike, key)
            yield from check_verifier(alike, key)
            if each.prompts.held_out_jsonl is not None:
                yield f"{key}.prompts.held_out_jsonl: all of a set is held out; use jsonl"
            if each.verifier is None:
                yield f"{key} has no verifier: its answers could not be judged"
            if kind == "general" and each.domain is not None:
                yield (
                    f"{key}.domain is {each.domain!r}, but a general set is nobody's; a further "
                    "set of a domain goes under evaluation.benchmarks"
                )
            if kind == "benchmarks" and each.domain not in config.domains:
                hint = nearest(each.domain, config.domains) if each.domain else ""
                yield f"{key}.domain: {each.domain!r} is not one of the domains{hint}"
    if evaluation.samples == 0:
        for field in ("temperature", "pass_at"):
            if getattr(evaluation, field) != getattr(defaults, field):
                yield f"evaluation.{field} has no effect while evaluation.samples is 0"
    elif wrong := [k for k in evaluation.pass_at if not 1 <= k <= evaluation.samples]:
        yield (
            f"evaluation.pass_at: {wrong} not within 1 and evaluation.samples "
            f"({evaluation.samples})"
        )
    if evaluation.patience and not evaluation.every:
        yield "evaluation.patience has no effect while evaluation.every is 0"
    if evaluation.patience and evaluation.keep_best == "off":
        yield "evaluation.patience needs evaluation.keep_best, by which a student is the better one"
