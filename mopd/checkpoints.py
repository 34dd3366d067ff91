"""Where a run's checkpoints lie, and how one is written whole or not at all.

    RUN/checkpoints/step_000050/student/    what `Student.save` wrote
    RUN/checkpoints/step_000050/state.json  finished steps, position in the prompts

A checkpoint is written beside its place and renamed into it: a kill in the middle leaves the
previous one whole and a ``.partial`` folder that the next save removes. Older ones are removed
once it has its name.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mopd.errors import ModelError

_NAME = re.compile(r"step_(\d{6,})")
_REPLACED = ".old.partial"
"""Behind the name of a checkpoint while a newer one of the same step takes its place."""


PARTS = ("prompts", "credit")
"""What a checkpoint holds beside the student: the prompt mixture and the advantages' memory."""

RESCUE_ANSWER_S = 30.0
"""How long the student may take to answer after an error."""


@dataclass(frozen=True)
class Checkpoint:
    """One finished checkpoint."""

    path: Path
    step: int
    """Finished steps, also the version of its weights."""

    @property
    def student(self) -> Path:
        return self.path / "student"

    def state(self) -> dict[str, Any]:
        """The `state_dict`s that were saved beside the student, by part.

        Raises:
            ModelError: the state file is missing or damaged.
        """
        path = self.path / "state.json"
        try:
            state = json.loads(path.read_text())
            if state["step"] != self.step:
                raise ValueError(f"says step {state['step']}")
            return {part: state[part] for part in PARTS}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{path}: not a usable checkpoint ({error}); remove {self.path} to go on from "
                "the one before"
            ) from error


def find_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Finished checkpoints, oldest first."""
    folder = run_dir / "checkpoints"
    found = [
        Checkpoint(path, int(match.group(1)))
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def put_back_replaced(run_dir: Path) -> None:
    """Give a checkpoint its name again where a kill fell between its losing it and a newer one of
    the same step taking it. Only for who holds the run's folder."""
    for previous in (run_dir / "checkpoints").glob(f"step_*{_REPLACED}"):
        final = previous.with_name(previous.name.removesuffix(_REPLACED))
        if not final.exists():
            previous.rename(final)


class SavedStudent(Protocol):
    """Whoever writes the student's part."""

    async def save(self, directory: Path) -> None:
        """`directory` is whole, and on the disk, when this returns."""
        ...

    async def begin_save(self, directory: Path) -> None:
        """Returns once what is saved has been copied, so that training may go on."""
        ...

    async def save_written(self) -> bool:
        """Whether `finish_save` would not have to wait."""
        ...

    async def finish_save(self) -> float:
        """Wait until what `begin_save` began is whole; returns the seconds that writing took.

        Raises ModelError where it could not be written.
        """
        ...


@dataclass
class _Saving:
    """A checkpoint that is being made."""

    step: int
    began: float
    """As time.monotonic() tells it."""
    blocked_s: float = 0.0
    """Seconds in which nothing else was done."""


class CheckpointWriter:
    """Makes a run's checkpoints, at once or beside the steps that follow.

    Args:
        keep: how many of the newest are kept.
        beside_training: the student copies itself and writes while training goes on. Whoever goes
            on calls `progress` between steps, and `finish` before the run ends.
    """

    def __init__(
        self, run_dir: Path, student: SavedStudent, *, keep: int, beside_training: bool = False
    ) -> None:
        self._run_dir, self._student = run_dir, student
        self._folder = run_dir / "checkpoints"
        self._keep, self._beside_training = keep, beside_training
        self._saving: _Saving | None = None
        self._metrics: dict[str, float] = {}

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Make the checkpoint of `step` finished steps; with `beside_training`, begin it.

        state: part -> its `state_dict`, plain JSON, for each of PARTS. It is written now.
        Raises ModelError where this one, or the one before it, cannot be written.
        """
        assert set(state) == set(PARTS), state
        await self.finish()
        saving = _Saving(step, time.monotonic())
        with _counted(saving):
            for leftover in self._folder.glob("*.partial"):
                shutil.rmtree(leftover)
            partial = self._partial(step)
            partial.mkdir(parents=True)
            with (partial / "state.json").open("w") as file:
                file.write(json.dumps({"step": step, **state}))
                file.flush()
                os.fsync(file.fileno())
            if self._beside_training:
                await self._student.begin_save(partial / "student")
            else:
                await self._student.save(partial / "student")
        if self._beside_training:
            self._saving = saving
        else:
            with _counted(saving):
                self._put_in_place(step)
            self._metrics = _metrics(saving)

    async def progress(self) -> dict[str, float]:
        """Without waiting: end the checkpoint that is being written, if it can be ended.

        Returns, of one that is being written, ``checkpoint/writing``, its step; of one that is
        whole since the last call, ``checkpoint/step`` and in seconds ``checkpoint/blocked_s``
        (training waited) and, written beside training, ``checkpoint/write_s`` (the slowest rank)
        and ``checkpoint/whole_s`` (from its beginning until it was whole).
        Raises ModelError where it could not be written.
        """
        if self._saving is not None:
            with _counted(self._saving):
                written = await self._student.save_written()
            if not written:
                return {"checkpoint/writing": float(self._saving.step)}
            await self.finish()
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def finish(self) -> str | None:
        """Wait for the checkpoint that is being written; a line about it, if there was one.

        Raises ModelError where it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        with _counted(saving):
            write_s = await self._student.finish_save()
            self._put_in_place(saving.step)
        self._metrics = _metrics(saving) | {
            "checkpoint/write_s": write_s,
            "checkpoint/whole_s": time.monotonic() - saving.began,
        }
        return f"checkpoint of step {saving.step}: written in {write_s:.1f} s beside training"

    async def rescue(self) -> str | None:
        """After an error of something else: end what is being written, so that it is not lost.

        Returns a line that says what is lost, where the student does not answer any more.
        """
        if self._saving is None:
            return None
        step = self._saving.step
        try:
            # Ranks that hang in the step that failed would have this wait for ever; those that
            # answer are only as slow as their disk.
            await asyncio.wait_for(self._student.save_written(), RESCUE_ANSWER_S)
            await self.finish()
        except Exception as error:
            self._saving = None
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            return f"the checkpoint of step {step}, which was being written, is lost: {said}"
        return None

    def _partial(self, step: int) -> Path:
        return self._folder / f"{_name(step)}.partial"

    def _put_in_place(self, step: int) -> None:
        final, previous = self._folder / _name(step), self._folder / f"{_name(step)}{_REPLACED}"
        if final.exists():  # the same step again, after a resume: the new one is as good
            final.rename(previous)
        self._partial(step).rename(final)
        shutil.rmtree(previous, ignore_errors=True)
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # its name, before others are removed
        finally:
            os.close(descriptor)
        for old in find_checkpoints(self._run_dir)[: -self._keep]:
            shutil.rmtree(old.path)


def _name(step: int) -> str:
    return f"step_{step:06d}"


@contextmanager
def _counted(saving: _Saving) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        saving.blocked_s += time.monotonic() - began


def _metrics(saving: _Saving) -> dict[str, float]:
    return {"checkpoint/step": float(saving.step), "checkpoint/blocked_s": saving.blocked_s}
