"""One domain's or one set's part of ``retention.json``: scores, quotients, intervals and tests.

Several sets of a domain weigh the same in every number of it. What `retention.json` holds and how
domains come together: `mopd.evaluation.retention`; the definitions: `mopd.evaluation.metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mopd.evaluation.items import ROLES, Measure
from mopd.evaluation.judged import Judged
from mopd.evaluation.metrics import (
    Floats,
    forgetting,
    headroom_captured,
    interval,
    lower_bound,
    paired_bootstrap,
    quotient,
    retention,
    stream,
)
from mopd.evaluation.significance import paired_test

QUALITIES = ("repetition", "format_error", "lenient")


def domain_entry(
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
        {r: mean_of([s.mean(r, m) for s in scored]) for r in ROLES} for m in ("correct", "score")
    )
    base, teacher, student = (mean_of([mean_of(s.column(r)) for s in scored]) for r in ROLES)
    resampled = np.mean([s.resampled(replicates, seed) for s in scored], axis=0)
    gain_ci95 = interval(resampled[:, 1] - resampled[:, 0])
    change_ci95 = interval(resampled[:, 2] - resampled[:, 0])
    kept = retention(student, teacher)
    captured = headroom_captured(base, teacher, student, gain_lower_bound=gain_ci95[0])
    kept_ci95 = interval(retained_of(resampled)) if kept is not None else [None, None]
    captured_ci95 = interval(captured_of(resampled)) if captured is not None else [None, None]
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
        "only_format": only_format(scored, change_ci95, replicates, seed),
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


def only_format(
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
    return {"flagged": flagged, "change": mean_of(changes), "ci95": ci95}


def _seen_in_answers(sets: Sequence[Judged], roles: Sequence[str]) -> dict[str, Any]:
    """Means over all items (judged or not) of length, truncation and the `QUALITIES`, by role.

    A quality that some answer has no value of is null.
    """
    items = {r: [a for s in sets for a in s.answers[r]] for r in roles}

    def mean_by(quality: str, role: str) -> float | None:
        values = [getattr(a, quality) for a in items[role]]
        known = [float(v) for v in values if v is not None]
        return mean_of(known) if len(known) == len(values) else None

    return {
        "mean_response_tokens": {r: mean_of([a.response_tokens for a in items[r]]) for r in roles},
        "truncated_fraction": {
            r: mean_of([a.finish_reason == "length" for a in items[r]]) for r in roles
        },
        **{q: {r: mean_by(q, r) for r in roles} for q in QUALITIES},
    }


def forgetting_entry(
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
    base, student = (mean_of(judged.column(r)) for r in ("base", "student"))
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


def captured_of(resampled: Floats) -> Floats:
    """[replicates, (base, teacher, student)] -> [replicates] headroom captured, NaN: undefined."""
    return quotient(resampled[:, 2] - resampled[:, 0], resampled[:, 1] - resampled[:, 0])


def retained_of(resampled: Floats) -> Floats:
    """[replicates, (base, teacher, student)] -> [replicates] retention, NaN where undefined."""
    return quotient(resampled[:, 2], resampled[:, 1])


def mean_of(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
