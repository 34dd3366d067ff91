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

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mopd.errors import DataError

Floats = NDArray[np.float64]
LEVEL = 0.95
_CHUNK = 250  # bootstrap replicates resampled at once: bounds memory at 250 * n counts


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


def mean_headroom_captured(
    base: Mapping[str, float], teacher: Mapping[str, float], student: Mapping[str, float]
) -> float | None:
    """Headroom captured of each domain, then the mean over the domains where it is measurable."""
    captured = [
        headroom_captured(base[d], teacher[d], student[d])
        for d in _same_keys(base, teacher, student)
    ]
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


def lower_bound(
    low: float | None, value: float | None, n: int, *, none_worse: bool, unit: float = 1.0
) -> float | None:
    """A lower bound for decisions (the gate), which knows that losses may have gone unseen.

    Where the student is worse on none of the items, resampling them never shows it worse either;
    but up to 1 - 0.025^(1/n) of all items could be such and n of them still show none (97.5 %, the
    exact binomial bound; about 3.7 / n). The bound is at most the value less that much.

    Args:
        low: lower end of the bootstrap interval.
        none_worse: whether the student scored below what it is compared with on no item.
        unit: what a loss of one whole score takes off the value (1 / teacher of a retention).
    """
    if low is None or value is None:
        return None
    unseen = 1.0 - ((1 - LEVEL) / 2) ** (1.0 / n) if none_worse and n else 0.0
    return min(low, value - unit * unseen) if unseen else low


def stream(seed: int, name: str) -> int:
    """A set's own seed, so that adding a set leaves the others' intervals as they were."""
    return (seed << 32) + zlib.crc32(name.encode())


def quotient(numerator: Floats, denominator: Floats) -> Floats:
    """Elementwise; NaN where the denominator is not positive. The division never sees those."""
    defined = denominator > 0
    return np.where(defined, numerator / np.where(defined, denominator, 1.0), np.nan)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


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
