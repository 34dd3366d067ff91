"""Verifiers by name and by import; failures that are no verdicts; the start-up self-check."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mopd.config.schema import PromptsConfig, VerifierConfig
from mopd.data.tasks import make_items
from mopd.data.verifiers import (
    VERIFIERS,
    VerifierError,
    as_verdict,
    build_verifier,
)
from mopd.errors import ConfigError
from mopd.types import Prompt, Verdict

NO_TASK = PromptsConfig(jsonl="x.jsonl")
SPELL = PromptsConfig(task="spell_backward", params={"min_word_len": 4, "max_word_len": 6}, size=20)


def prompt(answer: str | None = "42", number: int = 0, **metadata: Any) -> Prompt:
    return Prompt(f"d/{number:05d}", "d", "q", (1,), answer, metadata)


def spelled() -> list[Prompt]:
    items = make_items("spell_backward", SPELL.params, size=20, seed=0, template="spell: {word}\n")
    return [
        Prompt(f"spell/{n}", "spell", item.prompt, (1,), item.answer, item.metadata)
        for n, item in enumerate(items)
    ]


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, of a name of its own so that none is cached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    name = f"user_checks_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(
        "from mopd.types import Verdict\n"
        "CONSTANT = 3\n"
        "def exact(prompt, answer): return answer == prompt.answer\n"
        "def partial(prompt, answer, *, half=0.5):\n"
        "    return 1.0 if answer == prompt.answer else half if answer else 0.0\n"
        "def full(prompt, answer): return Verdict(answer == prompt.answer, 0.25)\n"
        "def crashes(prompt, answer): raise RuntimeError('no compiler')\n"
        "def says(prompt, answer, *, what): return what\n"
        "def anything(prompt, answer): return True\n"
        "def nothing(prompt, answer): return False\n"
        "def any_number(prompt, answer): return answer.isdigit()\n"
        "def contains(prompt, answer): return prompt.answer in answer\n"
    )
    return name


def of(module: str, function: str, **args: Any) -> Any:
    cfg = VerifierConfig(target=f"{module}:{function}", args=args)
    return build_verifier(cfg, "code", NO_TASK)


def test_no_verifier_is_none() -> None:
    assert build_verifier(None, "d", NO_TASK) is None


def test_exact_match() -> None:
    check = build_verifier(VerifierConfig(name="exact_match"), "d", NO_TASK)
    assert check is not None
    assert check(prompt(), " 42\n") == Verdict(True, 1.0)
    assert check(prompt(), "43") == Verdict(False, 0.0)
    assert check(prompt(), "") == Verdict(False, 0.0)
    strict = build_verifier(VerifierConfig(name="exact_match", args={"strip": False}), "d", NO_TASK)
    assert strict is not None and not strict(prompt(), " 42").correct
    with pytest.raises(VerifierError, match="d/00000 has no reference"):
        check(prompt(None), "42")


def test_reasoning_gym_gives_partial_credit_beside_exact_match() -> None:
    check = build_verifier(VerifierConfig(name="reasoning_gym"), "spell", SPELL)
    assert check is not None
    one = spelled()[0]
    assert one.answer is not None
    assert check(one, one.answer + "\n") == Verdict(True, 1.0)
    near = check(one, one.answer[:-1])
    assert not near.correct and 0.0 < near.score < 1.0
    far = check(one, "")
    assert not far.correct and far.score < near.score


def test_math_verify() -> None:
    check = build_verifier(VerifierConfig(name="math_verify"), "d", NO_TASK)
    assert check is not None
    assert check(prompt("1/2"), r"\boxed{\frac12}") == Verdict(True, 1.0)
    assert check(prompt("1/2"), "0.4") == Verdict(False, 0.0)
    with pytest.raises(VerifierError, match="cannot judge prompt d/00000"):
        check(prompt("?"), "5")


def test_a_users_own(user_module: str) -> None:
    assert of(user_module, "exact")(prompt(), "42") == Verdict(True, 1.0)
    assert of(user_module, "exact")(prompt(), "4") == Verdict(False, 0.0)
    assert of(user_module, "partial", half=0.75)(prompt(), "4") == Verdict(False, 0.75)
    assert of(user_module, "partial")(prompt(), "42") == Verdict(True, 1.0)
    assert of(user_module, "full")(prompt(), "42") == Verdict(True, 0.25)
    with pytest.raises(RuntimeError, match="no compiler"):
        of(user_module, "crashes")(prompt(), "42")


@pytest.mark.parametrize("what", [1.5, -0.1, float("nan"), float("inf"), None, "yes", [1], 2])
def test_what_is_no_verdict_is_a_failure(user_module: str, what: object) -> None:
    with pytest.raises(VerifierError, match="expected a bool, a float in"):
        of(user_module, "says", what=what)(prompt(), "42")


def test_verdicts_are_checked_too() -> None:
    for bad in (Verdict(True, 2.0), Verdict(False, float("nan")), Verdict(1, 0.5)):  # type: ignore[arg-type]
        with pytest.raises(VerifierError):
            as_verdict(bad, "v")
    assert as_verdict(1, "v") == Verdict(True, 1.0)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nix:check", "there is no module 'nix'"),
        ("nix.sub:check", "there is no module 'nix'"),
        ("{module}:exakt", "has no 'exakt'; did you mean 'exact'?"),
        ("{module}:CONSTANT", "is the number 3, expected a function"),
        ("{module}.exact", "is not of the form package.module:function"),
        ("{module}:", "is not of the form package.module:function"),
        ("broken:check", "importing broken failed: SyntaxError"),
        ("needy:check", "it needs the module 'not_there_at_all', which is not installed"),
        ("stops:check", "importing stops failed: ZeroDivisionError"),
    ],
)
def test_imports_that_fail_name_the_domain(user_module: str, target: str, says: str) -> None:
    Path("broken.py").write_text("def check(:\n")
    Path("needy.py").write_text("import not_there_at_all\n")
    Path("stops.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError) as error:
        build_verifier(VerifierConfig(target=target.format(module=user_module)), "code", NO_TASK)
    assert says in str(error.value) and str(error.value).startswith("domains.code.verifier: ")


def test_arguments_are_checked_before_the_run(user_module: str) -> None:
    with pytest.raises(ConfigError, match="domains.code.verifier: .*unexpected keyword.*'hlaf'"):
        of(user_module, "partial", hlaf=0.5)
    with pytest.raises(ConfigError, match="missing a required"):
        of(user_module, "says")
    for cfg, says in [
        (VerifierConfig(name="exact_match", args={"stripp": True}), "did you mean 'strip'"),
        (VerifierConfig(name="exact_match", args={"strip": 1}), "expected true or false"),
        (VerifierConfig(name="math_verify", args={"x": 1}), "takes none"),
        (VerifierConfig(name="exact_macth"), "did you mean 'exact_match'"),
        (VerifierConfig(), "needs either name or target"),
        (VerifierConfig(name="exact_match", target="a:b"), "needs either name or target"),
        (VerifierConfig(name="reasoning_gym"), "prompts.task is null"),
    ]:
        with pytest.raises(ConfigError, match=says) as error:
            build_verifier(cfg, "code", NO_TASK)
        assert "domains.code.verifier" in str(error.value)


def test_all_travel_to_another_process(user_module: str, tmp_path: Path) -> None:
    """By name, also to a process that starts elsewhere."""
    tests = [(of(user_module, "partial", half=0.25), prompt(), "4")]
    for name in set(VERIFIERS) - {"lm_eval"}:  # of which each process builds its own
        check = build_verifier(VerifierConfig(name=name), "spell", SPELL)
        tests.append((check, spelled()[0], "x"))
    expected = [check(one, answer) for check, one, answer in tests]
    (tmp_path / "tests.pickle").write_bytes(pickle.dumps((tests, expected)))
    code = (
        "import pickle, sys\n"
        "tests, expected = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert [check(one, answer) for check, one, answer in tests] == expected\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tests.pickle")],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
