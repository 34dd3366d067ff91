"""The evaluations of a training run: the best student is kept, and the run may end early.

RUN/best/student     Hugging Face folder of the best evaluated student
RUN/best.json        its step, its value, by what it was chosen, and whether the run ended early
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from mopd.evaluation.evaluators import HeldOutEvaluator
from mopd.evaluation.items import Answers
from mopd.evaluation.selection import Selection, forgetting_warnings, starvation_warnings

BEST = "best.json"


class StoppedEarly(Exception):
    """No better student for `evaluation.patience` evaluations; `step` steps are finished."""

    def __init__(self, step: int) -> None:
        super().__init__(f"after step {step}")
        self.step = step


class BestStudent:
    """An `Evaluator` that keeps the best student.

    Args:
        save: writes the student as it is now into a folder, in Hugging Face's format.
        warn: told of forgetting and starving domains, once each.
        note: told of a new best, in one line.
        recent: the last steps' metrics.
        weights: domain -> share of the prompts drawn.
    """

    def __init__(
        self,
        evaluator: HeldOutEvaluator,
        selection: Selection,
        run_dir: Path,
        *,
        save: Callable[[Path], Awaitable[None]],
        warn: Callable[[str], None],
        note: Callable[[str], None],
        recent: Callable[[], Sequence[Mapping[str, float | None]]],
        weights: Mapping[str, float],
    ) -> None:
        self._evaluator, self._selection, self._run_dir = evaluator, selection, run_dir
        self._save, self._warn, self._note = save, warn, note
        self._recent, self._weights = recent, weights
        self._warned: set[str] = set()

    def begin(self, first_step: int) -> None:
        """Take up the evaluations that a resumed run has made before."""
        for step in self._evaluator.recorded_steps():
            if 0 < step <= first_step and (answers := self._evaluator.load("student", step)):
                self._selection.add(step, answers)
        if self._selection.best is None or self._selection.best != _kept(self._run_dir):
            # What is kept is of steps that are made anew, and may have replaced what was best.
            self._selection.values.clear()
            shutil.rmtree(self._run_dir / "best", ignore_errors=True)

    async def evaluate_student(self, step: int) -> Mapping[str, float]:
        """Evaluate, keep the student if it is the best so far.

        Raises:
            StoppedEarly: patience is at its end.
        """
        rates = await self._evaluator.evaluate_student(step)
        answers = self._evaluator.load("student", step)
        assert answers is not None
        for line in self._told(step, answers):
            self._warn(line)
        if self._selection.add(step, answers):
            await self._keep(step)
        if self._selection.exhausted:
            self._note(
                f"no better student for {self._selection.patience} evaluations: the run ends "
                f"after step {step}; best is {self._selection.describe_best()}"
            )
            raise StoppedEarly(step)
        return rates

    def finish(self, step: int, answers: Answers, *, early: bool) -> str | None:
        """The final student's evaluation counts too, and first among equals; one line where an
        earlier one was better."""
        self._selection.add(step, answers)
        found, values = self._selection.best, self._selection.values
        if found is None:
            return None
        if step in values and values[step][0] >= values[found][0]:
            best = self._run_dir / "best"
            shutil.rmtree(best, ignore_errors=True)
            best.mkdir()
            (best / "student").symlink_to(Path("..") / "student", target_is_directory=True)
            self._write(step, early)
            return None
        self._write(found, early)
        if step not in values:
            return None
        value, domain = values[step]
        return (
            f"an earlier student was better: {self._selection.describe_best()}; the final one is "
            f"at {value:.3f} ({domain}). It is in {self._run_dir / 'best' / 'student'}"
        )

    async def _keep(self, step: int) -> None:
        partial, best = self._run_dir / "best.partial", self._run_dir / "best"
        shutil.rmtree(partial, ignore_errors=True)
        await self._save(partial / "student")
        shutil.rmtree(best, ignore_errors=True)
        partial.rename(best)
        self._write(step, False)
        self._note(f"best student so far: {self._selection.describe_best()}")

    def _write(self, step: int, early: bool) -> None:
        value, domain = self._selection.values[step]
        record = {
            "step": step,
            "criterion": self._selection.criterion,
            "value": value,
            "domain": domain,
            "ended_early_after": max(self._selection.values) if early else None,
            "values": {str(k): v[0] for k, v in sorted(self._selection.values.items())},
        }
        (self._run_dir / BEST).write_text(json.dumps(record, indent=1) + "\n")

    def _told(self, step: int, answers: Answers) -> list[str]:
        """Warnings whose subject and kind were not told before."""
        lines = [
            *forgetting_warnings(step, self._selection.base, answers),
            *starvation_warnings(self._recent(), self._weights),
        ]
        new = {": ".join(line.split(": ")[:2]).split(" after")[0]: line for line in lines}
        told = [line for key, line in new.items() if key not in self._warned]
        self._warned |= set(new)
        return told


def ended_early(run_dir: Path) -> int | None:
    """The step after which the run ended for want of a better student, or None."""
    return _recorded(run_dir, "ended_early_after")


def _kept(run_dir: Path) -> int | None:
    """The step of the student in ``best``, or None."""
    return _recorded(run_dir, "step") if (run_dir / "best" / "student").is_dir() else None


def _recorded(run_dir: Path, key: str) -> int | None:
    try:
        return json.loads((run_dir / BEST).read_text())[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None
