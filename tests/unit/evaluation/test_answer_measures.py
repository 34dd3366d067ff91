"""pass@k, held-out KL, and what is seen of an answer: exact cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from mopd.errors import ConfigError
from mopd.evaluation.divergence import held_out_divergence
from mopd.evaluation.items import holds_reference, plain_text, repetition, seen_in_answer
from mopd.evaluation.sampled import pass_at_k, sampled_entry


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer():
    for n, correct, k in [(5, 2, 3), (4, 0, 2), (4, 4, 1), (6, 1, 6)]:
        votes = [i < correct for i in range(n)]
        subsets = list(itertools.combinations(votes, k))
        expected = sum(any(s) for s in subsets) / len(subsets)
        assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_unbiased():
    """The mean over binomial draws is 1 - (1 - p)^k; the plug-in 1 - (1 - c/n)^k is below it."""
    n, k, p = 6, 3, 0.3
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
    plug_in = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert plug_in < mean - 0.02


def test_sampled_entry_averages_items_and_leaves_out_the_unjudged():
    verdicts = {"a": [True, False, False, True], "b": [None, None, None, None], "c": [False] * 4,
                "d": [True, None, None, None]}  # fmt: skip
    entry = sampled_entry(verdicts, [1, 2], replicates=100, seed=0)
    assert entry["n_items"] == 3 and entry["n_samples"] == 4
    assert entry["mean"]["value"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert entry["pass"]["2"]["n_items"] == 2  # d has one judged sample only
    assert entry["pass"]["2"]["value"] == pytest.approx((pass_at_k(4, 2, 2) + 0) / 2)
    with pytest.raises(ConfigError, match="pass_at has 8, but only 4"):
        sampled_entry(verdicts, [8], replicates=10, seed=0)


def test_held_out_divergence_estimates_the_exact_kl():
    rng = np.random.default_rng(0)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    exact = float(np.sum(p * np.log(p / q)))
    drawn = rng.choice(3, size=(4000, 5), p=p)
    found = held_out_divergence(
        np.log(p)[drawn].tolist(), np.log(q)[drawn].tolist(), replicates=200, seed=0
    )
    assert found["tokens"] == 20_000 and found["answers"] == 4000
    for kind in ("k1", "k3"):
        low, high = found[f"{kind}_ci95"]
        assert low < exact < high and found[kind] == pytest.approx(exact, abs=0.02)


def test_held_out_divergence_of_equal_models_is_zero_and_of_nothing_is_none():
    same = [[-1.0, -2.0], [-0.5]]
    found = held_out_divergence(same, same, replicates=50, seed=0)
    assert found["k1"] == found["k3"] == 0.0 and found["k1_ci95"] == [0.0, 0.0]
    assert held_out_divergence([], [], replicates=50, seed=0)["k1"] is None
    with pytest.raises(ValueError):
        held_out_divergence([[-1.0]], [[-1.0, -2.0]], replicates=50, seed=0)


def test_repetition():
    assert repetition([1, 2, 3]) == 0.0
    assert repetition(list(range(50))) == 0.0
    assert repetition([7] * 100) == pytest.approx(1 - 1 / 97)
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 - 4 / 5)


def test_lenient_reading_needs_the_reference_as_words_of_its_own():
    assert holds_reference("The answer is 42.", "42")
    assert holds_reference("the  ANSWER", "The answer")
    assert not holds_reference("142", "42")
    assert not holds_reference("anything", None) and not holds_reference("anything", " ")
    assert plain_text("Ａ\n b") == "a b"


def test_what_is_seen_of_an_answer():
    assert seen_in_answer(None, None, "stop", True, "x") == dict.fromkeys(
        ("repetition", "format_error", "lenient")
    )
    cut = seen_in_answer("so the result is 7", [1, 2], "length", False, "7")
    assert cut["format_error"] is True and cut["lenient"] is True
    assert seen_in_answer("  ", [1], "stop", False, "7")["format_error"] is True
    assert seen_in_answer("7", [1], "stop", None, "7")["lenient"] is None  # nobody judged it
    assert seen_in_answer("a a a a a a", None, "stop", False, None)["repetition"] > 0.5
