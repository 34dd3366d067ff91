"""Who says whether an answer is right: built-in verifiers by name, users' own by import.

A verifier takes (prompt, answer text) and returns a `Verdict`. When it cannot judge it raises; the
caller counts a failure, and a failure is never a wrong answer. Deadlines are the caller's: nothing
here uses signals, so a verdict is the same in a thread, a process and a Ray actor.
All verifiers but the harness' can be pickled; each process builds its own.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mopd.config.schema import PromptsConfig, VerifierConfig
from mopd.config.wording import kind_of, nearest
from mopd.data.harness import load_task
from mopd.data.harness_scoring import chosen_scoring, score_answer, score_choices
from mopd.data.math_answers import same_mathematics
from mopd.data.tasks import TaskItem, reasoning_gym_score
from mopd.errors import ConfigError, MopdError
from mopd.protocols import Verifier
from mopd.types import Prompt, Verdict


class VerifierError(MopdError):
    """A verifier could not judge an answer; counted as a failure, never as a wrong answer."""


@dataclass(frozen=True)
class ExactMatch:
    """Right if the answer is the reference, blanks around both aside unless `strip` is false."""

    strip: bool = True

    def __call__(self, prompt: Prompt, answer: str) -> Verdict:
        reference = _reference(prompt)
        correct = answer.strip() == reference.strip() if self.strip else answer == reference
        return Verdict(correct, float(correct))


@dataclass(frozen=True)
class ReasoningGym:
    """Score by the task's own scorer (partial credit included), exact match beside it."""

    task: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, prompt: Prompt, answer: str) -> Verdict:
        reference = _reference(prompt)
        bare = answer.strip()
        item = TaskItem(prompt.id, prompt.text, reference, dict(prompt.metadata))
        score = reasoning_gym_score(self.task, self.params, item, bare)
        return as_verdict(Verdict(bare == reference.strip(), score), f"reasoning-gym {self.task}")


@dataclass(frozen=True)
class MathVerify:
    """Mathematical equality with the reference, by math-verify with guards of ours."""

    def __call__(self, prompt: Prompt, answer: str) -> Verdict:
        try:
            correct = same_mathematics(_reference(prompt), answer)
        except ValueError as error:
            raise VerifierError(f"math_verify cannot judge prompt {prompt.id}: {error}") from error
        return Verdict(correct, float(correct))


class LmEval:
    """The score that lm-evaluation-harness gives: its filter and metric, right at 1 exactly."""

    def __init__(self, prompts: PromptsConfig, args: Mapping[str, Any], where: str) -> None:
        """Loads the task at once; ConfigError says what is wrong with it or with `args`."""
        self._task = load_task(prompts, where.removesuffix(".verifier"))
        self._scoring = chosen_scoring(self._task, args.get("metric"), args.get("filter"), where)

    def __call__(self, prompt: Prompt, answer: str) -> Verdict:
        doc = prompt.metadata["doc"]
        try:
            if prompt.choices:
                said = json.loads(answer)
                if len(said) != len(prompt.choices):
                    raise ValueError(f"{len(said)} likelihoods of {len(prompt.choices)} choices")
                score = score_choices(self._task, self._scoring, doc, said)
            else:
                text, _ = prompt.ended(answer)
                score = score_answer(self._task, self._scoring, doc, text)
        except Exception as error:  # a task's own code raises what it likes
            raise VerifierError(
                f"lm_eval cannot judge prompt {prompt.id}: {type(error).__name__}: {error}"
            ) from error
        return as_verdict(score, f"lm_eval {self._scoring.metric}")


class UserVerifier:
    """A user's ``function(prompt, answer, **args) -> bool | float | Verdict``, by its name.

    Travels by name and is imported where it is used, with the working directory of the process
    that made it on the path.
    """

    def __init__(self, target: str, args: Mapping[str, Any], where: str) -> None:
        """Imports at once; ConfigError (starting with `where`) says what is wrong with it."""
        self.target, self.args, self.where = target, dict(args), where
        self._folder = str(Path.cwd())
        self._function = self._load()

    def __call__(self, prompt: Prompt, answer: str) -> Verdict:
        return as_verdict(self._function(prompt, answer, **self.args), self.target)

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in self.__dict__.items() if name != "_function"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._function = self._load()

    def _load(self) -> Callable[..., Any]:
        function = import_target(self.target, self.where, self._folder)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return function  # builtins may have none
        try:
            signature.bind("prompt", "answer", **self.args)
        except TypeError as error:
            raise ConfigError(
                f"{self.where}: {self.target}{signature} cannot be called as "
                f"(prompt, answer, **args) with args {self.args}: {error}"
            ) from error
        return function


