"""The best student, the end of patience, and what is said of forgetting and starving domains."""

from __future__ import annotations

import pytest

from mopd.evaluation.items import ItemResult
from mopd.evaluation.selection import (
    Selection,
    criterion_value,
    forgetting_warnings,
    starvation_warnings,
)


def answers(**right: float) -> dict[str, list[ItemResult]]:
    """Set -> 100 items of which this share is right."""
    return {
        name: [
            ItemResult(f"{name}/{k}", k < 100 * share, float(k < 100 * share), 3, "stop")
            for k in range(100)
        ]
        for name, share in right.items()
    }


def selection(criterion: str, patience: int = 0) -> Selection:
    return Selection(
        criterion, patience, {"a": ["a"], "b": ["b"]}, answers(a=0.5, b=0.4), answers(a=0.9, b=0.8)
    )


def test_the_worst_domain_decides_by_default():
    chosen = selection("worst_headroom")
    assert chosen.add(10, answers(a=0.7, b=0.6))  # .5 and .5
    assert not chosen.add(20, answers(a=0.9, b=0.5))  # 1 and .25
    assert chosen.add(30, answers(a=0.78, b=0.64))  # .7 and .6
    assert chosen.best == 30 and chosen.values[20] == (pytest.approx(0.25), "b")
    assert chosen.describe_best() == "step 30: worst headroom 0.600 (b)"


def test_the_mean_may_decide_otherwise():
    chosen = selection("mean_headroom")
    chosen.add(10, answers(a=0.7, b=0.6))
    assert chosen.add(20, answers(a=0.9, b=0.5))  # mean .625
    assert chosen.best == 20


def test_of_equals_the_earliest_and_patience_counts_from_the_best():
    chosen = selection("worst_retention", patience=2)
    assert chosen.add(10, answers(a=0.9, b=0.8)) and not chosen.exhausted
    assert not chosen.add(20, answers(a=0.9, b=0.8)) and not chosen.exhausted
    assert not chosen.add(30, answers(a=0.8, b=0.8)) and chosen.exhausted
    assert chosen.best == 10


def test_domains_without_headroom_do_not_decide():
    base, teacher = {"a": 0.5, "b": 0.9}, {"a": 0.9, "b": 0.9}
    assert criterion_value("worst_headroom", base, teacher, {"a": 0.8, "b": 0.1}) == (
        pytest.approx(0.75),
        "a",
    )
    assert criterion_value("worst_headroom", {"a": 1.0}, {"a": 0.5}, {"a": 0.7}) is None
    assert not selection("off").add(1, answers(a=1.0, b=1.0))


def test_forgetting_is_told_only_where_it_is_clear():
    base = answers(a=0.6, general=0.8)
    (line,) = forgetting_warnings(40, base, answers(a=0.9, general=0.6))
    assert "general: forgotten after step 40: 60.0%" in line and "base 80.0%" in line
    assert forgetting_warnings(40, base, answers(a=0.9, general=0.8)) == []


def metrics(**shares: tuple[float, float]) -> list[dict[str, float]]:
    one = {f"domain/{d}/gradient_share": s for d, (s, _) in shares.items()}
    return [one | {f"domain/{d}/reverse_kl": k for d, (_, k) in shares.items()}] * 3


def test_a_domain_of_short_answers_that_lags_starves():
    weights = {"short": 1.0, "long": 1.0}
    (line,) = starvation_warnings(metrics(short=(0.01, 0.5), long=(0.99, 0.1)), weights)
    assert "short: starves: 50% of the prompts but 1.0% of the gradient" in line
    # A small share alone is no harm: this domain has nothing left to learn.
    assert starvation_warnings(metrics(short=(0.01, 0.01), long=(0.99, 0.1)), weights) == []
    assert starvation_warnings(metrics(short=(0.4, 0.5), long=(0.6, 0.1)), weights) == []
    assert starvation_warnings([], weights) == []
    assert starvation_warnings(metrics(short=(0.0, 0.5)), {"short": 1.0}) == []
