"""What a value of another type explains of the faults found after it, and what it does not."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mopd.config._yaml import KeyPath
from mopd.config.checks import check_config
from mopd.config.fitting import plain_type
from mopd.config.load import load_config
from mopd.config.schema import Config, DomainConfig, TeacherConfig
from mopd.config.unread import Unread
from mopd.errors import ConfigError

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def told(*paths: Path, overrides: list[str] | None = None) -> list[str]:
    unread = Unread()
    config = load_config(paths, overrides or [], unread)
    return [*unread.texts, *(text for text in check_config(config) if not unread.explains(text))]


def keys_of(kind: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    yield path, kind
    if dataclasses.is_dataclass(kind):
        for name, each in typing.get_type_hints(kind).items():
            yield from keys_of(plain_type(each), (*path, name))


ENTANGLED = {
    "domains", "teachers", "student", "student.model", "student.parallel.dp", "train.steps",
    "rollout.max_response_tokens", "teachers.backward.model", "domains.backward",
    "domains.backward.prompts.task",
}  # fmt: skip
"""Keys of the quickstart whose defaults make other faults."""


def test_a_value_of_another_type_anywhere_is_one_fault(tmp_path: Path) -> None:
    """Its default in its place makes no other. (Those, and every sixth key of the schema.)"""
    tried = list(keys_of(Config, ()))[1:]
    tried += keys_of(TeacherConfig, ("teachers", "backward"))
    tried += keys_of(DomainConfig, ("domains", "backward"))
    chosen = [each for i, each in enumerate(tried) if ".".join(each[0]) in ENTANGLED or i % 6 == 0]
    assert len(chosen) > len(ENTANGLED) + 20
    runs = [([QUICKSTART], path, kind) for path, kind in chosen]
    recipe = [QUICKSTART, ROOT / "configs/recipes/dapo.yaml"]
    runs.append((recipe, ("objective", "loss", "name"), str))
    for files, path, kind in runs:
        value: Any = 3.5 if kind is dict or typing.get_origin(kind) in (dict, list) else [[1]]
        for name in reversed(path):
            value = {name: value}
        (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(value))
        found = told(*files, tmp_path / "wrong.yaml")
        assert len(found) == 1 and f"{'.'.join(path)}: expected " in found[0], found


def test_it_hides_no_fault_that_has_nothing_to_do_with_it() -> None:
    wrong = ["train.steps=many", "student.dtype=int3", "rollout.temperature=-1", "seed=x", "sed=1"]
    found = told(QUICKSTART, overrides=wrong)
    for start in ("train.steps: expected", "seed: expected", "unknown key 'sed'", "student.dtype"):
        assert [text for text in found if start in text], start
    assert len(found) == 5 and any(text.startswith("rollout.temperature") for text in found)


def test_what_is_missing_is_told_with_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "name: a\nstudent: {model: [x]}\nrollout: {}\ntrain: {prompts_per_step: '${name}'}\n"
        "teachers: {t: {endpoints: [http://a:1, 2]}}\ndomains: {d: {held_out: 5}}\n"
    )
    found = told(tmp_path / "a.yaml")
    for text in (
        "student.model: expected text, got a list",
        "teachers.t.endpoints.1: expected text",
        "train.prompts_per_step: While dereferencing",
        *(
            f"these keys have no default and must be given: {key}"
            for key in ("domains.d.teacher", "rollout.max_response_tokens", "train.steps")
        ),
        "domains.d.prompts needs jsonl",
    ):
        assert [each for each in found if text in each], (text, found)
    assert len(found) == 7, found
    with pytest.raises(ConfigError, match="2 problems"):
        load_config([tmp_path / "a.yaml"])
