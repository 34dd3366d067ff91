"""Warnings before the first step name the numbers and what to do."""

from __future__ import annotations

from mopd.evaluation.beforehand import teacher_warnings, verifier_warnings
from mopd.evaluation.items import ItemResult


def answers(right: int, n: int = 200, *, text: str = "") -> list[ItemResult]:
    return [
        ItemResult(f"d/{k}", k < right, float(k < right), 3, "stop", f"{text}{k}") for k in range(n)
    ]


def warned(base: int, teacher: int) -> list[str]:
    return teacher_warnings(
        {"d": answers(base), "general": answers(50)},
        {"d": answers(teacher)},
        student_model="models/base",
        teacher_of={"d": "expert", "general": None},
    )


def test_a_clearly_better_teacher_is_no_reason_to_warn():
    assert warned(130, 197) == []


def test_a_teacher_under_the_base_is_named_with_the_numbers_and_the_way_out():
    (line,) = warned(194, 170)
    assert "d: teacher expert is not clearly better" in line
    assert "85.0% of 200 held-out prompts, the base 97.0%" in line
    assert "down to it" in line and "difference -12.0 points" in line
    assert "teachers.self.model=models/base domains.d.teacher=self" in line


def test_a_teacher_that_is_better_by_chance_is_not_clearly_better():
    base = answers(100)
    theirs = [
        ItemResult(f"d/{k}", (k + 60) % 200 < 104, 0.0, 3, "stop", str(k)) for k in range(200)
    ]
    lines = teacher_warnings(
        {"d": base}, {"d": theirs}, student_model="m", teacher_of={"d": "expert"}
    )
    assert len(lines) == 1 and "gains nothing that can be measured" in lines[0]


def test_a_base_near_zero_is_a_warning_of_its_own():
    (line,) = warned(8, 190)
    assert "the base is near 0" in line and "the base 4.0%" in line


def test_a_verifier_that_always_says_the_same():
    always = {"base": {"d": answers(200, text="a")}, "teacher": {"d": answers(200, text="b")}}
    (line,) = verifier_warnings(always)
    assert "every answer of 2 models was judged right" in line and "too easy" in line
    (line,) = verifier_warnings({w: {"d": answers(0, text=w)} for w in ("base", "teacher")})
    assert "judged wrong" in line and "too hard" in line
    assert verifier_warnings({"base": {"d": answers(200)}, "teacher": {"d": answers(199)}}) == []
    # One model alone, or a set that nobody judged, says nothing of the verifier.
    assert verifier_warnings({"base": {"d": answers(200)}}) == []
