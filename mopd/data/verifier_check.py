"""Does every verifier do its work? Asked before a run, with answers whose verdict is known.

A user's code is asked in a process of its own: one that hangs, exits or crashes is named, and
never hangs or ends the command that checks it. Verifiers of ours that only compare text or call
reasoning-gym's scorers are asked here, which saves a process a domain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from mopd.config.schema import DomainConfig
from mopd.data.verifier_process import NoVerdict, VerifierProcess, named
from mopd.data.verifiers import VerifierError, build_verifier
from mopd.errors import ConfigError
from mopd.types import Prompt, Verdict

_ASKED_HERE = ("exact_match", "reasoning_gym")
_NONSENSE = ("", "mopd-wrong-answer")

Judge = Callable[[Prompt, str], Verdict]


def check_verifiers(
    domains: Mapping[str, DomainConfig], prompts: Mapping[str, Sequence[Prompt]]
) -> None:
    """Build every domain's verifier and ask it about some of the domain's `prompts`.

    Raises:
        ConfigError: naming the domain: the verifier cannot be built, raises, ends its process,
            takes longer than its `timeout_s`, or says wrong of what is right or the reverse.
    """
    for name, domain in domains.items():
        if domain.verifier is None:
            continue
        if domain.verifier.name in _ASKED_HERE:
            verifier = build_verifier(domain.verifier, name, domain.prompts)
            assert verifier is not None
            self_check(verifier, prompts[name], name)
        else:
            with VerifierProcess(name, domain) as process:
                # A target of lm-evaluation-harness need be no answer that its own filter takes
                # ("18", where "#### 18" is looked for), nor nonsense wrong ("write no comma").
                check = can_judge if domain.verifier.name == "lm_eval" else self_check
                check(process, prompts[name], name)


def can_judge(judge: Judge, prompts: Sequence[Prompt], domain: str, *, sample: int = 8) -> None:
    """ConfigError unless `judge` gives verdicts, whatever they are, on up to `sample` prompts."""
    problems = _Problems()
    try:
        for prompt in prompts[:: max(1, len(prompts) // sample)][:sample]:
            choices = json.dumps([0.0] * len(prompt.choices))
            _try(judge, prompt, choices if prompt.choices else prompt.answer or "", problems)
    except NoVerdict as error:
        problems.add("no verdict", str(error))
    if texts := problems.texts():
        raise ConfigError.listing(f"domains.{domain}.verifier does not do its work", texts)


def self_check(judge: Judge, prompts: Sequence[Prompt], domain: str, *, sample: int = 8) -> None:
    """ConfigError unless `judge` says right of reference answers and not of wrong ones.

    Checks up to `sample` prompts that have a reference answer; does nothing if none has one.
    Wrong answers: nothing, a nonsense word, and the reference answer of another prompt (which
    may happen to be right, so only a verifier that accepts every one of those is at fault).
    """
    known = [prompt for prompt in prompts if prompt.answer is not None]
    chosen = known[:: max(1, len(known) // sample)][:sample]
    problems = _Problems()
    foreign: list[bool] = []
    try:
        for prompt in chosen:
            assert prompt.answer is not None
            verdict = _try(judge, prompt, prompt.answer, problems)
            if verdict is not None and not (verdict.correct and verdict.score > 0):
                problems.add("wrong", f"{prompt.id}: called its reference answer {prompt.answer!r} "
                                      "wrong")  # fmt: skip
            for wrong in _NONSENSE:
                # It may well refuse to judge nonsense.
                verdict = _try(judge, prompt, wrong, None)
                if verdict is not None and verdict.correct and wrong != prompt.answer.strip():
                    problems.add(wrong, f"{prompt.id}: called the wrong answer {wrong!r} right")
            other = next((p.answer for p in known if p.answer and p.answer != prompt.answer), None)
            if other is not None:
                verdict = _try(judge, prompt, other, problems)
                foreign.append(verdict is not None and verdict.correct)
        if foreign and all(foreign):
            problems.add("foreign", "called every other prompt's answer right as well")
    except NoVerdict as error:
        problems.add("no verdict", str(error))
    if texts := problems.texts():
        raise ConfigError.listing(f"domains.{domain}.verifier does not do its work", texts)


class _Problems:
    """Each kind of problem once, with how often it was met."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, kind: str, text: str) -> None:
        self._found.setdefault(kind, []).append(text)

    def texts(self) -> list[str]:
        return [
            texts[0] if len(texts) == 1 else f"{texts[0]} (and {len(texts) - 1} more like it)"
            for texts in self._found.values()
        ]


def _try(judge: Judge, prompt: Prompt, answer: str, problems: _Problems | None) -> Verdict | None:
    """The verdict, or None where it raised; that is a problem unless `problems` is None."""
    try:
        return judge(prompt, answer)
    except NoVerdict:
        raise
    except Exception as error:  # whatever a user's verifier raises is what we want to show
        if problems is not None:
            what = str(error) if isinstance(error, VerifierError) else named(error)
            problems.add(what.partition(":")[0], f"{prompt.id}: answer {answer!r}: {what}")
        return None
