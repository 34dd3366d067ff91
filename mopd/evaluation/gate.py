"""A run's retention against bounds, for an exit code: `mopd report RUN --gate min_retention=0.97`.

By default what must hold is the *lower end* of each 95 % interval, so that a run passes only where
the items show it, not where they are too few to show the contrary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mopd.config.wording import nearest
from mopd.errors import ConfigError

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
        ConfigError: an unknown key, a bound that is no fraction, or none at all.
    """
    given: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
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

    A value that cannot be had (nothing judged, headroom not measurable) fails: it is not shown.

    Args:
        retention: the content of retention.json.
    """
    failed: list[str] = []
    held: list[str] = []

    def look(name: str, what: str, found: float | None, wanted: float, why: str) -> None:
        sign = "<" if what != "forgetting" else ">"
        if found is None:
            failed.append(f"{name}: {what} cannot be shown: {why}")
            return
        bad = found < wanted if what != "forgetting" else found > wanted
        kind = "" if gate.point else " at its 95% bound"
        line = f"{name}: {what} {found:.4f}{kind}"
        (failed if bad else held).append(f"{line} {sign if bad else 'within'} {wanted:g}")

    for name, entry in retention["domains"].items():
        why = entry.get("not_measurable_reason") or "no score"
        if gate.min_retention is not None:
            value = entry["retention"] if gate.point else entry["retention_lower"]
            look(name, "retention", value, gate.min_retention, why)
        if gate.min_headroom is not None:
            value = entry["headroom_captured"]
            if value is not None and not gate.point:
                value = entry["ci95"][0]
            look(name, "headroom captured", value, gate.min_headroom, why)
        if gate.max_forgetting is not None:
            value = _loss(entry, gate.point)
            look(name, "forgetting", value, gate.max_forgetting, why)
    if gate.max_forgetting is not None:
        for name, entry in retention.get("forgetting", {}).items():
            look(name, "forgetting", _loss(entry, gate.point), gate.max_forgetting, "no score")
    return failed, held


def _loss(entry: Mapping[str, Any], point: bool) -> float | None:
    """base - student: the point value, or its upper end."""
    if not point:
        lower = entry["change_lower"]
        return None if lower is None else -lower
    if entry["student"] is None or entry["base"] is None:
        return None
    return entry["base"] - entry["student"]
