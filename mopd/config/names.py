"""Names of domains, teachers and sets: they name files and metrics. Pure reading."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

NAME = re.compile(r"\w[\w.-]*$")


def check_names(entries: Mapping[str, Any], section: str, what: str) -> Iterator[str]:
    """Names must read as one word, and differ by more than case: they name files and metrics."""
    seen: dict[str, str] = {}
    for name in entries:
        folded = name.strip().casefold()
        if name != name.strip() or not name:
            hint = f"; did you mean {name.strip()!r}?" if name.strip() else ""
            yield f"{section}: the {what} name {name!r} is empty or has blanks around it{hint}"
        elif not NAME.match(name):
            yield (
                f"{section}: the {what} name {name!r} may hold letters, digits, '_', '-' and '.' "
                "only, and starts with a letter, a digit or '_'"
            )
        if folded in seen:
            yield (
                f"{section}: {name!r} and {seen[folded]!r} differ only in case or blanks; "
                "give them clearly different names"
            )
        seen.setdefault(folded, name)
