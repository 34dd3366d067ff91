"""The evaluations of a training run, with fakes for engine, teachers and judge."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mopd.errors import ModelError
from mopd.evaluation.evaluators import HeldOutEvaluator
from mopd.types import Prompt, Rollout, Verdict

SETS = {"math": "math", "aime": "math", "trivia": None}
PROMPTS = {s: [Prompt(f"{s}/{k}", s, "", (k,), f"{k}") for k in range(3)] for s in SETS}


def rollout(key: str, prompt: Prompt, answer: int) -> Rollout:
    return Rollout(key, prompt, (answer, 9), (-0.1, -0.1), 0, "stop")


class Parts:
    """A student that answers right, a teacher that answers 0, and who was asked for what."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.teacher_asked: list[tuple[str, int]] = []

    async def generate(self, requests, *, temperature):
        assert temperature == 0.0
        self.asked += [key for key, _ in requests]
        yield [rollout(key, prompt, prompt.token_ids[0]) for key, prompt in requests]

    async def teacher(self, domain, requests):
        self.teacher_asked.append((domain, len(requests)))
        return [rollout(key, prompt, 0) for key, prompt in requests]

    async def judge(self, rollouts):
        return {
            r.sample_id: Verdict(str(r.response_ids[0]) == r.prompt.answer, 0.5) for r in rollouts
        }


def evaluator(parts: Parts, run_dir: Path, prompts=PROMPTS) -> HeldOutEvaluator:
    return HeldOutEvaluator(
        prompts, parts, parts.teacher, parts, run_dir, lambda *a, **k: None,
        domain_of=SETS.get, decode=lambda ids: f"{ids[0]}",
    )  # fmt: skip


def test_a_general_set_has_no_teacher_and_a_benchmark_has_its_domains(tmp_path):
    parts = Parts()
    teacher = asyncio.run(evaluator(parts, tmp_path).teacher_answers())
    assert parts.teacher_asked == [("math", 3), ("math", 3)]
    assert list(teacher) == ["math", "aime"]
    assert [item.correct for item in teacher["aime"]] == [True, False, False]
    student = asyncio.run(evaluator(parts, tmp_path).student_answers(0))
    assert list(student) == ["math", "aime", "trivia"]
    item = student["trivia"][2]
    assert (item.response, item.lenient, item.format_error) == ("2", True, False)
    assert item.response_ids == [2, 9] and item.score == 0.5


def test_recorded_answers_are_not_asked_again_and_rates_are_by_set(tmp_path):
    parts = Parts()
    first = asyncio.run(evaluator(parts, tmp_path).evaluate_student(20))
    assert first == {"math": 1.0, "aime": 1.0, "trivia": 1.0} and len(parts.asked) == 9
    again = evaluator(parts, tmp_path)
    assert asyncio.run(again.evaluate_student(20)) == first and len(parts.asked) == 9
    assert again.recorded_steps() == [20]
    again.forget_after(10)
    assert again.recorded_steps() == []


def test_answers_to_other_prompts_are_refused(tmp_path):
    asyncio.run(evaluator(Parts(), tmp_path).student_answers(0))
    with pytest.raises(ModelError, match="answers to other held-out prompts"):
        evaluator(Parts(), tmp_path, {"math": PROMPTS["math"][:2]}).load("student", 0)
