"""The content of ``retention.json``: every domain's scores, quotients, intervals and tests.

A domain may be measured by several sets (benchmarks); its score is the mean of theirs, and every
interval and test weighs them so. The definitions are in `mopd.evaluation.metrics`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd.errors import DataError
from mopd.evaluation.domain_numbers import (
    captured_of,
    domain_entry,
    forgetting_entry,
    mean_of,
    retained_of,
)
from mopd.evaluation.items import ROLES, Measure, Results
from mopd.evaluation.judged import check_sets, judged_set
from mopd.evaluation.metrics import LEVEL, Floats, interval, recovery


def build_retention(
    results: Results,
    *,
    measure: Measure = "correct",
    replicates: int = 2000,
    seed: int = 0,
    majority: Mapping[str, float] | None = None,
    without_teacher: Collection[str] = (),
    domains: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """The content of ``retention.json``.

    Stable keys: ``domains.NAME.{base, teacher, student, retention, headroom_captured, n, ci95}``
    and ``mean_headroom_captured``. ``ci95`` is the interval of ``headroom_captured`` and, where
    that is null, of ``retention``; ``ci95_of`` says which. ``n`` counts the items behind the
    scores: those that all three roles' answers could be judged on (``n_unscored`` the others). A
    domain without any such item (no verifier) has ``n`` 0, null scores and a
    ``not_measurable_reason``. Every number is finite; what is undefined is null. Beside these:
    ``gain_ci95`` of teacher - base, ``change_ci95`` of student - base, ``ROLE_ci95``;
    ``retention_lower``, ``headroom_lower`` and ``change_lower`` for decisions
    (`metrics.lower_bound`); ``tests`` of the student against teacher and base; ``only_format``
    (`domain_numbers.only_format`); means of what is seen of the answers beside right or wrong, by
    role.

    Args:
        results: role -> set -> answers, for the roles base, teacher and student.
        measure: what base, teacher and student are the mean of; both measures' means are in
            ``exact`` and ``partial`` either way.
        replicates, seed: of the bootstrap. A set's own stream depends on its name alone.
        majority: set -> score of always giving the most frequent answer.
        without_teacher: held-out sets that only base and student answer: ``forgetting``.
        domains: domain -> its sets; None: every set is a domain of its own.

    Raises:
        DataError: a role or set is missing, items differ between roles or occur twice, or a
            score is not in [0, 1]; the text names role, set and items.
    """
    sets = check_sets(results, without_teacher)
    grouped = {name: [name] for name in sets} if domains is None else dict(domains)
    if sorted(s for own in grouped.values() for s in own) != sorted(sets):
        raise DataError(f"domains {grouped} do not list each of the sets {sets} once")
    entries: dict[str, dict[str, Any]] = {}
    samples: dict[str, Floats] = {}  # domain -> [replicates, 3] means of base, teacher, student
    for name, own in grouped.items():
        judged = [judged_set(s, {r: results[r][s] for r in ROLES}, measure) for s in own]
        entries[name], resampled = domain_entry(judged, measure, replicates, seed)
        known = [majority[s] for s in own if majority is not None and s in majority]
        entries[name]["majority_baseline"] = mean_of(known) if len(known) == len(own) else None
        if len(own) > 1:
            entries[name]["sets"] = {s.name: s.scores() for s in judged}
        if resampled is not None:
            samples[name] = resampled
    scored = [n for n in grouped if n in samples]
    measured = [n for n in grouped if entries[n]["headroom_captured"] is not None]
    retained = [n for n in scored if entries[n]["retention"] is not None]
    points: dict[str, dict[str, float]] = {r: {n: entries[n][r] for n in scored} for r in ROLES}
    macro = np.mean([samples[n] for n in scored], axis=0) if scored else None
    return {
        "domains": entries,
        "mean_headroom_captured": _mean_of_domains(entries, measured, "headroom_captured"),
        "mean_headroom_ci95": _mean_interval([captured_of(samples[n]) for n in measured]),
        "mean_headroom_domains": measured,
        "mean_retention": _mean_of_domains(entries, retained, "retention"),
        "mean_retention_ci95": _mean_interval([retained_of(samples[n]) for n in retained]),
        "recovery": _macro_recovery(points, macro),
        "recovery_ci95": [None, None] if macro is None else interval(captured_of(macro)),
        "forgetting": {
            name: forgetting_entry(
                judged_set(name, {r: results[r][name] for r in ("base", "student")}, measure),
                measure,
                replicates,
                seed,
            )
            for name in sorted(without_teacher)
        },
        "measure": measure,
        "bootstrap": {"replicates": replicates, "seed": seed, "level": LEVEL, "paired": True},
    }


def write_retention(retention_result: Mapping[str, Any], path: Path) -> None:
    """Write ``retention.json`` whole or not at all; refuses NaN and infinity."""
    text = json.dumps(retention_result, indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _macro_recovery(
    points: Mapping[str, Mapping[str, float]], macro: Floats | None
) -> float | None:
    if macro is None:
        return None
    if (interval(macro[:, 1] - macro[:, 0])[0] or 0.0) <= 0:
        return None
    return recovery(points["base"], points["teacher"], points["student"])


def _mean_interval(per_domain: Sequence[Floats]) -> list[float | None]:
    """Interval of the mean over domains; undefined in one domain is undefined in the mean."""
    return interval(np.mean(per_domain, axis=0)) if per_domain else [None, None]


def _mean_of_domains(
    entries: Mapping[str, Mapping[str, Any]], names: Sequence[str], key: str
) -> Any:
    return mean_of([entries[n][key] for n in names]) if names else None
