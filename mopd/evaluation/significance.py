"""Is a difference between two models more than chance? Paired tests on the same items.

Both ask of the null hypothesis "swapping the two models on any item changes nothing". p-values are
two-sided and not corrected for the number of domains looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

EXACT_UP_TO = 14
"""Differing items up to which all 2^n swaps are enumerated."""
_CHUNK = 500


def mcnemar(better: int, worse: int) -> float:
    """Exact two-sided McNemar test (a binomial test on the items where the two differ).

    Args:
        better, worse: items that only the first model, or only the second, has right.

    Returns:
        min(1, 2 * P(X <= min(better, worse))), X ~ Binomial(better + worse, 1/2); 1 where they
        never differ.
    """
    if better < 0 or worse < 0:
        raise ValueError(f"counts must be 0 or more, got {better} and {worse}")
    n = better + worse
    # In logs: 2 ** -n is 0 in floating point from n = 1075 on.
    logs = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
        for k in range(min(better, worse) + 1)
    ]
    return min(1.0, 2.0 * math.fsum(map(math.exp, logs)))


def permutation(differences: Sequence[float], *, replicates: int = 10_000, seed: int = 0) -> float:
    """Two-sided sign-flip test that the sum of paired differences is 0.

    Exact for up to `EXACT_UP_TO` nonzero differences; else Monte Carlo with (k + 1) / (m + 1), of
    which the observed one counts as a replicate, so that p is never 0.

    Args:
        differences: first minus second model, one an item; weighted where items count unequally.
    """
    values = np.array([d for d in differences if d != 0.0], dtype=np.float64)
    n = values.size
    if n == 0:
        return 1.0
    # Sums that are equal but for rounding are as extreme as the observed one.
    reached = abs(float(values.sum())) - 1e-9 * float(np.abs(values).sum())
    if n <= EXACT_UP_TO:
        bits = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        return float(np.mean(np.abs((2.0 * bits - 1.0) @ values) >= reached))
    rng = np.random.default_rng(seed)
    extreme = 0
    for start in range(0, replicates, _CHUNK):
        size = min(_CHUNK, replicates - start)
        signs = rng.integers(0, 2, size=(size, n)) * 2.0 - 1.0
        extreme += int(np.sum(np.abs(signs @ values) >= reached))
    return (extreme + 1) / (replicates + 1)


def paired_test(
    first: Sequence[float],
    second: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    replicates: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """McNemar where both models' values are 0 or 1 and all items weigh the same, else permutation.

    Args:
        first, second: [n] values of the same items, in the same order.
        weights: [n] weight of each item in the mean that is compared; None: all the same.

    Returns:
        ``p``, ``test`` (its name), ``better`` and ``worse``: items where the first is
        higher, and where it is lower.
    """
    pairs = list(zip(first, second, strict=True))
    better = sum(a > b for a, b in pairs)
    worse = sum(a < b for a, b in pairs)
    binary = all(value in (0.0, 1.0) for pair in pairs for value in pair)
    if binary and (weights is None or len(set(weights)) <= 1):
        return {"p": mcnemar(better, worse), "test": "McNemar", "better": better, "worse": worse}
    scale = [1.0] * len(pairs) if weights is None else weights
    differences = [w * (a - b) for (a, b), w in zip(pairs, scale, strict=True)]
    p = permutation(differences, replicates=replicates, seed=seed)
    return {"p": p, "test": "permutation", "better": better, "worse": worse}
