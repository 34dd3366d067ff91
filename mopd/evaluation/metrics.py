"""How much of what the teachers know did the student keep? Retention metrics, numpy only.

Scores are fractions in [0, 1] over held-out items. Three roles answer the same items of a domain:
the *base* (the student before training), the domain's *teacher*, and the *student* after it.

    retention(d)          student_d / teacher_d
    headroom captured(d)  (student_d - base_d) / (teacher_d - base_d)       arXiv 2606.30406
    recovery              the same quotient on the macro means of all domains  (Open-MOPD)
    forgetting(d)         student_d - base_d on a held-out domain that has no teacher

Headroom captured divides by a difference of two estimates, so it is only reported where that
difference is *clearly* above zero: where the lower end of its paired bootstrap interval is > 0
(95 %, two-sided, over items). Elsewhere it is ``None`` and the entry says why.

Intervals are percentile intervals of a paired bootstrap: one resample of the items serves all three
roles, because the same items are hard for all of them. A replicate in which a quotient has no
meaning (denominator <= 0) is counted as lying beyond *both* ends, so that leaving it out cannot
make an interval look narrower; an end that falls among such replicates is ``None``. Like every
percentile bootstrap these intervals collapse where all items agree (200 of 200 right gives [1, 1]).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mopd.errors import DataError

Floats = NDArray[np.float64]
Role = Literal["base", "teacher", "student"]
Measure = Literal["correct", "score"]
Results = Mapping[str, Mapping[str, Sequence["ItemResult"]]]
"""role -> domain -> the role's answers to that domain's held-out items."""

ROLES: tuple[Role, ...] = ("base", "teacher", "student")
LEVEL = 0.95
_CHUNK = 250  # bootstrap replicates resampled at once: bounds memory at 250 * n counts


@dataclass(frozen=True, slots=True)
class ItemResult:
    """One model's answer to one held-out item."""

    item_id: str
    correct: bool | None
    """Exact match; None where it could not be judged (no verifier, or the verifier failed)."""
    score: float | None
    """Partial credit in [0, 1]; None exactly where ``correct`` is."""
    response_tokens: int
    finish_reason: str
    """``stop``, ``length`` (cut off at the response limit) or ``abort``."""


# --- The metrics ----------------------------------------------------------------------------------


def retention(student: float, teacher: float) -> float | None:
    """student / teacher; None when the teacher scores 0 (there is nothing to retain)."""
    return student / teacher if teacher > 0 else None


def headroom_captured(
    base: float, teacher: float, student: float, *, gain_lower_bound: float | None = None
) -> float | None:
    """(student - base) / (teacher - base), or None where that cannot be measured.

    Args:
        gain_lower_bound: lower end of the interval of ``teacher - base``, where items are known
            (`gain_interval`); None judges by the point values alone.
    """
    gain = teacher - base
    if gain <= 0 or (gain_lower_bound is not None and gain_lower_bound <= 0):
        return None
    return (student - base) / gain


