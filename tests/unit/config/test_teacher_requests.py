"""How a teacher is asked: a second server, scores that are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mopd.config import Config
from mopd.config.checks import check_config, config_warnings
from mopd.config.schema import TeacherConfig
from mopd.runtime.teacher_actor import client_of
from mopd_teachers.replica import Endpoint

Load = Callable[..., Config]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("hedge_after_s=0", "teachers.code_rl.hedge_after_s must be above 0"),
        ("hedge_after_s=60", "teachers.code_rl.hedge_after_s (60) is not below timeout_s (60)"),
        ("hedge_quantile=0.9", "code_rl.hedge_quantile goes with hedge_after_s"),
        ("cache_mib=-1", "teachers.code_rl.cache_mib must be at least 0"),
    ],
)
def test_what_could_never_work_is_refused(loaded: Load, override: str, says: str) -> None:
    (problem,) = check_config(loaded(f"teachers.code_rl.{override}"))
    assert says in problem


def test_a_second_server_that_is_not_there_is_told(loaded: Load) -> None:
    alone = loaded("teachers.code_rl.hedge_after_s=1")
    assert check_config(alone) == []
    assert any("it has one server" in text for text in config_warnings(alone))
    two = loaded("teachers.math_rl.hedge_after_s=1", "teachers.math_rl.replicas=2")
    assert not any("it has one server" in text for text in config_warnings(two))


def test_the_keys_reach_the_client() -> None:
    config = TeacherConfig(hedge_after_s=1.5, hedge_quantile=0.9, cache_mib=2.0)
    client = client_of("t", config, [Endpoint("http://a")])
    assert (client._hedge_after_s, client._hedge_quantile) == (1.5, 0.9)
    assert client._cache is not None
    assert client._cache._max_bytes == 2 << 20
    plain = client_of("t", TeacherConfig(), [Endpoint("http://a")])
    assert plain._hedge_after_s is None and plain._cache is None


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "network=true",
            "domains.math.verifier.network bounds code of yours (target); exact_match",
        ),
        ("env=[HOME]", "domains.math.verifier.env bounds code of yours"),
        ("memory_gib=8", "domains.math.verifier.memory_gib bounds code of yours"),
        ("memory_gib=0.1", "domains.math.verifier.memory_gib must be at least 0.5"),
    ],
)
def test_bounds_of_a_verifier_that_has_none(loaded: Load, override: str, says: str) -> None:
    problems = check_config(loaded(f"domains.math.verifier.{override}"))
    assert any(says in problem for problem in problems)


def test_a_key_in_the_configuration_is_refused(loaded: Load) -> None:
    (problem,) = check_config(loaded("teachers.math_rl.engine_args={api-key: abc}"))
    assert "engine_args.api-key: use teachers.math_rl.api_key_env for that" in problem


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (None, "'TEACHER_KEY' is not set"),
        ("", "'TEACHER_KEY' is empty"),
        ("se\ncret", "a blank, a line break"),
        ("secret\n", "a line break at its end?"),
        ("sécret", "a letter outside ASCII"),
    ],
)
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(
    loaded: Load, monkeypatch: pytest.MonkeyPatch, key: str | None, says: str
) -> None:
    if key is None:
        monkeypatch.delenv("TEACHER_KEY", raising=False)
    else:
        monkeypatch.setenv("TEACHER_KEY", key)
    (problem,) = check_config(loaded("teachers.math_rl.api_key_env=TEACHER_KEY"))
    assert problem.startswith("teachers.math_rl.api_key_env: ") and says in problem
    assert not key or key not in problem
    monkeypatch.setenv("TEACHER_KEY", "s3cret+/=")
    assert not check_config(loaded("teachers.math_rl.api_key_env=TEACHER_KEY"))
