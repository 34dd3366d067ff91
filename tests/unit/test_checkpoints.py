"""A checkpoint is whole or absent; the newest is found; old ones go."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mopd.checkpoints import find_checkpoints, save_checkpoint
from mopd.errors import ModelError


async def save_student(path: Path) -> None:
    path.mkdir()
    (path / "weights").write_text("w")


def save(run_dir: Path, step: int, keep: int = 2) -> None:
    asyncio.run(
        save_checkpoint(
            run_dir, step, save_student, {"prompts": {"cursor": step}, "credit": {}}, keep=keep
        )
    )


def test_newest_is_found_and_old_ones_are_removed(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(tmp_path, step)
    found = find_checkpoints(tmp_path)
    assert [c.step for c in found] == [10, 15]
    assert found[-1].state() == {"prompts": {"cursor": 15}, "credit": {}}
    assert (found[-1].student / "weights").read_text() == "w"


def test_a_kill_during_a_save_leaves_the_previous_one(tmp_path: Path) -> None:
    save(tmp_path, 5)

    async def killed(path: Path) -> None:
        path.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(save_checkpoint(tmp_path, 10, killed, {"prompts": {}, "credit": {}}, keep=2))
    assert [c.step for c in find_checkpoints(tmp_path)] == [5]
    save(tmp_path, 10)
    assert [c.step for c in find_checkpoints(tmp_path)] == [5, 10]
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 5)
    assert [c.step for c in find_checkpoints(tmp_path)] == [5]


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"step": 4, "prompts": {}})])
def test_a_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    save(tmp_path, 5)
    (checkpoint,) = find_checkpoints(tmp_path)
    (checkpoint.path / "state.json").write_text(text)
    with pytest.raises(ModelError, match="state.json: not a usable checkpoint"):
        checkpoint.state()


def test_no_run_has_no_checkpoints(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path / "nothing") == []
