"""Where a run's checkpoints lie, and how one is written whole or not at all.

    RUN/checkpoints/step_000050/student/    what `Student.save` wrote
    RUN/checkpoints/step_000050/state.json  finished steps, position in the prompts

A checkpoint is written beside its place and renamed into it: a kill in the middle leaves the
previous one whole and a ``.partial`` folder that the next save removes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.errors import ModelError

_NAME = re.compile(r"step_(\d{6,})")


PARTS = ("prompts", "credit")
"""What a checkpoint holds beside the student: the prompt mixture and the advantages' memory."""


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


async def save_checkpoint(
    run_dir: Path,
    step: int,
    save_student: Callable[[Path], Awaitable[None]],
    state: dict[str, Any],
    *,
    keep: int,
) -> Checkpoint:
    """Write the checkpoint of `step` finished steps, then remove all but the newest `keep`.

    state: part -> its `state_dict`, plain JSON, for each of PARTS.
    """
    assert set(state) == set(PARTS), state
    folder = run_dir / "checkpoints"
    for leftover in folder.glob("*.partial"):
        shutil.rmtree(leftover)
    final = folder / f"step_{step:06d}"
    partial = folder / f"{final.name}.partial"
    partial.mkdir(parents=True)
    await save_student(partial / "student")
    (partial / "state.json").write_text(json.dumps({"step": step, **state}))
    if final.exists():  # the same step again, after a resume: the new one is as good
        shutil.rmtree(final)
    partial.rename(final)
    for old in find_checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old.path)
    return Checkpoint(final, step)
