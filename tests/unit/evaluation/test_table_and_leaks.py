"""The cross table and the oracle router by hand; leaks by content."""

from __future__ import annotations

import pytest

from mopd.evaluation.items import ItemResult
from mopd.evaluation.leaks import describe_leaks, find_leaks
from mopd.evaluation.table import cross_table, router_scores
from mopd.types import Prompt


def answers(right: int, n: int, *, unjudged: int = 0) -> list[ItemResult]:
    """The first `right` of n are right; the last `unjudged` were not judged."""
    return [
        ItemResult(f"i/{k:03d}", None, None, 3, "stop")
        if k >= n - unjudged
        else ItemResult(f"i/{k:03d}", k < right, float(k < right), 3, "stop")
        for k in range(n)
    ]


def test_cross_table_shows_what_a_specialist_lost_elsewhere():
    results = {
        "base": {"a": answers(50, 100), "b": answers(60, 100)},
        "t_a": {"a": answers(90, 100), "b": answers(20, 100)},
        "t_b": {"a": answers(40, 100), "b": answers(95, 100)},
        "student": {"a": answers(88, 100), "b": answers(94, 100)},
    }
    table = cross_table(results, {"a": ["a"], "b": ["b"]}, replicates=300, seed=0)
    assert table["t_a"]["b"]["score"] == 0.2
    assert table["t_a"]["b"]["change"] == pytest.approx(-0.4)
    assert table["t_a"]["b"]["change_ci95"][1] < -0.25 and table["t_a"]["b"]["p"] < 1e-6
    assert table["base"]["a"]["change"] is None
    router = router_scores(table, {"a": "t_a", "b": "t_b"})
    assert router["router"] == pytest.approx((0.9 + 0.95) / 2)
    assert router["models"]["student"] == pytest.approx(0.91)
    assert router["models"]["t_a"] == pytest.approx(0.55) and router["best_single"] == "student"


def test_items_that_were_not_judged_and_domains_not_answered_are_left_out():
    results = {"base": {"a": answers(10, 20, unjudged=5)}, "other": {"a": answers(20, 20)}}
    table = cross_table(results, {"a": ["a"], "b": ["b"]}, replicates=50, seed=0)
    assert table["other"]["a"]["n"] == 15 and table["other"]["a"]["score"] == 1.0
    assert table["other"]["a"]["change"] == pytest.approx(1 - 10 / 15)
    assert "b" not in table["other"]
    assert router_scores(table, {"a": "other", "b": "other"})["router"] is None


def test_domain_of_several_sets_is_the_mean_of_their_means():
    results = {"base": {"a": answers(0, 10), "a2": answers(40, 40)}}
    table = cross_table(results, {"a": ["a", "a2"]}, replicates=50, seed=0)
    assert table["base"]["a"]["score"] == 0.5 and table["base"]["a"]["n"] == 50


def prompt(id: str, text: str, answer: str | None = "4") -> Prompt:
    return Prompt(id, id.partition("/")[0], text, (1,), answer)


def test_leaks_are_found_by_content_across_domains_and_named_with_their_rows():
    training = {"m": [prompt("m/1", "What is 2+2?"), prompt("m/2", "Spell Morgan", "nagroM")]}
    held = {
        "code": [prompt("code/9", "What is 2+2?"), prompt("code/8", "what  is 2+2?\n")],
        "m": [prompt("m/3", "spell morgan", "nagrom"), prompt("m/4", "something else")],
    }
    leaks = find_leaks(training, held)
    assert [(x.held_out.id, x.trained.id, x.exact) for x in leaks] == [
        ("code/9", "m/1", True),
        ("code/8", "m/1", False),
    ]  # another case that makes another answer is another question
    text = describe_leaks(leaks, {"code/9": "code.jsonl:9", "m/1": "math.jsonl:1"})
    assert "code.jsonl:9 is trained on as math.jsonl:1" in text and "up to case" in text
    many = describe_leaks(leaks * 10, {})
    assert many.endswith("and 10 more") and len(many.splitlines()) == 11
