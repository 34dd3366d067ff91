"""A checkpoint is whole or absent; the newest is found; old ones go."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mopd.checkpoints import CheckpointWriter, find_checkpoints, put_back_replaced
from mopd.errors import ModelError


class Student:
    """Writes one file, at once or when its disk is ready."""

    def __init__(self) -> None:
        self.weights = "w"
        self.disk = True
        self.fault: BaseException | None = None
        self.answers = True
        self._begun: tuple[Path, str] | None = None

    async def save(self, directory: Path) -> None:
        directory.mkdir()
        if self.fault is not None:
            raise self.fault
        (directory / "weights").write_text(self.weights)

    async def begin_save(self, directory: Path) -> None:
        assert self._begun is None
        directory.parent.joinpath(".student.partial").mkdir()
        self._begun = directory, self.weights

    async def save_written(self) -> bool:
        if not self.answers:
            await asyncio.sleep(60)
        return self.disk

    async def finish_save(self) -> float:
        assert self._begun is not None and (self.disk or self.fault)
        (directory, weights), self._begun = self._begun, None
        if self.fault is not None:
            raise self.fault
        directory.parent.joinpath(".student.partial").rename(directory)
        (directory / "weights").write_text(weights)
        return 2.5


def writer(run_dir: Path, student: Student | None = None, *, beside: bool = False) -> Any:
    return CheckpointWriter(run_dir, student or Student(), keep=2, beside_training=beside)


def state(cursor: int = 0) -> dict[str, Any]:
    return {"prompts": {"cursor": cursor}, "credit": {}}


def save(run_dir: Path, *steps: int) -> None:
    async def each() -> None:
        saving = writer(run_dir)
        for step in steps:
            await saving.save(step, state(step))

    asyncio.run(each())


def found(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in find_checkpoints(run_dir)]


def test_newest_is_found_and_old_ones_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 5, 10, 15)
    assert found(tmp_path) == [10, 15]
    last = find_checkpoints(tmp_path)[-1]
    assert last.state() == state(15)
    assert (last.student / "weights").read_text() == "w"


def test_a_kill_during_a_save_leaves_the_previous_one(tmp_path: Path) -> None:
    save(tmp_path, 5)
    student = Student()
    student.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(writer(tmp_path, student).save(10, state()))
    assert found(tmp_path) == [5]
    save(tmp_path, 10)
    assert found(tmp_path) == [5, 10]
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    save(tmp_path, 5, 5)
    assert found(tmp_path) == [5]
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def test_a_kill_while_the_same_step_replaces_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 5)
    renames: list[Path] = []
    rename = Path.rename

    def killed_at_the_second(self: Path, target: Path) -> Path:
        renames.append(self)
        if len(renames) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 5)
    monkeypatch.setattr(Path, "rename", rename)
    assert found(tmp_path) == []
    put_back_replaced(tmp_path)
    assert found(tmp_path) == [5] and find_checkpoints(tmp_path)[0].state() == state(5)
    put_back_replaced(tmp_path)
    save(tmp_path, 6)
    assert found(tmp_path) == [5, 6]
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def test_a_checkpoint_made_at_once_says_how_long_training_waited(tmp_path: Path) -> None:
    async def run() -> None:
        saving = writer(tmp_path)
        assert await saving.progress() == {}
        await saving.save(5, state())
        metrics = await saving.progress()
        assert metrics.keys() == {"checkpoint/step", "checkpoint/blocked_s"}
        assert metrics["checkpoint/step"] == 5 and 0 < metrics["checkpoint/blocked_s"] < 5
        assert await saving.progress() == {}  # told once
        assert await saving.finish() is None

    asyncio.run(run())


def test_beside_training_the_state_is_that_of_the_step_that_was_saved(tmp_path: Path) -> None:
    async def run() -> None:
        student = Student()
        saving = writer(tmp_path, student, beside=True)
        cursor = state(5)
        student.disk = False
        await saving.save(5, cursor)
        cursor["prompts"]["cursor"] = 6
        student.weights = "of step 6"
        assert await saving.progress() == {"checkpoint/writing": 5.0}
        assert found(tmp_path) == []
        student.disk = True
        metrics = await saving.progress()
        assert metrics["checkpoint/step"] == 5 and metrics["checkpoint/write_s"] == 2.5
        assert 0 < metrics["checkpoint/blocked_s"] <= metrics["checkpoint/whole_s"]
        (checkpoint,) = find_checkpoints(tmp_path)
        assert checkpoint.state() == state(5)
        assert (checkpoint.student / "weights").read_text() == "w"

    asyncio.run(run())


def test_older_checkpoints_stay_until_the_new_one_is_whole(tmp_path: Path) -> None:
    async def run() -> None:
        student = Student()
        saving = writer(tmp_path, student, beside=True)
        for step in (5, 10, 15):
            await saving.save(step, state(step))  # waits for the one before it
            assert found(tmp_path) == [5, 10][: step // 5 - 1]
        assert await saving.finish() == "checkpoint of step 15: written in 2.5 s beside training"
        assert found(tmp_path) == [10, 15]

    asyncio.run(run())


def test_an_error_of_the_write_is_told_at_the_next_step_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        save_first = writer(tmp_path)
        await save_first.save(5, state(5))
        student = Student()
        saving = writer(tmp_path, student, beside=True)
        await saving.save(10, state(10))
        student.fault = ModelError("step_000010: rank 1 could not write it (No space left).")
        with pytest.raises(ModelError, match="rank 1 could not write it"):
            await saving.progress()
        assert await saving.rescue() is None  # it has been told
        assert found(tmp_path) == [5]
        student.fault = None
        await saving.save(10, state(10))
        await saving.finish()
        assert found(tmp_path) == [5, 10]
        assert not list((tmp_path / "checkpoints").glob("*.partial"))

    asyncio.run(run())


def test_after_an_error_of_the_run_what_is_being_written_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        student = Student()
        saving = writer(tmp_path, student, beside=True)
        await saving.save(5, state(5))
        assert await saving.rescue() is None
        assert found(tmp_path) == [5]
        await saving.save(10, state(10))
        student.answers = False  # its ranks hang in the step that failed
        lost = await saving.rescue()
        assert lost == "the checkpoint of step 10, which was being written, is lost: TimeoutError"
        assert found(tmp_path) == [5]

    monkeypatch.setattr("mopd.checkpoints.RESCUE_ANSWER_S", 0.05)
    asyncio.run(run())


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"step": 4, "prompts": {}})])
def test_a_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    save(tmp_path, 5)
    (checkpoint,) = find_checkpoints(tmp_path)
    (checkpoint.path / "state.json").write_text(text)
    with pytest.raises(ModelError, match="state.json: not a usable checkpoint"):
        checkpoint.state()


def test_no_run_has_no_checkpoints(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path / "nothing") == []
