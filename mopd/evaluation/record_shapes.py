"""What reports and comparisons rely on in a run's files, checked where the files are read.

The files may be damaged, or of another version: whoever reads them must get a sentence that names
the place, not a traceback. Keys that are not named here are let through; values are checked and
never changed.
"""

from __future__ import annotations

import json
from typing import Any, NotRequired, TypedDict

import msgspec

Number = float | None
Interval = tuple[float | None, float | None] | None
ByRole = dict[str, float | None] | None


class TestFound(TypedDict):
    """A paired test, as `mopd.evaluation.significance` writes it."""

    p: float
    better: int
    worse: int
    test: str


class OnlyFormat(TypedDict):
    flagged: bool
    change: Number
    ci95: Interval


class DomainEntry(TypedDict):
    base: Number
    teacher: Number
    student: Number
    retention: Number
    headroom_captured: Number
    n: int
    ci95: Interval
    retention_ci95: NotRequired[Interval]
    change_ci95: NotRequired[Interval]
    student_ci95: NotRequired[Interval]
    not_measurable_reason: NotRequired[str | None]
    n_unscored: NotRequired[int]
    majority_baseline: NotRequired[Number]
    only_format: NotRequired[OnlyFormat | None]
    tests: NotRequired[dict[str, TestFound | None] | None]
    partial: NotRequired[ByRole]
    lenient: NotRequired[ByRole]
    mean_response_tokens: NotRequired[ByRole]
    truncated_fraction: NotRequired[ByRole]
    format_error: NotRequired[ByRole]
    repetition: NotRequired[ByRole]


class Forgetting(TypedDict):
    base: Number
    student: Number
    forgetting: Number
    ci95: tuple[float | None, float | None]
    n: int
    tests: NotRequired[dict[str, TestFound | None] | None]


class Retention(TypedDict):
    """retention.json"""

    domains: dict[str, DomainEntry]
    mean_headroom_captured: Number
    mean_headroom_ci95: NotRequired[Interval]
    mean_retention: NotRequired[Number]
    forgetting: NotRequired[dict[str, Forgetting]]


class Cell(TypedDict):
    score: Number
    change: Number
    ci95: NotRequired[Interval]
    change_ci95: NotRequired[Interval]
    n: NotRequired[int]


class Router(TypedDict):
    router: Number
    models: dict[str, Number]
    best_single: NotRequired[Any]


class Lead(TypedDict):
    value: float
    ci95: tuple[float | None, float | None]
    p: float
    better: int
    worse: int


class Other(TypedDict):
    headroom_captured: dict[str, Number]
    mean_headroom_captured: Number
    mean: Number
    mean_headroom_ci95: NotRequired[Interval]
    lead: NotRequired[Lead | None]


class Training(TypedDict):
    seed: NotRequired[Any]
    steps: NotRequired[int | None]
    tokens: NotRequired[Number]
    step_seconds: NotRequired[Number]
    differs: NotRequired[list[str] | None]


class Model(TypedDict):
    training: NotRequired[Training | None]


class Divergence(TypedDict):
    k1: Number
    k1_ci95: Interval
    k3: Number
    k3_ci95: Interval
    answers: int
    tokens: int


class Estimate(TypedDict):
    value: Number
    ci95: Interval


Sampled = TypedDict(
    "Sampled", {"n_samples": int, "mean": Estimate | None, "pass": dict[str, Estimate | None]}
)


class Cost(TypedDict):
    wall_s: float
    answers_asked: int


class AllCosts(Cost):
    earlier: NotRequired[list[Cost]]


class Evaluation(TypedDict):
    """evaluation.json"""

    table: dict[str, dict[str, Cell | None]]
    router: Router
    teacher_of: NotRequired[dict[str, str]]
    models: NotRequired[dict[str, Model]]
    others: NotRequired[dict[str, Other]]
    divergence: NotRequired[dict[str, Divergence]]
    sampled: NotRequired[dict[str, dict[str, Sampled]]]
    cost: NotRequired[AllCosts]


class Best(TypedDict):
    """best.json"""

    step: int
    criterion: NotRequired[str]
    value: NotRequired[Number]
    ended_early_after: NotRequired[int | None]


FinalAnswers = dict[str, dict[str, list[tuple[str, bool | None, Number, int | None]]]]
"""final_answers.json: model -> set -> (id, correct, score, tokens) each."""


def read_json(text: str, shape: Any) -> Any:
    """The value that `text` holds. ValueError, with the place in it, unless it is of `shape`;
    NaN and infinity, which Python writes and JSON does not have, are refused."""
    value = json.loads(text, parse_constant=_no_number)
    try:
        msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"it has {text} where a finite number is expected")
