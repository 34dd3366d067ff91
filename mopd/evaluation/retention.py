"""The content of ``retention.json``: every domain's scores, quotients, intervals and tests.

A domain may be measured by several sets (benchmarks); its score is the mean of theirs, and every
interval and test weighs them so. The definitions are in `mopd.evaluation.metrics`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd.errors import DataError
from mopd.evaluation.items import ROLES, Measure, Results
from mopd.evaluation.judged import Judged, check_sets, judged_set
from mopd.evaluation.metrics import (
    LEVEL,
    Floats,
    forgetting,
    headroom_captured,
    interval,
    lower_bound,
    paired_bootstrap,
    quotient,
    recovery,
    retention,
    stream,
)
from mopd.evaluation.significance import paired_test

QUALITIES = ("repetition", "format_error", "lenient")


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
    (`_only_format`); means of what is seen of the answers beside right or wrong, by role.

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
        entries[name], resampled = _domain_entry(judged, measure, replicates, seed)
        known = [majority[s] for s in own if majority is not None and s in majority]
        entries[name]["majority_baseline"] = _mean(known) if len(known) == len(own) else None
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
        "mean_headroom_captured": _mean_of(entries, measured, "headroom_captured"),
        "mean_headroom_ci95": _mean_interval([_captured(samples[n]) for n in measured]),
        "mean_headroom_domains": measured,
        "mean_retention": _mean_of(entries, retained, "retention"),
        "mean_retention_ci95": _mean_interval([_retained(samples[n]) for n in retained]),
        "recovery": _macro_recovery(points, macro),
        "recovery_ci95": [None, None] if macro is None else interval(_captured(macro)),
        "forgetting": {
            name: _forgetting_entry(
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


def _domain_entry(
    sets: Sequence[Judged], measure: Measure, replicates: int, seed: int
) -> tuple[dict[str, Any], Floats | None]:
    """One domain's entry, and its [replicates, 3] resampled means (None if nothing was judged)."""
    about: dict[str, Any] = {
        "n": sum(len(s.ids) for s in sets),
        "n_unscored": sum(s.n_unscored for s in sets),
        **_seen_in_answers(sets, ROLES),
    }
    scored = [s for s in sets if s.ids]
    if not scored:
        return {**_UNSCORED, **about}, None

    exact, partial = (
        {r: _mean([s.mean(r, m) for s in scored]) for r in ROLES} for m in ("correct", "score")
    )
    base, teacher, student = (_mean([_mean(s.column(r)) for s in scored]) for r in ROLES)
    resampled = np.mean([s.resampled(replicates, seed) for s in scored], axis=0)
    gain_ci95 = interval(resampled[:, 1] - resampled[:, 0])
    change_ci95 = interval(resampled[:, 2] - resampled[:, 0])
    kept = retention(student, teacher)
    captured = headroom_captured(base, teacher, student, gain_lower_bound=gain_ci95[0])
    kept_ci95 = interval(_retained(resampled)) if kept is not None else [None, None]
    captured_ci95 = interval(_captured(resampled)) if captured is not None else [None, None]
    of = "headroom_captured" if captured is not None else "retention" if kept is not None else None
    reason = None
    if captured is None:
        reason = (
            f"teacher - base = {teacher - base:+.3f}, 95% interval "
            f"[{gain_ci95[0]:+.3f}, {gain_ci95[1]:+.3f}]: not clearly above 0"
        )
    n = about.pop("n")
    as_good = _never_worse(scored, "teacher")
    return {
        "base": base,
        "teacher": teacher,
        "student": student,
        "retention": kept,
        "headroom_captured": captured,
        "n": n,
        "ci95": captured_ci95 if captured is not None else kept_ci95,
        "ci95_of": of,
        "retention_ci95": kept_ci95,
        "retention_lower": lower_bound(
            kept_ci95[0], kept, n, none_worse=as_good, unit=1 / teacher if teacher > 0 else 1.0
        ),
        "headroom_lower": lower_bound(
            captured_ci95[0],
            captured,
            n,
            none_worse=as_good,
            unit=1.0 if captured is None else 1 / (teacher - base),
        ),
        "gain_ci95": gain_ci95,
        "change_ci95": change_ci95,
        "change_lower": lower_bound(
            change_ci95[0], student - base, n, none_worse=_never_worse(scored, "base")
        ),
        **{f"{r}_ci95": interval(resampled[:, k]) for k, r in enumerate(ROLES)},
        "exact": exact,
        "partial": partial,
        "tests": {
            f"student_against_{r}": _test(scored, "student", r, replicates, seed)
            for r in ("teacher", "base")
        },
        "only_format": _only_format(scored, change_ci95, replicates, seed),
        "not_measurable_reason": reason,
        **about,
    }, resampled


_UNSCORED: dict[str, Any] = {
    "base": None,
    "teacher": None,
    "student": None,
    "retention": None,
    "headroom_captured": None,
    "n": 0,
    "ci95": [None, None],
    "ci95_of": None,
    "retention_ci95": [None, None],
    "retention_lower": None,
    "headroom_lower": None,
    "gain_ci95": [None, None],
    "change_ci95": [None, None],
    "change_lower": None,
    **{f"{r}_ci95": [None, None] for r in ROLES},
    "exact": dict.fromkeys(ROLES),
    "partial": dict.fromkeys(ROLES),
    "tests": None,
    "only_format": None,
    "not_measurable_reason": "no answer could be judged (the domain has no verifier, or it failed)",
}


