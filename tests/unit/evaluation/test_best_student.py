"""Keeping the best student of a run, ending early, and taking both up again after a resume."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mopd.evaluating.best_student import BestStudent, StoppedEarly, ended_early
from mopd.evaluation.evaluators import HeldOutEvaluator
from mopd.evaluation.items import ItemResult
from mopd.evaluation.selection import Selection
from mopd.types import Prompt


def answers(right: int, n: int = 20) -> dict[str, list[ItemResult]]:
    return {"d": [ItemResult(f"d/{k}", k < right, float(k < right), 3, "stop") for k in range(n)]}


class Evaluator(HeldOutEvaluator):
    """The real record keeping; `scores` says how many items the student has right at a step."""

    def __init__(self, run_dir: Path, scores: dict[int, int]) -> None:
        prompts = {"d": [Prompt(f"d/{k}", "d", "", (1,)) for k in range(20)]}
        super().__init__(prompts, None, None, None, run_dir, lambda *a, **k: None)  # type: ignore
        self._scores = scores

    async def evaluate_student(self, step: int):
        self._record("student", step, answers(self._scores[step]))
        return {"d": self._scores[step] / 20}


class Run:
    def __init__(self, run_dir: Path, scores: dict[int, int], patience: int = 0) -> None:
        self.run_dir, self.scores, self.said = run_dir, scores, []
        self.evaluator = Evaluator(run_dir, scores)
        self.best = BestStudent(
            self.evaluator,
            Selection("worst_headroom", patience, {"d": ["d"]}, answers(10), answers(20)),
            run_dir,
            save=self.save,
            warn=self.said.append,
            note=self.said.append,
            recent=lambda: [],
            weights={"d": 1.0},
        )
        self.step = 0

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(self.step))

    def evaluate(self, *steps: int) -> None:
        for self.step in steps:
            asyncio.run(self.best.evaluate_student(self.step))

    def kept(self) -> tuple[str, int]:
        record = json.loads((self.run_dir / "best.json").read_text())
        return (self.run_dir / "best" / "student" / "weights").read_text(), record["step"]


SCORES = {10: 14, 20: 18, 30: 16, 40: 15, 50: 19}


def test_the_best_is_kept_whatever_comes_after(tmp_path):
    run = Run(tmp_path, SCORES)
    run.evaluate(10, 20, 30)
    assert run.kept() == ("20", 20)
    line = run.best.finish(40, answers(15), early=False)
    assert line and "step 20: worst headroom 0.800" in line and "final one is at 0.500" in line
    assert ended_early(tmp_path) is None


def test_a_final_student_that_is_the_best_needs_no_second_copy(tmp_path):
    run = Run(tmp_path, SCORES)
    run.evaluate(10, 20)
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "weights").write_text("final")
    assert run.best.finish(50, answers(19), early=False) is None
    assert run.kept() == ("final", 50) and (tmp_path / "best" / "student").is_symlink()


def test_of_equals_the_final_student_is_the_best(tmp_path):
    run = Run(tmp_path, SCORES)
    run.evaluate(10, 20)
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "weights").write_text("final")
    assert run.best.finish(30, answers(18), early=False) is None and run.kept() == ("final", 30)


def test_patience_ends_the_run_and_says_why(tmp_path):
    run = Run(tmp_path, SCORES, patience=2)
    run.evaluate(10, 20, 30)
    with pytest.raises(StoppedEarly) as stopped:
        run.evaluate(40)
    assert stopped.value.step == 40
    assert "no better student for 2 evaluations" in run.said[-1]
    run.best.finish(40, answers(15), early=True)
    assert ended_early(tmp_path) == 40


def test_a_resumed_run_decides_as_if_it_had_not_stopped(tmp_path):
    first = Run(tmp_path, SCORES, patience=2)
    first.evaluate(10, 20, 30)
    again = Run(tmp_path, SCORES, patience=2)
    again.best.begin(first_step=30)
    with pytest.raises(StoppedEarly):
        again.evaluate(40)
    assert again.kept() == ("20", 20)


def test_a_best_of_steps_that_are_made_anew_is_forgotten(tmp_path):
    first = Run(tmp_path, SCORES)
    first.evaluate(10)
    again = Run(tmp_path, SCORES)
    again.evaluator.forget_after(0)
    again.best.begin(first_step=0)
    assert not (tmp_path / "best").exists()


def test_a_best_that_later_steps_replaced_is_looked_for_anew(tmp_path):
    first = Run(tmp_path, SCORES)
    first.evaluate(10, 20)  # killed here; the last checkpoint is of step 10
    again = Run(tmp_path, {20: 12})
    again.evaluator.forget_after(10)
    again.best.begin(first_step=10)
    assert not (tmp_path / "best").exists()  # what was kept is of a step that is made anew
    again.evaluate(20)
    assert again.kept() == ("20", 20)


def test_forgetting_is_told_once(tmp_path):
    run = Run(tmp_path, {10: 2, 20: 1})
    run.evaluate(10, 20)
    assert len([line for line in run.said if "forgotten" in line]) == 1
