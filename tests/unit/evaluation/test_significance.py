"""Paired tests against enumeration and published arithmetic."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from mopd.evaluation.significance import mcnemar, paired_test, permutation


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (3, 9), (8, 8), (0, 6)])
def test_mcnemar_is_the_binomial_test(better, worse):
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n
    assert mcnemar(better, worse) == pytest.approx(min(1.0, 2 * tail), abs=1e-12)


def test_mcnemar_of_many_items_does_not_underflow():
    assert mcnemar(2000, 2000) == 1.0
    assert 0 < mcnemar(900, 1100) < 1e-4  # 2^-2000 is no float


def test_permutation_is_exact_where_it_can_be():
    differences = [0.5, -0.25, 1.0, 0.75, 0.0, -0.1]
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    expected = sum(s >= abs(sum(differences)) - 1e-12 for s in sums) / len(sums)
    assert permutation(differences) == pytest.approx(expected, abs=1e-12)


def test_permutation_of_signs_agrees_with_mcnemar():
    """On +-1 differences the sign-flip test is the binomial test."""
    differences = [1.0] * 30 + [-1.0] * 14
    assert permutation(differences, replicates=40_000) == pytest.approx(mcnemar(30, 14), abs=4e-3)


def test_permutation_p_values_are_uniform_under_the_null():
    rng = np.random.default_rng(1)
    ps = [permutation(rng.normal(size=25), replicates=400, seed=k) for k in range(300)]
    assert np.mean(np.array(ps) <= 0.1) == pytest.approx(0.1, abs=0.05)


def test_identical_answers_say_so():
    found = paired_test([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert found == {"p": 1.0, "test": "McNemar", "better": 0, "worse": 0}
    assert paired_test([0.3, 0.0], [0.3, 0.0])["p"] == 1.0


def test_partial_credit_and_unequal_weights_go_to_the_permutation_test():
    assert paired_test([0.5, 1.0], [0.25, 1.0])["test"] == "permutation"
    weighted = paired_test([1.0, 0.0], [0.0, 0.0], weights=[0.5, 0.1])
    assert weighted["test"] == "permutation" and weighted["p"] == 1.0
    assert paired_test([1.0], [0.0], weights=[0.2])["test"] == "McNemar"
