"""A run's retention against bounds, for an exit code: `mopd report RUN --gate min_retention=0.97`.

By default what must hold is the *lower end* of each 95 % interval, so that a run passes only where
the items show it, not where they are too few to show the contrary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mopd.config.wording import nearest
from mopd.errors import ConfigError, DataError

FORGETTING = "forgetting (base - student)"
BOUNDS = ("min_retention", "min_headroom", "max_forgetting")


@dataclass(frozen=True)
class Gate:
    """What every domain must reach; None: not asked."""

    min_retention: float | None = None
    """student / teacher."""
    min_headroom: float | None = None
    """Headroom captured."""
    max_forgetting: float | None = None
    """base - student, on every set, with or without a teacher."""
    point: bool = False
    """Judge by the point values instead of the lower ends of their intervals."""


def parse_gate(text: str) -> Gate:
    """E.g. ``min_retention=0.97,max_forgetting=0.01`` or ``min_headroom=0.9,bound=point``.

    Raises:
        ConfigError: an unknown key, one given twice, a bound that is no fraction, or none at all.
    """
    given: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if ("point" if key == "bound" else key) in given:
            raise ConfigError(f"--gate: {key} is given twice")
        if key == "bound":
            if value not in ("lower", "point"):
                raise ConfigError(f"--gate bound={value!r}: expected lower or point")
            given["point"] = value == "point"
            continue
        if key not in BOUNDS:
            raise ConfigError(f"--gate: unknown {key!r}{nearest(key, [*BOUNDS, 'bound'])}")
        try:
            given[key] = float(value)
        except ValueError:
            raise ConfigError(f"--gate {part!r}: expected a number, such as {key}=0.97") from None
        if not 0 <= given[key] <= 10:
            raise ConfigError(
                f"--gate {part!r}: scores are fractions; expected a bound between 0 and 10"
            )
    if not set(given) & set(BOUNDS):
        raise ConfigError(f"--gate {text!r} asks for nothing; known bounds: {', '.join(BOUNDS)}")
    return Gate(**given)


def check_gate(retention: Mapping[str, Any], gate: Gate) -> tuple[list[str], list[str]]:
    """(what fails, what holds), one line a domain and bound.

    A value that cannot be had (nothing judged, headroom not measurable, no domain at all) fails:
    it is not shown.

    Args:
        retention: the content of retention.json.

    Raises:
        DataError: an entry lacks a value, or has one that is no finite number.
    """
    failed: list[str] = []
    held: list[str] = []

    def look(name: str, what: str, found: float | None, wanted: float, why: str) -> None:
        if found is None:
            failed.append(f"{name}: {what} cannot be shown: {why}")
            return
        at_most = what == FORGETTING
        bad = found > wanted if at_most else found < wanted
        kind = "" if gate.point else " at its 95% bound"
        sign = {True: ("<=", ">"), False: (">=", "<")}[at_most][bad]
        (failed if bad else held).append(f"{name}: {what} {found:.4f}{kind} {sign} {wanted:g}")

    if not retention["domains"]:
        failed.append("no domain has a score: nothing is shown")

    for name, entry in retention["domains"].items():
        why = entry.get("not_measurable_reason") or "no score"
        if gate.min_retention is not None:
            value = _number(entry, "retention" if gate.point else "retention_lower", name)
            look(name, "retention", value, gate.min_retention, why)
        if gate.min_headroom is not None:
            value = _number(entry, "headroom_captured" if gate.point else "headroom_lower", name)
            look(name, "headroom captured", value, gate.min_headroom, why)
        if gate.max_forgetting is not None:
            look(name, FORGETTING, _loss(entry, gate.point, name), gate.max_forgetting, why)
    if gate.max_forgetting is not None:
        for name, entry in retention.get("forgetting", {}).items():
            loss = _loss(entry, gate.point, name)
            look(name, FORGETTING, loss, gate.max_forgetting, "no score")
    return failed, held


def _loss(entry: Mapping[str, Any], point: bool, name: str) -> float | None:
    """base - student: the point value, or its upper end."""
    if not point:
        lower = _number(entry, "change_lower", name)
        return None if lower is None else -lower
    student, base = (_number(entry, role, name) for role in ("student", "base"))
    return None if student is None or base is None else base - student


def _number(entry: Mapping[str, Any], key: str, name: str) -> float | None:
    """A value of retention.json; DataError where it is missing or no finite number."""
    value = entry.get(key, "missing")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"retention.json: {name}: {key} is {value}, expected a finite number or null; write "
            "the file again with mopd evaluate"
        )
    return float(value)