def import_target(target: str, where: str, folder: str | None = None) -> Callable[..., Any]:
    """The callable that ``package.module:function`` names; ConfigError says what is missing.

    folder: put first on the import path while importing (default: the working directory).
    """
    module_name, colon, attribute = target.partition(":")
    if not (colon and module_name and attribute.isidentifier()):
        raise ConfigError(f"{where}: {target!r} is not of the form package.module:function")
    folder = folder or str(Path.cwd())
    if folder not in sys.path:
        # It stays there: the module may import its neighbours only when it is called.
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ConfigError(
                f"{where}: {target!r}: there is no module {missing!r}; looked in the working "
                f"directory ({folder}) and among the installed packages"
            ) from error
        raise ConfigError(
            f"{where}: {target!r}: importing {module_name} failed, because it needs the module "
            f"{missing!r}, which is not installed"
        ) from error
    except (Exception, SystemExit) as error:  # a user's module runs whatever it likes
        raise ConfigError(
            f"{where}: {target!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if function is None:
        public = [
            name
            for name, each in vars(module).items()
            if inspect.isfunction(each) and not name.startswith("_")
        ]
        raise ConfigError(
            f"{where}: {target!r}: {module_name} has no {attribute!r}{nearest(attribute, public)}"
        )
    if not callable(function):
        raise ConfigError(
            f"{where}: {target!r} is {kind_of(function)}, expected a function "
            "(prompt, answer, **args)"
        )
    return function


def as_verdict(result: Any, who: str) -> Verdict:
    """A verifier's return value as a Verdict; VerifierError where it is none.

    bool: right or wrong. float in [0, 1]: partial credit, right at 1.0 exactly.
    """
    if isinstance(result, bool):
        return Verdict(result, float(result))
    if isinstance(result, Verdict):
        if isinstance(result.correct, bool) and _in_unit(result.score):
            return Verdict(result.correct, float(result.score))
    elif _in_unit(result):
        return Verdict(float(result) == 1.0, float(result))
    raise VerifierError(
        f"{who} returned {result!r} ({type(result).__name__}); expected a bool, a float in "
        "[0, 1] or a mopd.types.Verdict"
    )


def _in_unit(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and 0.0 <= value <= 1.0


def _exact_match(cfg: VerifierConfig, prompts: PromptsConfig, where: str) -> Verifier:
    args = _arguments(cfg, ("strip",), where)
    strip = args.get("strip", True)
    if not isinstance(strip, bool):
        raise ConfigError(f"{where}.args.strip: expected true or false, got {kind_of(strip)}")
    return ExactMatch(strip)


def _reasoning_gym(cfg: VerifierConfig, prompts: PromptsConfig, where: str) -> Verifier:
    _arguments(cfg, (), where)
    if prompts.task is None:
        raise ConfigError(f"{where}: reasoning_gym scores its own tasks; prompts.task is null")
    return ReasoningGym(prompts.task, dict(prompts.params))


def _math_verify(cfg: VerifierConfig, prompts: PromptsConfig, where: str) -> Verifier:
    _arguments(cfg, (), where)
    try:
        importlib.import_module("math_verify")
    except ImportError as error:
        raise ConfigError(
            f"{where}: the package math-verify does not import here ({error}); install the "
            "project's lock file"
        ) from error
    return MathVerify()


def _lm_eval(cfg: VerifierConfig, prompts: PromptsConfig, where: str) -> Verifier:
    args = _arguments(cfg, ("metric", "filter"), where)
    for name, value in args.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}.args.{name}: expected a name, got {kind_of(value)}")
    if prompts.lm_eval is None:
        raise ConfigError(f"{where}: lm_eval judges its own tasks; prompts.lm_eval is null")
    return LmEval(prompts, args, where)


VERIFIERS: dict[str, Callable[[VerifierConfig, PromptsConfig, str], Verifier]] = {
    "exact_match": _exact_match,
    "lm_eval": _lm_eval,
    "math_verify": _math_verify,
    "reasoning_gym": _reasoning_gym,
}


def build_verifier(
    cfg: VerifierConfig | None, domain: str, prompts: PromptsConfig
) -> Verifier | None:
    """The domain's verifier, or None where it has none; ConfigError names the domain."""
    where = f"domains.{domain}.verifier"
    if cfg is None:
        return None
    if (cfg.name is None) == (cfg.target is None):
        raise ConfigError(f"{where} needs either name or target (package.module:function)")
    if cfg.target is not None:
        return UserVerifier(cfg.target, cfg.args, where)
    assert cfg.name is not None
    if cfg.name not in VERIFIERS:
        raise ConfigError(f"{where}: unknown verifier {cfg.name!r}{nearest(cfg.name, VERIFIERS)}")
    return VERIFIERS[cfg.name](cfg, prompts, where)


def _reference(prompt: Prompt) -> str:
    if prompt.answer is None:
        raise VerifierError(f"prompt {prompt.id} has no reference answer to compare with")
    return prompt.answer


def _arguments(cfg: VerifierConfig, known: Sequence[str], where: str) -> dict[str, Any]:
    for name in cfg.args:
        if name not in known:
            hint = nearest(name, known) or "; it takes none"
            raise ConfigError(f"{where}.args: {cfg.name} has no argument {name!r}{hint}")
    return dict(cfg.args)
