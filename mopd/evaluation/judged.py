"""One set's answers of several models, matched by item and checked before any mean is taken."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mopd.errors import DataError
from mopd.evaluation.items import ROLES, ItemResult, Measure, Results
from mopd.evaluation.metrics import Floats, paired_bootstrap, stream


@dataclass(frozen=True)
class Judged:
    """One set's answers, matched by item, with the items that every role could be judged on."""

    name: str
    roles: tuple[str, ...]
    answers: Mapping[str, Sequence[ItemResult]]
    by_role: Mapping[str, Mapping[str, ItemResult]]
    ids: list[str]
    """Judged items, sorted."""
    values: Floats
    """[n, roles] of the measure."""
    n_unscored: int

    def column(self, role: str) -> list[float]:
        return [float(v) for v in self.values[:, self.roles.index(role)]]

    def mean(self, role: str, measure: str) -> float:
        return _mean([_value(self.by_role[role][i], measure) for i in self.ids])

    def resampled(self, replicates: int, seed: int) -> Floats:
        """[replicates, roles] means of resampled items."""
        return paired_bootstrap(self.values, replicates=replicates, seed=stream(seed, self.name))

    def scores(self) -> dict[str, Any]:
        means = {r: (_mean(self.column(r)) if self.ids else None) for r in self.roles}
        return {**means, "n": len(self.ids), "n_unscored": self.n_unscored}


def judged_set(name: str, answers: Mapping[str, Sequence[ItemResult]], measure: Measure) -> Judged:
    """The answers of one set, role -> items, once it is proven that all roles answered the same.

    Raises:
        DataError: they did not, an item is there twice, or a score is not in [0, 1].
    """
    ids = _common_ids(name, answers)
    by_role = {role: {a.item_id: a for a in items} for role, items in answers.items()}
    judged = [i for i in ids if all(by_role[r][i].correct is not None for r in answers)]
    rows = [[_value(by_role[r][i], measure) for r in answers] for i in judged]
    values = np.array(rows, dtype=np.float64).reshape(len(judged), len(answers))
    return Judged(name, tuple(answers), answers, by_role, judged, values, len(ids) - len(judged))


def _value(answer: ItemResult, measure: str) -> float:
    value = answer.correct if measure == "correct" else answer.score
    assert value is not None  # judged items only
    return float(value)


def check_sets(results: Results, without_teacher: Collection[str]) -> list[str]:
    """Sets that have a teacher, in the base's order."""
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
        raise DataError(
            f"{where}: correct={answer.correct} but score={answer.score}; an item is "
            "either judged (both) or not (neither)"
        )
    if answer.score is not None and not 0.0 <= answer.score <= 1.0:
        raise DataError(f"{where}: score {answer.score} is not in [0, 1]")


def _few(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(repr(n) for n in names[:limit])
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"[{shown}{rest}]"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