def domain_means(
    benchmarks: Mapping[str, float], domains: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Average a domain's benchmarks first, so that a domain with more of them weighs no more.

    Args:
        benchmarks: benchmark -> score.
        domains: domain -> its benchmarks.
    """
    missing = sorted({b for names in domains.values() for b in names} - set(benchmarks))
    if missing:
        raise DataError(f"no score for benchmark(s) {missing}; got {sorted(benchmarks)}")
    return {d: _mean([benchmarks[b] for b in names]) for d, names in domains.items()}


def mean_headroom_captured(
    base: Mapping[str, float], teacher: Mapping[str, float], student: Mapping[str, float]
) -> float | None:
    """Headroom captured of each domain, then the mean over the domains where it is measurable."""
    captured = [headroom_captured(base[d], teacher[d], student[d]) for d in _same_keys(
        base, teacher, student)]
    measured = [c for c in captured if c is not None]
    return _mean(measured) if measured else None


def recovery(
    base: Mapping[str, float], teacher: Mapping[str, float], student: Mapping[str, float]
) -> float | None:
    """Headroom captured of the macro means: one quotient of averages, not an average of quotients.

    A domain without headroom spoils its own quotient but only dilutes this one.
    """
    names = _same_keys(base, teacher, student)
    return headroom_captured(*(_mean([m[d] for d in names]) for m in (base, teacher, student)))


def forgetting(base: float, student: float) -> float:
    """student - base on a domain without a teacher; negative: something was forgotten."""
    return student - base


# --- The bootstrap --------------------------------------------------------------------------------


def paired_bootstrap(values: Floats, *, replicates: int, seed: int) -> Floats:
    """Means of resampled items, every column resampled with the same items.

    Args:
        values: [n, k] one row an item, one column a model.

    Returns:
        [replicates, k] float64.
    """
    n = values.shape[0]
    if n < 1 or replicates < 1:
        raise ValueError(f"need at least one item and one replicate, got {n} and {replicates}")
    rng = np.random.default_rng(seed)
    means: list[Floats] = []
    for start in range(0, replicates, _CHUNK):
        counts = rng.multinomial(n, np.full(n, 1 / n), size=min(_CHUNK, replicates - start))
        means.append(counts @ values / n)
    return np.concatenate(means)


def interval(replicates: Floats, *, level: float = LEVEL) -> list[float | None]:
    """[lo, hi] percentile interval; NaN replicates (undefined) lie beyond both ends.

    An end that falls among undefined replicates is None.
    """
    undefined = np.isnan(replicates)
    tail = (1 - level) / 2
    low = np.quantile(np.where(undefined, -np.inf, replicates), tail, method="lower")
    high = np.quantile(np.where(undefined, np.inf, replicates), 1 - tail, method="higher")
    return [float(x) if math.isfinite(x) else None for x in (low, high)]


def _quotient(numerator: Floats, denominator: Floats) -> Floats:
    """Elementwise; NaN where the denominator is not positive. The division never sees those."""
    defined = denominator > 0
    return np.where(defined, numerator / np.where(defined, denominator, 1.0), np.nan)


# --- One result for a run -------------------------------------------------------------------------


def build_retention(
    results: Results,
    *,
    measure: Measure = "correct",
    replicates: int = 2000,
    seed: int = 0,
    majority: Mapping[str, float] | None = None,
    without_teacher: Collection[str] = (),
) -> dict[str, Any]:
    """The content of ``retention.json``.

    Stable keys: ``domains.NAME.{base, teacher, student, retention, headroom_captured, n, ci95}``
    and ``mean_headroom_captured``. ``ci95`` is the interval of ``headroom_captured`` and, where
    that is null, of ``retention``; ``ci95_of`` says which. ``n`` counts the items behind the
    scores: those that all three roles' answers could be judged on (``n_unscored`` the others). A
    domain without any such item (no verifier) has ``n`` 0, null scores and a
    ``not_measurable_reason``. Every number is finite; what is undefined is null. Beside these:
    ``gain_ci95`` of teacher - base, ``change_ci95`` of student - base, ``ROLE_ci95``.

    Args:
        results: role -> domain -> answers, for the roles base, teacher and student.
        measure: what base, teacher and student are the mean of; both measures' means are in
            ``exact`` and ``partial`` either way.
        replicates, seed: of the bootstrap. A domain's own stream depends on its name alone.
        majority: domain -> score of always giving the most frequent answer.
        without_teacher: held-out domains that only base and student answer: ``forgetting``.

    Raises:
        DataError: a role or domain is missing, items differ between roles or occur twice, or a
            score is not in [0, 1]; the text names role, domain and items.
    """
    domains = _check_domains(results, without_teacher)
    entries: dict[str, dict[str, Any]] = {}
    samples: dict[str, Floats] = {}  # domain -> [replicates, 3] means of base, teacher, student
    for name in domains:
        entries[name], resampled = _domain_entry(
            name, {r: results[r][name] for r in ROLES}, measure, replicates, seed
        )
        entries[name]["majority_baseline"] = None if majority is None else majority.get(name)
        if resampled is not None:
            samples[name] = resampled
    scored = [n for n in domains if n in samples]
    measured = [n for n in domains if entries[n]["headroom_captured"] is not None]
    retained = [n for n in scored if entries[n]["retention"] is not None]
    points: dict[str, dict[str, float]] = {
        r: {n: entries[n][r] for n in scored} for r in ROLES
    }
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
            name: _forgetting_entry(name, results, measure, replicates, seed)
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
    name: str,
    answers: Mapping[str, Sequence[ItemResult]],
    measure: Measure,
    replicates: int,
    seed: int,
) -> tuple[dict[str, Any], Floats | None]:
    """One domain's entry, and its [replicates, 3] resampled means (None if nothing was judged)."""
    ids = _common_ids(name, answers)
    by_role = {role: {a.item_id: a for a in items} for role, items in answers.items()}
    judged = [i for i in ids if all(by_role[r][i].correct is not None for r in answers)]
    about: dict[str, Any] = {
        "n": len(judged),
        "n_unscored": len(ids) - len(judged),
        "mean_response_tokens": {
            r: _mean([a.response_tokens for a in items]) for r, items in answers.items()
        },
        "truncated_fraction": {
            r: _mean([a.finish_reason == "length" for a in items]) for r, items in answers.items()
        },
    }
    if not judged:
        return {**_UNSCORED, **about}, None

    exact, partial = (
        {r: _mean([_value(by_role[r][i], m) for i in judged]) for r in answers}
        for m in ("correct", "score")
    )
    values = np.array([[_value(by_role[r][i], measure) for r in ROLES] for i in judged])
    base, teacher, student = (float(x) for x in values.mean(axis=0))
    resampled = paired_bootstrap(values, replicates=replicates, seed=_stream(seed, name))
    gain_ci95 = interval(resampled[:, 1] - resampled[:, 0])
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
    return {
        "base": base,
        "teacher": teacher,
        "student": student,
        "retention": kept,
        "headroom_captured": captured,
        "n": about.pop("n"),
        "ci95": captured_ci95 if captured is not None else kept_ci95,
        "ci95_of": of,
        "retention_ci95": kept_ci95,
        "gain_ci95": gain_ci95,
        "change_ci95": interval(resampled[:, 2] - resampled[:, 0]),
        **{f"{r}_ci95": interval(resampled[:, k]) for k, r in enumerate(ROLES)},
        "exact": exact,
        "partial": partial,
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
    "gain_ci95": [None, None],
    "change_ci95": [None, None],
    **{f"{r}_ci95": [None, None] for r in ROLES},
    "exact": dict.fromkeys(ROLES),
    "partial": dict.fromkeys(ROLES),
    "not_measurable_reason": "no answer could be judged (the domain has no verifier, or it failed)",
}


def _forgetting_entry(
    name: str, results: Results, measure: Measure, replicates: int, seed: int
) -> dict[str, Any]:
    answers = {r: results[r][name] for r in ("base", "student")}
    ids = _common_ids(name, answers)
    by_role = {role: {a.item_id: a for a in items} for role, items in answers.items()}
    judged = [i for i in ids if all(by_role[r][i].correct is not None for r in answers)]
    entry: dict[str, Any] = {"n": len(judged), "n_unscored": len(ids) - len(judged)}
    if not judged:
        return {"base": None, "student": None, "forgetting": None, "ci95": [None, None], **entry}
    values = np.array([[_value(by_role[r][i], measure) for r in answers] for i in judged])
    base, student = (float(x) for x in values.mean(axis=0))
    resampled = paired_bootstrap(values, replicates=replicates, seed=_stream(seed, name))
    return {
        "base": base,
        "student": student,
        "forgetting": forgetting(base, student),
        "ci95": interval(resampled[:, 1] - resampled[:, 0]),
        **entry,
    }


# --- Small parts ----------------------------------------------------------------------------------


def _captured(resampled: Floats) -> Floats:
    """[replicates, (base, teacher, student)] -> [replicates] headroom captured, NaN: undefined."""
    return _quotient(resampled[:, 2] - resampled[:, 0], resampled[:, 1] - resampled[:, 0])


def _retained(resampled: Floats) -> Floats:
    """[replicates, (base, teacher, student)] -> [replicates] retention, NaN where undefined."""
    return _quotient(resampled[:, 2], resampled[:, 1])


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


def _stream(seed: int, name: str) -> int:
    """A domain's own seed, so that adding a domain leaves the others' intervals as they were."""
    return (seed << 32) + zlib.crc32(name.encode())


def _value(answer: ItemResult, measure: str) -> float:
    value = answer.correct if measure == "correct" else answer.score
    assert value is not None  # judged items only
    return float(value)


def _same_keys(*maps: Mapping[str, float]) -> list[str]:
    first = list(maps[0])
    for other in maps[1:]:
        if set(other) != set(first):
            raise DataError(
                f"the roles were scored on different domains: {sorted(first)} and {sorted(other)}"
            )
    if not first:
        raise DataError("no domain to average over")
    return first


def _check_domains(results: Results, without_teacher: Collection[str]) -> list[str]:
    """Domains that have a teacher, in the base's order."""
    if set(results) != set(ROLES):
        raise DataError(f"expected results of the roles {list(ROLES)}, got {sorted(results)}")
    wanted = {r: set(results[r]) - set(without_teacher) for r in ROLES}
    for role in ("teacher", "student"):
        if wanted[role] != wanted["base"]:
            raise DataError(
                f"evaluation of {role} and base cover different domains: only {role} has "
                f"{sorted(wanted[role] - wanted['base'])}, only base has "
                f"{sorted(wanted['base'] - wanted[role])}"
            )
    for role in ("base", "student"):
        missing = sorted(set(without_teacher) - set(results[role]))
        if missing:
            raise DataError(f"{role} was not evaluated on the domain(s) {missing}")
    if not wanted["base"]:
        raise DataError("no domain was evaluated")
    return [d for d in results["base"] if d in wanted["base"]]


def _common_ids(name: str, answers: Mapping[str, Sequence[ItemResult]]) -> list[str]:
    """The domain's item ids, sorted, once it is proven that all roles answered just these."""
    ids: dict[str, list[str]] = {}
    for role, items in answers.items():
        ids[role] = sorted(a.item_id for a in items)
        twice = sorted({a for a, b in zip(ids[role], ids[role][1:], strict=False) if a == b})
        if twice:
            raise DataError(
                f"domain {name!r}: {role} answered item(s) more than once: {_few(twice)}"
            )
        for answer in items:
            _check_item(name, role, answer)
    first = next(iter(answers))
    for role, own in ids.items():
        if own != ids[first]:
            raise DataError(
                f"domain {name!r}: {role} and {first} answered different items, so they cannot be "
                f"compared: {_few(sorted(set(own) - set(ids[first])))} only by {role}, "
                f"{_few(sorted(set(ids[first]) - set(own)))} only by {first}"
            )
    if not ids[first]:
        raise DataError(f"domain {name!r}: no held-out item was evaluated")
    return ids[first]


def _check_item(name: str, role: str, answer: ItemResult) -> None:
    where = f"domain {name!r}, {role}, item {answer.item_id!r}"
    if (answer.correct is None) != (answer.score is None):
        raise DataError(f"{where}: correct={answer.correct} but score={answer.score}; an item is "
                        "either judged (both) or not (neither)")
    if answer.score is not None and not 0.0 <= answer.score <= 1.0:
        raise DataError(f"{where}: score {answer.score} is not in [0, 1]")


def _few(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(repr(n) for n in names[:limit])
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"[{shown}{rest}]"
