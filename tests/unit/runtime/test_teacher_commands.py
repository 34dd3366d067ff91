"""`mopd teachers serve|probe|list`: what is wrong with a teacher is told, and no secret is."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.cli import main

DEMO = Path(__file__).parents[3] / "demo/models"
CONFIG = f"""
name: x
student: {{model: {DEMO / "base"}}}
rollout: {{max_response_tokens: 16}}
teachers:
  nobody: {{}}
  lost: {{model: {DEMO / "nowhere"}}}
  locked: {{model: {DEMO / "teacher_caesar"}, api_key_env: TEACHER_KEY}}
  away: {{endpoints: ["http://me:sekret@127.0.0.1:9"], api_key_env: TEACHER_KEY}}
  fine: {{model: {DEMO / "teacher_caesar"}}}
domains: {{d: {{teacher: fine, prompts: {{task: spell_backward}}}}}}
train: {{steps: 1, prompts_per_step: 1}}
"""


@pytest.mark.parametrize(
    ("command", "key", "says"),
    [
        (["serve", "nobody"], "k", "teachers.nobody has neither model"),
        (["serve", "lost"], "k", "teachers.lost.model: "),
        (["serve", "locked"], None, "'TEACHER_KEY' is not set"),
        (["serve", "locked"], "", "'TEACHER_KEY' is empty"),  # it would be open to everybody
        (["serve", "locked"], "sekret\n", "is there a line break at its end?"),
        (["serve", "fine", "--port", "70000"], "k", "port 70000 is not within 0..65535"),
        (["serve", "fine", "--host", "no.such.host.invalid"], "k", "must be an address of this"),
        (["probe", "away"], "k", "'http://...@127.0.0.1:9' has a user or a password"),
        (["list"], "", "away: whatever its servers serve"),
    ],
)
def test_what_is_wrong_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    key: str | None,
    says: str,
) -> None:
    """Of this teacher alone: the others of the configuration may be as wrong as they like."""
    monkeypatch.chdir(tmp_path)
    if key is None:
        monkeypatch.delenv("TEACHER_KEY", raising=False)
    else:
        monkeypatch.setenv("TEACHER_KEY", key)
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG)
    action, *rest = command
    code = main(["teachers", action, str(config), *rest])
    said = capsys.readouterr()
    assert code == (0 if action == "list" else 1)
    assert says in said.out + said.err and "sekret" not in said.out + said.err
