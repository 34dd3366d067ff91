"""Every model on every set: what each specialist lost elsewhere, and what a router would score.

cross table       models x domains, each against the base on the same items
oracle router     every domain answered by its own teacher: the mean that a perfect router over
                  the unmerged teachers would reach, at the price of keeping all of them
best single       the one model whose mean over the domains is highest
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mopd.evaluation.items import ItemResult
from mopd.evaluation.metrics import interval, paired_bootstrap, stream
from mopd.evaluation.significance import paired_test

Answered = Mapping[str, Mapping[str, Sequence[ItemResult]]]
"""model -> set -> its answers."""


def cross_table(
    results: Answered,
    domains: Mapping[str, Sequence[str]],
    *,
    base: str = "base",
    replicates: int,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """model -> domain -> score with its interval, and its change against the base.

    Args:
        results: model -> set -> answers; a set that a model did not answer leaves its domain out.
        domains: domain -> its sets; general sets are domains of their own here.
        base: the model that changes are counted from; without it there are no changes.
    """
    table: dict[str, dict[str, Any]] = {}
    for model, answers in results.items():
        table[model] = {}
        for domain, sets in domains.items():
            if all(s in answers for s in sets):
                reference = results.get(base, {})
                if model == base or not all(s in reference for s in sets):
                    reference = {}
                table[model][domain] = _cell(
                    {s: answers[s] for s in sets}, reference, replicates, seed
                )
    return table


def _cell(
    answers: Mapping[str, Sequence[ItemResult]],
    reference: Mapping[str, Sequence[ItemResult]],
    replicates: int,
    seed: int,
) -> dict[str, Any]:
    """Mean over the sets; items that either model could not be judged on are left out."""
    columns: dict[str, list[tuple[float, float]]] = {}
    for name, items in answers.items():
        other = {a.item_id: a.correct for a in reference.get(name, ())}
        pairs = [
            (float(a.correct), float(theirs) if (theirs := other.get(a.item_id)) is not None else 0)
            for a in sorted(items, key=lambda item: item.item_id)
            if a.correct is not None and (not reference or other.get(a.item_id) is not None)
        ]
        if pairs:
            columns[name] = pairs
    empty = {"score": None, "ci95": [None, None], "n": 0, "change": None, "change_ci95": None}
    if not columns:
        return empty
    values = {name: np.array(pairs, dtype=np.float64) for name, pairs in columns.items()}
    resampled = np.mean(
        [
            paired_bootstrap(v, replicates=replicates, seed=stream(seed, name))
            for name, v in values.items()
        ],
        axis=0,
    )
    own, other_mean = np.mean([v.mean(axis=0) for v in values.values()], axis=0)
    cell: dict[str, Any] = {
        "score": float(own),
        "ci95": interval(resampled[:, 0]),
        "n": sum(map(len, columns.values())),
        "change": None,
        "change_ci95": None,
    }
    if reference:
        pooled = [(a, b, 1.0 / len(pairs)) for pairs in columns.values() for a, b in pairs]
        first, second, weights = zip(*pooled, strict=True)
        cell["change"] = float(own - other_mean)
        cell["change_ci95"] = interval(resampled[:, 0] - resampled[:, 1])
        cell["p"] = paired_test(first, second, weights=weights)["p"]
    return cell


def macro(
    table: Mapping[str, Mapping[str, Any]], model: str, domains: Sequence[str]
) -> float | None:
    """The model's mean score over `domains`; None unless it has one in each of them."""
    scores = [table.get(model, {}).get(d, {}).get("score") for d in domains]
    if not scores or any(s is None for s in scores):
        return None
    return math.fsum(scores) / len(scores)


def router_scores(
    table: Mapping[str, Mapping[str, Any]], teacher_of: Mapping[str, str]
) -> dict[str, Any]:
    """Means over the domains that have a teacher: the oracle router and every single model.

    Args:
        table: what `cross_table` gave.
        teacher_of: domain -> the model that is its teacher.

    Returns:
        ``router`` (null unless every teacher answered its domain), ``models`` (model -> mean) and
        ``best_single`` (a model's name).
    """
    domains = list(teacher_of)
    own = [table.get(t, {}).get(d, {}).get("score") for d, t in teacher_of.items()]
    means = {model: macro(table, model, domains) for model in table}
    known = {model: mean for model, mean in means.items() if mean is not None}
    complete = bool(own) and all(s is not None for s in own)
    return {
        "router": math.fsum(own) / len(own) if complete else None,
        "models": means,
        "best_single": max(known, key=lambda m: known[m]) if known else None,
    }
