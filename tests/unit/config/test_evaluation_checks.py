"""What the evaluation section refuses: sets that cannot be told apart, keys without effect."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mopd.config.checks import check_config
from mopd.config.schema import Config, EvaluationSetConfig, PromptsConfig

Load = Callable[..., Config]


def with_set(config: Config, kind: str, name: str, **changes: object) -> Config:
    math = config.domains["math"]
    given = {"prompts": math.prompts, "verifier": math.verifier, **changes}
    getattr(config.evaluation, kind)[name] = EvaluationSetConfig(**given)  # type: ignore[arg-type]
    return config


def test_a_general_set_and_a_benchmark_are_fine(loaded: Load) -> None:
    config = with_set(loaded(), "general", "common")
    assert check_config(with_set(config, "benchmarks", "aime", domain="math")) == []


@pytest.mark.parametrize(
    ("kind", "name", "changes", "said"),
    [
        ("general", "math", {}, "domains has that name already"),
        ("general", "common", {"verifier": None}, "could not be judged"),
        ("general", "common", {"domain": "math"}, "goes under evaluation.benchmarks"),
        ("general", "common", {"prompts": PromptsConfig()}, "prompts needs jsonl"),
        ("benchmarks", "aime", {}, "evaluation.benchmarks.aime.domain: None is not one of"),
        ("benchmarks", "aime", {"domain": "mat"}, "did you mean 'math'?"),
        ("general", "a b", {}, "the set name 'a b'"),
    ],
)
def test_a_bad_set_is_named(loaded: Load, kind: str, name: str, changes: dict, said: str) -> None:
    problems = check_config(with_set(loaded(), kind, name, **changes))
    assert any(said in each for each in problems), problems


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pass_at": [1, 8]}, "evaluation.pass_at has no effect while evaluation.samples is 0"),
        ({"temperature": 0.5}, "evaluation.temperature has no effect"),
        ({"samples": 4, "pass_at": [1, 8]}, "[8] not within 1 and evaluation.samples (4)"),
        ({"samples": 4, "pass_at": [0]}, "[0] not within"),
        ({"patience": 2, "every": 0}, "while evaluation.every is 0"),
        ({"patience": 2, "keep_best": "off"}, "needs evaluation.keep_best"),
    ],
)
def test_keys_without_effect_are_refused(loaded: Load, changes: dict, said: str) -> None:
    config = loaded()
    for name, value in changes.items():
        setattr(config.evaluation, name, value)
    assert any(said in each for each in check_config(config)), check_config(config)


def test_teachers_answers_are_for_supervised_baselines_only(loaded: Load) -> None:
    config = loaded()
    config.rollout.source = "teachers"
    config.rollout.temperature = 0.7
    config.objective.loss.name = "dppo_tv"
    config.objective.kl.kind = "k2"
    said = "\n".join(check_config(config))
    for part in (
        "objective.teacher.weight to 0",
        "truncation.kind",
        "rollout.temperature must be",
        "dppo_tv drops tokens by the distance",
        "objective.kl.kind k2 estimates",
    ):
        assert part in said, said
