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


@dataclass(frozen=True)
class Checkpoint:
    """One finished checkpoint."""

    path: Path
    step: int
    """Finished steps, also the version of its weights."""

    @property
    def student(self) -> Path:
        return self.path / "student"

    def prompts_state(self) -> dict[str, Any]:
        """What the prompt mixture's `state_dict` gave.

        Raises:
            ModelError: the state file is missing or damaged.
        """
        path = self.path / "state.json"
        try:
            state = json.loads(path.read_text())
            if state["step"] != self.step:
                raise ValueError(f"says step {state['step']}")
            return state["prompts"]
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
    prompts_state: dict[str, Any],
    *,
    keep: int,
) -> Checkpoint:
    """Write the checkpoint of `step` finished steps, then remove all but the newest `keep`."""
    folder = run_dir / "checkpoints"
    for leftover in folder.glob("*.partial"):
        shutil.rmtree(leftover)
    final = folder / f"step_{step:06d}"
    partial = folder / f"{final.name}.partial"
    partial.mkdir(parents=True)
    await save_student(partial / "student")
    (partial / "state.json").write_text(json.dumps({"step": step, "prompts": prompts_state}))
    if final.exists():  # the same step again, after a resume: the new one is as good
        shutil.rmtree(final)
    partial.rename(final)
    for old in find_checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old.path)
    return Checkpoint(final, step)