def _never_worse(sets: Sequence[Judged], than: str) -> bool:
    """Whether the student scored below `than` on no item of any set."""
    return all(
        mine >= theirs
        for s in sets
        for mine, theirs in zip(s.column("student"), s.column(than), strict=True)
    )


def _test(
    sets: Sequence[Judged], first: str, second: str, replicates: int, seed: int
) -> dict[str, Any]:
    """The sets' items together, weighted so that every set counts the same."""
    weights = [1.0 / len(s.ids) for s in sets for _ in s.ids]
    return paired_test(
        [v for s in sets for v in s.column(first)],
        [v for s in sets for v in s.column(second)],
        weights=weights,
        replicates=max(replicates, 1000),
        seed=stream(seed, sets[0].name),
    )


def _only_format(
    sets: Sequence[Judged], change_ci95: Sequence[float | None], replicates: int, seed: int
) -> dict[str, Any] | None:
    """Is the gain over the base one of form only? None where that cannot be said.

    Counted leniently (right where the reference stands anywhere in the answer), a student that
    only learnt to answer in the wanted form gained nothing: then ``flagged`` is True while the
    strict gain is clearly above 0. ``change`` and ``ci95`` are of the lenient student - base.
    """
    answers = [(s.by_role["base"][i], s.by_role["student"][i]) for s in sets for i in s.ids]
    if any(a.lenient is None for pair in answers for a in pair):
        return None
    changes, means = [], []
    for s in sets:
        pairs = [(s.by_role["base"][i].lenient, s.by_role["student"][i].lenient) for i in s.ids]
        values = np.array(pairs, dtype=np.float64)
        changes.append(float((values[:, 1] - values[:, 0]).mean()))
        means.append(paired_bootstrap(values, replicates=replicates, seed=stream(seed, s.name)))
    mean = np.mean(means, axis=0)
    ci95 = interval(mean[:, 1] - mean[:, 0])
    gained = change_ci95[0] is not None and change_ci95[0] > 0
    flagged = gained and ci95[0] is not None and ci95[0] <= 0
    return {"flagged": flagged, "change": _mean(changes), "ci95": ci95}


def _seen_in_answers(sets: Sequence[Judged], roles: Sequence[str]) -> dict[str, Any]:
    """Means over all items (judged or not) of length, truncation and the `QUALITIES`, by role.

    A quality that some answer has no value of is null.
    """
    items = {r: [a for s in sets for a in s.answers[r]] for r in roles}

    def mean_of(quality: str, role: str) -> float | None:
        values = [getattr(a, quality) for a in items[role]]
        known = [float(v) for v in values if v is not None]
        return _mean(known) if len(known) == len(values) else None

    return {
        "mean_response_tokens": {r: _mean([a.response_tokens for a in items[r]]) for r in roles},
        "truncated_fraction": {
            r: _mean([a.finish_reason == "length" for a in items[r]]) for r in roles
        },
        **{q: {r: mean_of(q, r) for r in roles} for q in QUALITIES},
    }


def _forgetting_entry(
    judged: Judged, measure: Measure, replicates: int, seed: int
) -> dict[str, Any]:
    """Base and student on a set without a teacher."""
    entry: dict[str, Any] = {
        "n": len(judged.ids),
        "n_unscored": judged.n_unscored,
        **_seen_in_answers([judged], judged.roles),
    }
    if not judged.ids:
        nothing = {"base": None, "student": None, "forgetting": None, "ci95": [None, None]}
        return {**nothing, "change_lower": None, "tests": None, **entry}
    base, student = (_mean(judged.column(r)) for r in ("base", "student"))
    resampled = judged.resampled(replicates, seed)
    ci95 = interval(resampled[:, 1] - resampled[:, 0])
    return {
        "base": base,
        "student": student,
        "forgetting": forgetting(base, student),
        "ci95": ci95,
        "change_lower": lower_bound(
            ci95[0], student - base, len(judged.ids), none_worse=_never_worse([judged], "base")
        ),
        "tests": {"student_against_base": _test([judged], "student", "base", replicates, seed)},
        **entry,
    }


# --- Small parts ----------------------------------------------------------------------------------


def _captured(resampled: Floats) -> Floats:
    """[replicates, (base, teacher, student)] -> [replicates] headroom captured, NaN: undefined."""
    return quotient(resampled[:, 2] - resampled[:, 0], resampled[:, 1] - resampled[:, 0])


def _retained(resampled: Floats) -> Floats:
    """[replicates, (base, teacher, student)] -> [replicates] retention, NaN where undefined."""
    return quotient(resampled[:, 2], resampled[:, 1])


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


def _mean_of(entries: Mapping[str, Mapping[str, Any]], names: Sequence[str], key: str) -> Any:
    return _mean([entries[n][key] for n in names]) if names else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
