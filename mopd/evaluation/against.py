"""A further model against the student on the same items: domain by domain, and over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mopd.evaluation.items import ItemResult
from mopd.evaluation.metrics import Floats, interval, paired_bootstrap, stream
from mopd.evaluation.significance import paired_test

Items = Mapping[str, Sequence[ItemResult]]
"""set -> answers."""


def against_student(
    own: Items,
    student: Items,
    domain_sets: Mapping[str, Sequence[str]],
    *,
    replicates: int,
    seed: int,
) -> tuple[dict[str, dict[str, Any] | None], dict[str, Any] | None]:
    """(domain -> the paired test, model against student; the lead over all domains).

    The lead is model - student of the mean over the domains (a domain is the mean of its sets),
    with its paired bootstrap interval and the test in which every set of a domain, and every
    domain, counts the same. None unless both answered every domain and some item was judged there.
    """
    by_domain: dict[str, dict[str, Any] | None] = {}
    paired = {d: _paired(own, student, sets) for d, sets in domain_sets.items()}
    for domain, sets in paired.items():
        if sets is not None:
            by_domain[domain] = _test(sets, {name: 1.0 for name in sets}, seed)
    if not paired or not all(paired.values()):
        return by_domain, None
    whole = {d: sets for d, sets in paired.items() if sets}
    resampled = np.mean(
        [
            np.mean(
                [
                    paired_bootstrap(values, replicates=replicates, seed=stream(seed, name))
                    for name, values in sets.items()
                ],
                axis=0,
            )
            for sets in whole.values()
        ],
        axis=0,
    )
    means = np.mean([np.mean([v.mean(axis=0) for v in s.values()], axis=0) for s in whole.values()],
                    axis=0)  # fmt: skip
    weights = {name: 1.0 / len(sets) for sets in whole.values() for name in sets}
    values = {name: v for sets in whole.values() for name, v in sets.items()}
    lead = {
        "value": float(means[0] - means[1]),
        "ci95": interval(resampled[:, 0] - resampled[:, 1]),
        **(_test(values, weights, seed) or {}),
    }
    return by_domain, lead


def _paired(own: Items, student: Items, sets: Sequence[str]) -> dict[str, Floats] | None:
    """set -> [n, (model, student)] of the items on which both were judged; None if a set was not
    answered by both."""
    if not all(name in own and name in student for name in sets):
        return None
    found: dict[str, Floats] = {}
    for name in sets:
        theirs = {item.item_id: item.correct for item in student[name]}
        pairs = [
            (float(item.correct), float(other))
            for item in sorted(own[name], key=lambda each: each.item_id)
            if item.correct is not None and (other := theirs.get(item.item_id)) is not None
        ]
        if pairs:
            found[name] = np.array(pairs, dtype=np.float64)
    return found


def _test(
    sets: Mapping[str, Floats], share: Mapping[str, float], seed: int
) -> dict[str, Any] | None:
    """Paired test over the sets' items; `share` is what a whole set counts."""
    if not sets:
        return None
    first = [float(v) for values in sets.values() for v in values[:, 0]]
    second = [float(v) for values in sets.values() for v in values[:, 1]]
    weights = [share[name] / len(values) for name, values in sets.items() for _ in values]
    return paired_test(first, second, weights=weights, seed=seed)
