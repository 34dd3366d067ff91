"""Phrases that error messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """``; did you mean 'x'?``, or the known names where none is near; empty if there are none.

    prefix: stands before the suggested name, e.g. ``teachers.math.``; not compared.
    """
    names = sorted(set(known))
    folded = {each.strip().casefold(): each for each in names}
    near = difflib.get_close_matches(name.strip().casefold(), list(folded), n=1)
    if near:
        return f"; did you mean {prefix + folded[near[0]]!r}?"
    return f"; known: {', '.join(names)}" if names else ""


def kind_of(value: Any) -> str:
    """What a value is, in a user's words."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"a {type(value).__name__}"


def unread(given: Any, names: Mapping[str, str], key: str) -> Iterator[str]:
    """`names`: field -> what it goes with. Fields that are set though nothing reads them."""
    for name, goes_with in names.items():
        if getattr(given, name) is not None:
            yield f"{key}.{name} goes with {goes_with} and has no effect here; leave it out"
