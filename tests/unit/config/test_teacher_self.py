"""`teacher: self`: the student as it starts, frozen, for a domain where nothing may be lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mopd.config import Config, load_config, save_config
from mopd.config.checks import check_config

Load = Callable[..., Config]


def test_a_domain_whose_teacher_is_self_needs_no_entry(loaded: Load, tmp_path: Path) -> None:
    config = loaded("domains.code.teacher=self", "student.dtype=bfloat16")
    assert config.teachers["self"].model == config.student.model == "base"
    assert config.teachers["self"].dtype == "bfloat16"
    assert check_config(config) == []
    save_config(config, tmp_path / "saved.yaml")
    assert load_config([tmp_path / "saved.yaml"]) == config


def test_its_server_is_set_like_any_other_but_its_model_is_the_student(loaded: Load) -> None:
    config = loaded("domains.code.teacher=self", "teachers.self.concurrency=8")
    assert config.teachers["self"].model == "base" and config.teachers["self"].concurrency == 8
    for wrong in ("teachers.self.model=teacher", "teachers.self.endpoints=[http://a:1]"):
        problems = check_config(loaded("domains.code.teacher=self", wrong))
        assert len(problems) == 1 and "frozen student" in problems[0], problems


def test_a_run_without_it_starts_nothing_more(loaded: Load) -> None:
    assert "self" not in loaded().teachers
