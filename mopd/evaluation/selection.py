"""Which of a run's evaluated students is the best, whether to go on, and what is being forgotten.

Everything is decided from the recorded answers alone, so that a resumed run decides as the run
would have without the interruption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mopd.evaluation.items import Answers, ItemResult
from mopd.evaluation.metrics import headroom_captured, interval, paired_bootstrap, retention

CRITERIA = ("worst_headroom", "mean_headroom", "worst_retention")


def set_means(answers: Answers) -> dict[str, float]:
    """Set -> exact-match rate over the judged items; sets that nothing judged are left out."""
    means = {}
    for name, items in answers.items():
        judged = [float(item.correct) for item in items if item.correct is not None]
        if judged:
            means[name] = math.fsum(judged) / len(judged)
    return means


def domain_rates(answers: Answers, domains: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Domain -> mean of its sets' rates; domains without a judged set are left out."""
    means = set_means(answers)
    rates = {}
    for name, sets in domains.items():
        known = [means[s] for s in sets if s in means]
        if known:
            rates[name] = math.fsum(known) / len(known)
    return rates


def criterion_value(
    criterion: str,
    base: Mapping[str, float],
    teacher: Mapping[str, float],
    student: Mapping[str, float],
) -> tuple[float, str] | None:
    """(value, the domain it hangs on) of one student; None where no domain can be measured.

    `worst_headroom` and `mean_headroom` look at the domains whose teacher is above the base in
    points; a domain without headroom would decide by noise.
    """
    values: dict[str, float] = {}
    for name in student:
        if name not in base or name not in teacher:
            continue
        if criterion == "worst_retention":
            value = retention(student[name], teacher[name])
        else:
            value = headroom_captured(base[name], teacher[name], student[name])
        if value is not None:
            values[name] = value
    if not values:
        return None
    worst = min(values, key=lambda n: values[n])
    if criterion == "mean_headroom":
        return math.fsum(values.values()) / len(values), worst
    return values[worst], worst


@dataclass
class Selection:
    """The evaluations of one run so far.

    Args:
        criterion: one of `CRITERIA`, or ``off``.
        patience: evaluations in a row that may pass without a better student; 0: any number.
        domains: domain -> its sets.
    """

    criterion: str
    patience: int
    domains: Mapping[str, Sequence[str]]
    base: Answers = field(default_factory=dict)
    teacher: Answers = field(default_factory=dict)
    values: dict[int, tuple[float, str]] = field(default_factory=dict)
    """step -> value and the domain it hangs on."""

    def add(self, step: int, student: Answers) -> bool:
        """Note the evaluation after `step` steps; whether it is the best so far."""
        if self.criterion == "off":
            return False
        found = criterion_value(
            self.criterion,
            domain_rates(self.base, self.domains),
            domain_rates(self.teacher, self.domains),
            domain_rates(student, self.domains),
        )
        if found is None:
            return False
        best = self.best
        self.values[step] = found
        return best is None or found[0] > self.values[best][0]

    @property
    def best(self) -> int | None:
        """Step of the best student; of equals the earliest."""
        if not self.values:
            return None
        return max(sorted(self.values), key=lambda step: self.values[step][0])

    @property
    def exhausted(self) -> bool:
        """Whether the run should end: the last `patience` evaluations brought nothing better."""
        if not self.patience or self.best is None:
            return False
        return sum(step > self.best for step in self.values) >= self.patience

    def describe_best(self) -> str:
        """E.g. ``step 120: worst headroom 0.951 (caesar)``."""
        assert self.best is not None
        value, domain = self.values[self.best]
        return f"step {self.best}: {self.criterion.replace('_', ' ')} {value:.3f} ({domain})"


def forgetting_warnings(
    step: int, base: Answers, student: Answers, *, replicates: int = 500, seed: int = 0
) -> list[str]:
    """One line for each set on which the student is clearly worse than its base."""
    lines = []
    for name, items in student.items():
        own = {item.item_id: item.correct for item in base.get(name, ())}
        change = _change(items, own, replicates, seed)
        if change is not None and change[2] < 0:
            before, after, high = change
            lines.append(
                f"{name}: forgotten after step {step}: {after:.1%} of its held-out prompts, the "
                f"base {before:.1%} (95% interval of the change ends at {100 * high:+.1f} points)"
            )
    return lines


def _change(
    items: Sequence[ItemResult], own: Mapping[str, bool | None], replicates: int, seed: int
) -> tuple[float, float, float] | None:
    """(base, student, upper end of student - base) on the items judged of both."""
    pairs = [
        (float(b), float(item.correct))
        for item in items
        if item.correct is not None and (b := own.get(item.item_id)) is not None
    ]
    if not pairs:
        return None
    values = np.array(pairs)
    means = paired_bootstrap(values, replicates=replicates, seed=seed)
    high = interval(means[:, 1] - means[:, 0])[1]
    assert high is not None
    before, after = values.mean(axis=0)
    return float(before), float(after), high


STARVING = 0.25
"""A domain whose part of the gradient is below this share of its part of the prompts starves."""


def starvation_warnings(
    metrics: Sequence[Mapping[str, float | None]], weights: Mapping[str, float]
) -> list[str]:
    """Domains that hardly move the student although they are as far from their teacher as others.

    Under a token mean a domain of short answers does not train (Open-MOPD: 20 % of the prompts, 1 %
    of the gradient, 36 % of the headroom captured).

    Args:
        metrics: the last steps' ``domain/NAME/gradient_share`` and ``domain/NAME/reverse_kl``.
        weights: domain -> share of the prompts drawn, not normalised.
    """

    def mean(domain: str, key: str) -> float | None:
        values = [m.get(f"domain/{domain}/{key}") for m in metrics]
        known = [v for v in values if v is not None]
        return math.fsum(known) / len(known) if known else None

    drawn = math.fsum(weights.values())
    shares = {d: mean(d, "gradient_share") for d, weight in weights.items() if weight > 0}
    gaps = {d: gap for d in shares if (gap := mean(d, "reverse_kl")) is not None}
    if len(gaps) < 2 or not math.fsum(s or 0.0 for s in shares.values()):
        return []
    # Of the others: a domain must not set the bar that it is held to.
    lines = []
    for name, gap in gaps.items():
        others = [other for domain, other in gaps.items() if domain != name]
        share, meant = shares[name] or 0.0, weights[name] / drawn
        if share < STARVING * meant and gap >= sorted(others)[len(others) // 2]:
            lines.append(
                f"{name}: starves: {meant:.0%} of the prompts but {share:.1%} of the gradient, and "
                f"its gap to the teacher ({gap:.3f} nats a token) is not smaller than the others'; "
                "balance the domains, or average over sequences instead of tokens"
            )
    return lines
