"""The start-up check of verifiers: what it finds; no verifier hangs or ends the command."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from mopd.config.schema import DomainConfig, PromptsConfig, VerifierConfig
from mopd.data.tasks import make_items
from mopd.data.verifier_check import can_judge, check_verifiers
from mopd.errors import ConfigError
from mopd.types import Prompt, Verdict

TASK = PromptsConfig(task="spell_backward", params={"min_word_len": 4, "max_word_len": 6}, size=20)
NUMBERS = [Prompt(f"d/{n:05d}", "d", "q", (1,), str(n)) for n in range(10)]

MODULE = """
import os, sys, time
def exact(prompt, answer): return answer == prompt.answer
def partial(prompt, answer, *, half=0.5):
    return 1.0 if answer == prompt.answer else half if answer else 0.0
def contains(prompt, answer): return prompt.answer in answer
def crashes(prompt, answer): raise RuntimeError("no compiler for " + answer)
def anything(prompt, answer): return True
def nothing(prompt, answer): return False
def any_number(prompt, answer): return answer.isdigit()
def leaves(prompt, answer): sys.exit(0)
def dies(prompt, answer): os._exit(7)
def hangs(prompt, answer): time.sleep(3600)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, of a name of its own so that none is cached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    name = f"user_checks_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_exits.py").write_text("import sys; sys.exit()")
    return name


def check(verifier: VerifierConfig, prompts: list[Prompt] = NUMBERS, task: bool = False) -> None:
    source = TASK if task else PromptsConfig(jsonl="x.jsonl")
    domain = DomainConfig(teacher="t", prompts=source, verifier=verifier)
    check_verifiers({"code": domain, "without": DomainConfig(teacher="t")}, {"code": prompts})


def test_what_works_passes(module: str) -> None:
    check(VerifierConfig(name="exact_match"))
    check(VerifierConfig(name="math_verify"))
    check(VerifierConfig(target=f"{module}:partial", args={"half": 0.1}))
    check(VerifierConfig(target=f"{module}:contains"))
    check(VerifierConfig(target=f"{module}:crashes"), [Prompt("d/0", "d", "q", (1,))])  # no answer
    items = make_items("spell_backward", TASK.params, size=20, seed=0, template="spell: {word}")
    spelled = [
        Prompt(f"s/{n}", "code", item.prompt, (1,), item.answer, item.metadata)
        for n, item in enumerate(items)
    ]
    check(VerifierConfig(name="reasoning_gym"), spelled, task=True)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("anything", "called the wrong answer '' right (and 7 more like it)"),
        ("nothing", "called its reference answer '0' wrong (and 7 more like it)"),
        ("any_number", "called every other prompt's answer right"),
        # The message differs from prompt to prompt; it is one problem all the same.
        ("crashes", "d/00000: answer '0': RuntimeError: no compiler for 0 (and 15 more like it)"),
        ("leaves", "SystemExit: 0 (and 15 more like it)"),
        ("dies", "its process ended for d/00000, answer '0' (exit code 7)"),
        ("hangs", "gave no answer for d/00000, answer '0' within 0.5 s; raise domains.code.verif"),
    ],
)
def test_what_does_not_is_named_once_and_in_time(module: str, function: str, says: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError) as error:
        check(VerifierConfig(target=f"{module}:{function}", timeout_s=0.5))
    assert time.monotonic() - begin < 20
    assert "domains.code.verifier does not do its work" in str(error.value)
    assert says in str(error.value)
    if function != "anything":  # which accepts two kinds of nonsense and others' answers
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("{module}_exits:check", "importing {module}_exits failed: SystemExit"),
        ("{module}:exakt", "has no 'exakt'; did you mean 'exact'?"),
    ],
)
def test_what_cannot_be_built_is_named(module: str, target: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(VerifierConfig(target=target.format(module=module)))
    assert "domains.code.verifier" in str(error.value)
    assert says.format(module=module) in str(error.value)


def test_a_harness_need_only_be_able_to_judge() -> None:
    asked: list[str] = []

    def judge(prompt: Prompt, answer: str) -> Verdict:
        asked.append(answer)
        if answer == "3":
            raise RuntimeError("no such field")
        return Verdict(False, 0.0)

    can_judge(judge, NUMBERS[:3], "d")
    assert asked == ["0", "1", "2"]  # wrong of every reference, which is no fault here
    with pytest.raises(ConfigError, match="d/00003: answer '3': RuntimeError: no such field"):
        can_judge(judge, NUMBERS[:5], "d")
